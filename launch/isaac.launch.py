"""ros2 launch spirula_ros isaac.launch.py [driver:=true]

Intel RealSense with the odometry of NVIDIA's isaac_ros_visual_slam.
train.launch.py with sensor:=isaac; what is listened to stands in config/isaac.yaml, with its sources."""
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch_ros.substitutions import FindPackageShare


def generate_launch_description():
    return LaunchDescription([
        DeclareLaunchArgument("sensor", default_value="isaac", description="the configuration of that name is taken"),
        IncludeLaunchDescription(PythonLaunchDescriptionSource([FindPackageShare("spirula_ros"), "/launch/train.launch.py"]))])
