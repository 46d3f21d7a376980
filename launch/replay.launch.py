"""ros2 launch spirula_ros replay.launch.py bag:=recording image:=/camera/color/image_raw ...

train.launch.py with a recording that must be given. Without rosbag2, and for pictures and a report at the end, use
`spirula replay BAG [--via-ros]`."""
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch_ros.substitutions import FindPackageShare


def generate_launch_description():
    return LaunchDescription([
        DeclareLaunchArgument("bag", description="rosbag2 recording"),
        IncludeLaunchDescription(PythonLaunchDescriptionSource([FindPackageShare("spirula_ros"), "/launch/train.launch.py"]))])
