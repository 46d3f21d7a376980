"""ros2 launch spirula_ros zed.launch.py [driver:=true]

Stereolabs ZED (zed_wrapper), with its own visual-inertial odometry.
train.launch.py with sensor:=zed; what is listened to stands in config/zed.yaml, with its sources."""
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch_ros.substitutions import FindPackageShare


def generate_launch_description():
    return LaunchDescription([
        DeclareLaunchArgument("sensor", default_value="zed", description="the configuration of that name is taken"),
        IncludeLaunchDescription(PythonLaunchDescriptionSource([FindPackageShare("spirula_ros"), "/launch/train.launch.py"]))])
