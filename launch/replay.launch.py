"""ros2 launch spirula_ros replay.launch.py bag:=recording image:=/camera/color/image_raw ...

`ros2 bag play` into the node on simulated time, with every argument of train.launch.py. Without rosbag2, and for pictures
and a report at the end, use `spirula replay BAG [--via-ros]`."""
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, ExecuteProcess, IncludeLaunchDescription, LogInfo
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration
from launch_ros.substitutions import FindPackageShare


def generate_launch_description():
    return LaunchDescription([
        DeclareLaunchArgument("bag", description="rosbag2 recording"),
        DeclareLaunchArgument("rate", default_value="1.0", description="speed of the replay"),
        DeclareLaunchArgument("use_sim_time", default_value="true", description="take the time from /clock"),
        IncludeLaunchDescription(PythonLaunchDescriptionSource([FindPackageShare("spirula_ros"), "/launch/train.launch.py"])),
        ExecuteProcess(cmd=["ros2", "bag", "play", LaunchConfiguration("bag"), "--rate", LaunchConfiguration("rate"), "--clock",
                            "--delay", "5"],  # for the node to load its engine and to be discovered
                       output="screen", on_exit=LogInfo(msg="the recording has ended; the node goes on training: stop it with Ctrl-C"))])
