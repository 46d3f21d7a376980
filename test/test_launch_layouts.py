"""The layouts for rviz2 and Foxglove: what they show is what a node publishes, with a QoS that hears it."""
import json
import re
from pathlib import Path

import pytest
import rclpy
import yaml
from rclpy.qos import DurabilityPolicy, QoSCompatibility, QoSProfile, ReliabilityPolicy, qos_check_compatible

from node_rig import Rig
from spirula_ros import diagnostics
from spirula_ros.msg import MapStatus
from spirula_ros.share import share_directory

SHOWN_BY = {"MarkerArray": "visualization_msgs/msg/MarkerArray", "PointCloud2": "sensor_msgs/msg/PointCloud2", "Path": "nav_msgs/msg/Path", "Image": "sensor_msgs/msg/Image"}
RVIZ = yaml.safe_load((share_directory() / "rviz" / "spirula.rviz").read_text())["Visualization Manager"]
FOXGLOVE = json.loads((share_directory() / "foxglove" / "spirula.json").read_text())
PANELS = FOXGLOVE["configById"]


@pytest.fixture(scope="module")
def published(ros_domain):
    """{topic of a node /spirula: its publishers}"""
    rclpy.init(domain_id=ros_domain)
    rig = Rig()
    topics = rig.node.get_publisher_names_and_types_by_node("spirula", rig.namespace)
    yield {topic.removeprefix(rig.namespace): rig.node.get_publishers_info_by_topic(topic)[0] for topic, _ in topics}
    rig.close()
    rclpy.try_shutdown()


def qos_of(display: dict) -> QoSProfile:
    topic = display["Topic"]
    return QoSProfile(depth=topic["Depth"], reliability=ReliabilityPolicy[topic["Reliability Policy"].upper().replace(" ", "_")],
                      durability=DurabilityPolicy[topic["Durability Policy"].upper().replace(" ", "_")])


def test_rviz_shows_what_the_node_publishes_and_hears_it(published):
    shown = [display for display in RVIZ["Displays"] if "Topic" in display]
    assert {display["Topic"]["Value"] for display in shown} == {f"/spirula/{name}" for name in ("mesh", "points", "path", "render/image", "render/depth")}
    for display in shown:
        publisher, qos = published[display["Topic"]["Value"]], qos_of(display)
        assert publisher.topic_type == SHOWN_BY[display["Class"].removeprefix("rviz_default_plugins/")], display["Name"]
        assert qos_check_compatible(publisher.qos_profile, qos)[0] != QoSCompatibility.ERROR, display["Name"]
        assert qos.durability == publisher.qos_profile.durability, f"{display['Name']}: who comes later would see nothing"
    assert RVIZ["Global Options"]["Fixed Frame"] == "map" and any(display["Class"].endswith("/TF") for display in RVIZ["Displays"])


def test_foxglove_shows_what_the_node_publishes(published):
    """Panels: packages/studio-base of foxglove/studio."""
    types = {topic: publisher.topic_type for topic, publisher in published.items()}
    assert {types[topic] for topic in PANELS["3D!map"]["topics"]} == {SHOWN_BY["MarkerArray"], SHOWN_BY["PointCloud2"], SHOWN_BY["Path"]}
    image = PANELS["Image!render"]["imageMode"]
    assert (types[image["imageTopic"]], types[image["calibrationTopic"]]) == ("sensor_msgs/msg/Image", "sensor_msgs/msg/CameraInfo")
    assert types[PANELS["DiagnosticSummary!all"]["topicToRender"]] == "diagnostic_msgs/msg/DiagnosticArray"
    plotted = [path["value"].rsplit(".", 1) for name, panel in PANELS.items() if name.startswith("Plot!") for path in panel["paths"]]
    assert {types[topic] for topic, _ in plotted} == {"spirula_ros/msg/MapStatus"}
    fields = {field for _, field in plotted}
    assert {"heldout_psnr", "steps_per_s", "gaussians"} <= fields <= set(MapStatus.get_fields_and_field_types())
    assert set(re.findall(r'"(/spirula/[\w/]+)', json.dumps(FOXGLOVE))) <= set(types), "a topic that no panel above names"


def test_the_diagnostics_panel_is_for_our_hardware():
    assert f'hardware_id="{PANELS["DiagnosticSummary!all"]["hardwareIdFilter"]}"' in Path(diagnostics.__file__).read_text()


def test_every_panel_of_the_foxglove_layout_is_configured_and_shown_once():
    def names(part) -> list[str]:
        if isinstance(part, str):
            return [part] + [name for tab in PANELS[part].get("tabs", []) for name in names(tab["layout"])]
        assert part["direction"] in ("row", "column")
        return names(part["first"]) + names(part["second"])
    assert sorted(names(FOXGLOVE["layout"])) == sorted(PANELS)
    assert set(name.split("!")[0] for name in PANELS) == {"3D", "Image", "Plot", "DiagnosticSummary", "RawMessages", "Tab"}
