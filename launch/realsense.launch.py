"""ros2 launch spirula_ros realsense.launch.py [driver:=true]

Intel RealSense with depth (realsense2_camera); poses from odometry:  pose:=/odom.
train.launch.py with sensor:=realsense; what is listened to stands in config/realsense.yaml, with its sources."""
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch_ros.substitutions import FindPackageShare


def generate_launch_description():
    return LaunchDescription([
        DeclareLaunchArgument("sensor", default_value="realsense", description="the configuration of that name is taken"),
        IncludeLaunchDescription(PythonLaunchDescriptionSource([FindPackageShare("spirula_ros"), "/launch/train.launch.py"]))])
