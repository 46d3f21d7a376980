"""What `ros2 launch FILE name:=value ..` and `ros2 launch FILE --show-args` do, for tests: python launch_file.py FILE ..

ros2launch has no wheel; this uses the same classes of `launch`. Run it with the environment of the fixture `launch_env`.
"""
import sys

from launch import LaunchContext, LaunchDescription, LaunchService
from launch.actions import IncludeLaunchDescription
from launch.launch_description_sources import AnyLaunchDescriptionSource


def show_arguments(path: str) -> None:
    description = AnyLaunchDescriptionSource(path).get_launch_description(LaunchContext())
    for argument in description.get_launch_arguments():
        default = "".join(part.describe() for part in argument.default_value) if argument.default_value is not None else "required"
        print(f"{argument.name}: {argument.description} (default: {default})")


def launch(path: str, arguments: list[str]) -> int:
    pairs = [tuple(argument.split(":=", 1)) for argument in arguments]
    service = LaunchService(argv=arguments)
    service.include_launch_description(
        LaunchDescription([IncludeLaunchDescription(AnyLaunchDescriptionSource(path), launch_arguments=pairs)]))
    return service.run()


if __name__ == "__main__":
    _, file, *rest = sys.argv
    sys.exit(show_arguments(file) if rest == ["--show-args"] else launch(file, rest))
