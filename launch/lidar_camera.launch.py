"""ros2 launch spirula_ros lidar_camera.launch.py [image:=.. points:=.. pose:=..]

a camera and a lidar, calibrated on /tf_static, and lidar odometry.
train.launch.py with sensor:=lidar_camera; what is listened to stands in config/lidar_camera.yaml, with its sources."""
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch_ros.substitutions import FindPackageShare


def generate_launch_description():
    return LaunchDescription([
        DeclareLaunchArgument("sensor", default_value="lidar_camera", description="the configuration of that name is taken"),
        IncludeLaunchDescription(PythonLaunchDescriptionSource([FindPackageShare("spirula_ros"), "/launch/train.launch.py"]))])
