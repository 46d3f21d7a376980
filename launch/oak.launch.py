"""ros2 launch spirula_ros oak.launch.py [driver:=true]

Luxonis OAK-D (depthai_ros_driver), with its own visual-inertial odometry.
train.launch.py with sensor:=oak; what is listened to stands in config/oak.yaml, with its sources."""
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch_ros.substitutions import FindPackageShare


def generate_launch_description():
    return LaunchDescription([
        DeclareLaunchArgument("sensor", default_value="oak", description="the configuration of that name is taken"),
        IncludeLaunchDescription(PythonLaunchDescriptionSource([FindPackageShare("spirula_ros"), "/launch/train.launch.py"]))])
