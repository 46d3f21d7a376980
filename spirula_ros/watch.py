"""Why no frame comes: every input topic with its publishers, their QoS against ours, what arrived, and what was dropped."""
from __future__ import annotations

from collections import Counter

from rclpy.qos import QoSCompatibility, QoSPolicyKind, QoSProfile, qos_check_compatible

from .convert import MASK_NAME
from .inputs import Input
from .intake import InputState, Intake
from .pointcloud import NOT_SUPPORTED

STATE_OF = {"compressed": "image", "odom": "pose", "tf_static": "tf"}  # Input.kind -> InputState.kind

LOST_HINT = ("messages were lost on the way: with Fast DDS's defaults images hardly get through. Start the process that PUBLISHES them with "
             "FASTDDS_DEFAULT_PROFILES_FILE=<prefix>/share/spirula_ros/config/fastdds.xml")


def describe_qos(qos: QoSProfile) -> str:
    return f"{qos.reliability.name.lower()}, {qos.durability.name.lower()}"


def policy_name(kind: int) -> str:
    try:
        return QoSPolicyKind(kind).name.lower()
    except ValueError:
        return f"policy {kind}"


def describe_publishers(node, inputs: list[Input], source: Input) -> str:
    """One line: who publishes, and whether we can hear them."""
    infos = node.get_publishers_info_by_topic(source.topic)
    if not infos:
        taken = {other.topic for other in inputs}
        same = sorted(name for name, types in node.get_topic_names_and_types()
                      if name not in taken and bool(MASK_NAME.search(name)) <= (source.kind == "mask") and source.type_name in types and node.count_publishers(name) and not name.startswith(node.get_fully_qualified_name() + "/"))
        offer = f"; {source.type_name} is published on {', '.join(same[:4])}" if same else ""
        return f"NO PUBLISHER (parameter {source.parameter}){offer}"
    parts, counts = [], Counter()
    for info in infos:
        who = f"{info.node_namespace.rstrip('/')}/{info.node_name}"
        verdict, reason = qos_check_compatible(info.qos_profile, source.qos)
        if info.topic_type != source.type_name:
            remedy = f" ({NOT_SUPPORTED[info.topic_type]})" if info.topic_type in NOT_SUPPORTED else ""
            parts.append(f"{who} sends {info.topic_type}: WRONG TYPE{remedy}")
        elif verdict == QoSCompatibility.ERROR:
            parts.append(f"{who} is {describe_qos(info.qos_profile)}: QOS INCOMPATIBLE with ours ({describe_qos(source.qos)}): {reason.strip('; ')}")
        else:
            counts[f"{who} is {describe_qos(info.qos_profile)}: compatible"] += 1
    parts += [text if n == 1 else f"{text} ({n}x)" for text, n in counts.items()]
    return f"{len(infos)} publisher{'s' * (len(infos) > 1)} ({'; '.join(parts)})"


def describe_input(node, inputs: list[Input], source: Input, state: InputState) -> str:
    line = f"{source.topic} [{source.type_name}]: {describe_publishers(node, inputs, source)}; received {state.count}"
    if state.count:
        line += f" ({state.rate_hz:.1f} Hz), newest {state.age_s:.1f} s ago with stamp {state.last_stamp_ns / 1e9:.3f}"
    if state.bad:
        line += f", UNUSABLE: {listed(state.bad)}"
    if source.lost:
        line += f", lost on the way: {source.lost}"
    return line


def state_of(source: Input, states: dict[tuple[str, str], InputState]) -> InputState:
    """By (kind, camera); the points of one lidar are with each of several cameras."""
    kind = STATE_OF.get(source.kind, source.kind)
    return states.get((kind, source.camera)) or next(state for (of, _), state in states.items() if of == kind)


def twins(node) -> str:
    """What to say when another node has this one's name; else empty."""
    own = node.get_fully_qualified_name()
    n = sum(f"{namespace.rstrip('/')}/{name}" == own for name, namespace in node.get_node_names_and_namespaces())
    return "" if n < 2 else (f"{n} nodes are called {own}: they publish on the same topics, and services reach either; give each a namespace "
                             "(namespace:=robot1), or stop the other one")


def listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {n}" for reason, n in counts.items()) or "none"


class Silence:
    """Since when each camera has brought no usable frame, by time.monotonic()."""

    def __init__(self, cameras: int, now: float):
        self._used_at = [now] * cameras

    def used(self, sensor: int, now: float) -> None:
        self._used_at[sensor] = now

    def expected(self, now: float) -> None:
        """Nothing is missing up to now."""
        self._used_at = [now] * len(self._used_at)

    def of(self, now: float, limit_s: float) -> tuple[list[int], float]:
        """(sensors that have been silent for that long, for how many seconds the last of them has been at least)."""
        silent = [sensor for sensor, at in enumerate(self._used_at) if now - at >= limit_s]
        return silent, min((now - self._used_at[sensor] for sensor in silent), default=0.0)


def explain(node, inputs: list[Input], intake: Intake, silent_s: float, silent: list[int]) -> str:
    """The whole story in a few lines; silent: the cameras that it is about."""
    counts, states = intake.ledger.counts(), {(state.kind, state.camera): state for state in intake.states()}
    cameras = [intake.cameras[sensor] for sensor in silent]
    if len(cameras) < len(intake.cameras):   # what others bring is no part of the story
        names = [camera.name for camera in intake.cameras if camera not in cameras]
        lines = [f"no usable frame of camera {', '.join(camera.name for camera in cameras)} for {silent_s:.0f} s, while {', '.join(names)} bring{'s' * (len(names) == 1)} some:"]
        lines += ["  " + describe_input(node, inputs, source, state_of(source, states)) for source in inputs if source.camera not in names]
        for camera in cameras:
            lines += [f"  {camera.name}: {len(camera.waiting)} images wait for: {camera.waiting_for}"] if camera.waiting else []
            lines += [f"  {camera.name}: newest problem: {camera.last_problem}"] if camera.last_problem else []
        return "\n".join(lines + ["  " + LOST_HINT] * any(source.lost for source in inputs if source.camera not in names))
    lines = [f"no usable frame for {silent_s:.0f} s: {counts.frames_in} images in, {counts.used} used, {counts.pending} waiting, dropped: {listed(counts.dropped)}"]
    lines += ["  " + describe_input(node, inputs, source, state_of(source, states)) for source in inputs]
    if not any(node.count_publishers(source.topic) for source in inputs):
        lines.append(f"  none of them has a publisher: do the publishers have this node's ROS_DOMAIN_ID ({node.context.get_domain_id()}) and, on another machine, the same network?")
    if intake.pending:
        lines.append(f"  {intake.pending} images wait for: {intake.waiting_for}")
    if intake.last_problem:
        lines.append(f"  newest problem: {intake.last_problem}")
    if any(source.lost for source in inputs):
        lines.append("  " + LOST_HINT)
    return "\n".join(lines)
