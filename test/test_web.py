"""The live viewer: what is packed, who is let in, what is computed for whom, and what a browser shows."""
import http.client
import math
import socket
import threading

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from conftest import importorskip
from spirula_gpu.camera import Camera
from spirula_gpu.config import Config, replaced
from spirula_gpu.mapper import Mapper, Wants
from spirula_gpu.report import FrameCounts, Status, VramReport
from spirula_gpu.splats import SH0, Splats, covariances, most_visible
from spirula_ros import web_server
from spirula_ros.errors import InputError
from spirula_ros.params import WebConfig
from spirula_ros.web_panel import CURVE_POINTS, Curve, adjustable, status_html, vram_html
from spirula_ros.web_scene import UNITS, camera_of, frustums, pack
from spirula_ros.web_server import Guard, check, open_server
from test_mapper import SMALL, frame, submit, wait_for

viser = importorskip("viser", "run `make test`, which installs what requirements-dev.txt lists")
TOKEN = "a-token-of-this-test"


def splats(n: int, seed: int = 0, degree: int = 1) -> Splats:
    r = np.random.default_rng(seed)
    return Splats(*(x.astype(np.float32) for x in (r.normal(0, 3, (n, 3)), r.normal(0, 1, (n, 4)), r.uniform(-7, 0, (n, 3)), r.normal(0, 3, n),
                                                   r.normal(0, 1, (n, (degree + 1) ** 2, 3)))))


# ---- packing -----------------------------------------------------------------------------------------------------------------------

def test_packed_gaussians_are_the_map_in_visers_layout():
    s = splats(70_000)   # more than one block
    rows = pack(s)
    assert rows.shape == (70_000, 8) and rows.dtype == np.uint32 and not rows[:, 3].any()
    np.testing.assert_allclose(rows[:, :3].view(np.float32) / UNITS, s.means, rtol=1e-6)
    R = Rotation.from_quat(np.roll(s.quats, -1, 1).astype(float)).as_matrix()
    S = (R * np.exp(2 * s.log_scales.astype(float))[:, None]) @ R.transpose(0, 2, 1)
    got = np.ascontiguousarray(rows[:, 4:7]).view(np.float16).astype(float) / UNITS**2
    np.testing.assert_allclose(got, S[:, [0, 0, 0, 1, 1, 2], [0, 1, 2, 1, 2, 2]], rtol=2**-10, atol=6e-8 / UNITS**2)
    rgba = np.ascontiguousarray(rows[:, 7]).view(np.uint8).reshape(-1, 4)
    np.testing.assert_allclose(rgba[:, :3], np.clip(255 * (0.5 + SH0 * s.sh[:, 0]), 0, 255), atol=0.51)
    np.testing.assert_allclose(rgba[:, 3], 255 / (1 + np.exp(-s.logit_opacities)), atol=0.51)


def test_packing_is_what_viser_makes_of_the_same_gaussians():
    s = splats(100)
    server, _ = open_server(WebConfig(port=0), "test")
    try:
        c, full = covariances(s) * UNITS**2, np.empty((100, 3, 3), np.float32)
        for k, (i, j) in enumerate(((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))):
            full[:, i, j] = full[:, j, i] = c[:, k]
        node = server.scene.add_gaussian_splats("/x", s.means * np.float32(UNITS), full, np.zeros((100, 3)), np.zeros((100, 1)))
        assert np.array_equal(node.buffer[:, :7], pack(s)[:, :7])
    finally:
        web_server.close_server(server)


def test_what_is_never_drawn_is_left_out_and_the_largest_is_finite():
    s = splats(5)
    s.means[1] = np.nan
    s.quats[2] = 0
    s.log_scales[3] = 5   # 148 m
    rows = pack(s)
    assert len(rows) == 3 and np.isfinite(np.ascontiguousarray(rows[:, 4:7]).view(np.float16)).all()
    s.means[:] = np.nan
    assert pack(s).shape == (0, 8)


def test_the_cap_keeps_what_shows_most():
    log_scales, logits = np.zeros((6, 3), np.float32), np.array([0, 5, -5, 5, np.nan, 5], np.float32)
    log_scales[3] = -4           # opaque but small
    log_scales[5] = [3, 3, -20]  # a large disc
    assert most_visible(log_scales, logits, 2).tolist() == [1, 5]
    assert most_visible(log_scales, logits, 3).tolist() == [0, 1, 5]
    assert most_visible(log_scales, logits, 6).tolist() == list(range(6))


def test_frustums_are_where_the_camera_looks():
    camera, T = Camera(40, 30, 20.0, 20.0, 20.0, 15.0), np.eye(4)
    T[:3, 3] = 1, 2, 3
    lines = frustums(np.stack([np.eye(4), T]), camera, 0.5)
    assert lines.shape == (16, 2, 3)
    np.testing.assert_allclose(lines[0], [[0, 0, 0], [-0.5, -0.375, 0.5]])
    np.testing.assert_allclose(lines[8:], lines[:8] + [1, 2, 3], rtol=1e-6)


def test_a_browsers_view_becomes_a_camera():
    class View:
        wxyz, position, fov, image_width, image_height = np.array([1.0, 0, 0, 0]), np.array([1.0, 2, 3]), math.radians(90), 2000, 1000
    T, camera = camera_of(View, 1000)
    assert (camera.width, camera.height, camera.fx) == (1000, 500, pytest.approx(250)) and T[:3, 3].tolist() == [1, 2, 3]


# ---- who is let in -------------------------------------------------------------------------------------------------------------------

class Headers(dict):
    def get_all(self, name):
        value = self.get(name, [])
        return value if isinstance(value, list) else [value]


@pytest.mark.parametrize("token, path, headers, status", [
    ("", "/", {"Host": "localhost:8080"}, None),
    ("", "/", {"Host": "127.0.0.1:1", "Origin": "http://127.0.0.1:1"}, None),
    ("", "/", {"Host": "[::1]:8080"}, None),
    ("", "/", {"Host": "evil.example:8080"}, 403),                                         # a name that was made to point here
    ("", "/", {"Host": "evil.example:8080", "Origin": "http://evil.example:8080"}, 403),
    ("", "/", {"Host": "localhost:8080", "Origin": "http://evil.example"}, 403),           # a page elsewhere opens a websocket
    ("", "/", {"Host": "localhost:8080", "Origin": "null"}, 403),
    ("", "/", {}, 400),
    ("", "/", {"Host": ["localhost", "evil.example"]}, 400),
    (TOKEN, "/", {"Host": "robot:8080"}, 401),
    (TOKEN, "/?token=wrong", {"Host": "robot:8080"}, 401),
    (TOKEN, "/?token=" + TOKEN, {"Host": "robot:8080"}, 303),
    (TOKEN, "/", {"Host": "robot:8080", "Cookie": f"a=b; spirula_8080={TOKEN}"}, None),
    (TOKEN, "/", {"Host": "robot:8080", "Cookie": f"spirula_8081={TOKEN}"}, 401),
    (TOKEN, "/", {"Host": "robot:8080", "Cookie": "spirula_8080="}, 401),
    (TOKEN, "/", {"Host": "robot:8080", "Cookie": f"spirula_8080={TOKEN}", "Origin": "http://evil.example"}, 403),
])
def test_guard(token, path, headers, status):
    answer = Guard(token, 8080).refuses(path, Headers(headers))
    assert (answer and answer.status) == status


@pytest.mark.parametrize("config, text", [
    (WebConfig(host="0.0.0.0"), "ssh -L 8080:localhost:8080"),
    (WebConfig(host="robot.example"), "set web.token"),
    (WebConfig(host="0.0.0.0", token="short"), "web.token: 12 or more"),
    (WebConfig(token="with a space in it"), "web.token: 12 or more"),
])
def test_hosts_and_tokens_are_refused_in_one_line(config, text):
    with pytest.raises(InputError, match=text) as error:
        check(config)
    assert "\n" not in str(error.value)


def test_allowed_hosts():
    for config in (WebConfig(), WebConfig(host="localhost"), WebConfig(host="127.0.0.2"), WebConfig(host="::1"), WebConfig(host="0.0.0.0", token=TOKEN)):
        check(config)


def get(port: int, path="/", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer
    finally:
        connection.close()


def websocket(port: int, **headers):
    from websockets.sync.client import connect
    return connect(f"ws://127.0.0.1:{port}/", subprotocols=[f"viser-v{viser.__version__}"], additional_headers=headers, max_size=None)


def test_the_page_is_served_and_closing_frees_port_and_threads():
    before = set(threading.enumerate())
    server, url = open_server(WebConfig(port=0), "test")
    port = server.get_port()
    assert url == f"http://localhost:{port}/"
    status, body, _ = get(port)
    assert status == 200 and b"<html" in body.lower()
    assert get(port, Host="evil.example")[0] == 403 and get(port, "/../../etc/passwd")[0] == 404
    assert server.request_share_url() is None   # no tunnel to the outside
    web_server.close_server(server)
    wait_for(lambda: not {t for t in set(threading.enumerate()) - before if t.is_alive()})
    socket.create_server(("127.0.0.1", port)).close()


def test_a_token_is_asked_for_page_and_websocket():
    from websockets.exceptions import InvalidStatus
    server, url = open_server(WebConfig(port=0, token=TOKEN), "test")
    try:
        port = server.get_port()
        assert url.endswith(f"/?token={TOKEN}")
        assert get(port)[0] == 401
        status, _, answer = get(port, f"/?token={TOKEN}")
        assert (status, answer.getheader("Location")) == (303, "/")
        cookie = answer.getheader("Set-Cookie")
        assert "HttpOnly" in cookie and "SameSite=Lax" in cookie
        assert get(port, Cookie=cookie.partition(";")[0])[0] == 200
        with pytest.raises(InvalidStatus, match="401"):
            websocket(port)
        with pytest.raises(InvalidStatus, match="403"):
            websocket(port, Cookie=cookie.partition(";")[0], Origin="http://evil.example")
        with websocket(port, Cookie=cookie.partition(";")[0]) as ws:
            assert ws.recv(timeout=60)
    finally:
        web_server.close_server(server)


def test_a_port_that_is_taken_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port}: Address already in use: take another one .web.port") as error:
            open_server(WebConfig(port=port), "test")
    assert "\n" not in str(error.value)


def test_without_viser_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "viser", None)
    with pytest.raises(InputError, match="pip install 'viser>=1.1,<1.2'"):
        open_server(WebConfig(port=0), "test")


def test_a_viser_that_cannot_be_guarded_is_refused(monkeypatch):
    monkeypatch.setattr(viser, "__version__", "1.2.0")
    with pytest.raises(InputError, match="1.2.0"):
        open_server(WebConfig(port=0), "test")


# ---- the mapper's side ---------------------------------------------------------------------------------------------------------------

def fed(n: int = 4, config: Config = SMALL) -> Mapper:
    mapper = Mapper(config)
    for i in range(n):
        submit(mapper, frame(i))
        mapper.run_due()
    return mapper


def test_nobody_looks_and_nothing_is_copied():
    mapper = fed()
    assert mapper.splats.get() is None
    mapper.wants = Wants(splats=100)
    mapper.tick()
    first = mapper.splats.get()
    mapper.wants = Wants()
    submit(mapper, frame(4))
    mapper.run_due()
    assert mapper.splats.get() is first and len(first.splats.means) == 100 and first.gaussians > 100


@pytest.mark.parametrize("precision", ["full", "compact"])
def test_a_snapshot_is_the_map(precision, monkeypatch):
    monkeypatch.setattr("spirula_gpu.output.BLOCK", 100)   # many blocks
    mapper = fed(config=replaced(SMALL, {"engine.precision": precision}))
    mapper.wants = Wants(splats=10**6)
    mapper.tick()
    snapshot, engine = mapper.splats.get(), mapper._engine
    for got, row in zip(snapshot.splats, ("mean", "quat", "log_scale", "logit_opacity", "sh")):
        want = engine.read(f"map.{row}")
        assert np.array_equal(got, want[:, :1] if row == "sh" else want), row
    assert snapshot.gaussians == len(engine) == len(snapshot.splats.means) > 150 and snapshot.steps == mapper._trainer.steps
    assert np.array_equal(snapshot.poses, [frame(i).T_world_cam for i in range(4)])
    chosen = most_visible(engine.read("map.log_scale"), engine.read("map.logit_opacity"), 150)
    assert np.array_equal(mapper._output.splats(150).means, engine.read("map.mean")[chosen])


def test_a_map_that_did_not_change_is_not_copied_again():
    mapper = fed()
    mapper.wants = Wants(splats=100, splats_period_s=0.0)
    mapper.tick()
    first = mapper.splats.get()
    mapper._showing_s = 0.0   # whatever it took on this machine
    mapper.tick()
    assert mapper.splats.get() is first
    mapper.train(steps=1)
    mapper.tick()
    assert mapper.splats.get() is not first
    mapper.command("reset").result()
    assert mapper.splats.get() is None


def test_copies_take_a_small_share_of_the_time():
    mapper = fed()
    mapper.wants = Wants(splats=100, splats_period_s=0.0)
    mapper.tick()
    first, mapper._showing_s = mapper.splats.get(), 100.0   # it took that long: the next one comes 2000 s later
    mapper.train(steps=1)
    mapper.tick()
    assert mapper.splats.get() is first


def test_a_copy_is_not_charged_with_the_measurement_before_it(monkeypatch):
    class Clock:
        seconds = 1000.0

        def monotonic(self):
            return self.seconds
    mapper = fed(config=replaced(SMALL, {"eval.period_s": 1.0}))
    submit(mapper, frame(4, held_out=True))
    mapper.run_due()
    clock = Clock()
    monkeypatch.setattr("spirula_gpu.mapper.time", clock)
    monkeypatch.setattr(mapper._output, "measure", lambda *_: setattr(clock, "seconds", clock.seconds + 50))
    monkeypatch.setattr(mapper._output, "splats", lambda most: setattr(clock, "seconds", clock.seconds + 0.5) or splats(most))
    mapper.wants, mapper._last["splats"], mapper._last["evaluate"], mapper._thread = Wants(splats=10), 0.0, 0.0, threading.current_thread()
    mapper._publish_due()
    assert clock.seconds == 1050.5 and mapper._showing_s == 0.5


def test_changes_of_different_parameters_do_not_undo_each_other():
    mapper = fed()
    growing = mapper.post("configure", {"prune.growth": 0.1})
    rest = mapper.post("configure", {"train.lr_mean": 1e-3, "train.steps_per_frame": 7})
    refused = mapper.post("configure", {"train.steps_per_frame": 8, "train.lr_mean": -1.0})
    mapper.tick()
    assert growing.result(0) is rest.result(0) is None and "must lie in" in str(refused.exception(0))
    train = mapper.config.train
    assert (mapper.config.prune.growth, train.lr_mean, train.steps_per_frame) == (0.1, 1e-3, 7) and mapper._trainer.config is mapper.config


def test_what_another_thread_posts_waits_for_the_tick():
    mapper = fed()
    future = mapper.post("render", np.eye(4), Camera(40, 30, 36.0, 36.0, 20.0, 15.0))
    assert not future.done()
    mapper.tick()
    picture, depth_m, _ = future.result(timeout=0)
    assert depth_m.shape == (30, 40)
    assert picture.shape == (30, 40, 3) and picture.dtype == np.uint8 and picture.std() > 10
    mapper.stop()
    assert "stopped" in str(mapper.post("pause", True).exception(timeout=0))
    assert "unknown" in str(mapper.post("dance").exception(timeout=0))


# ---- the panel -------------------------------------------------------------------------------------------------------------------------

def test_status_shows_errors_hints_and_reasons_escaped():
    text = status_html(Status(state="error", last_error="<b>boom</b>", hint="raise map.isect_cap", frames=FrameCounts(9, 4, {"inbox_full": 3, "no_pose": 2})), ["nobody publishes /image"])
    for part in ("&lt;b&gt;boom", "raise map.isect_cap", "nobody publishes /image", "inbox_full 3, no_pose 2", "9 in, 4 used, 0 waiting"):
        assert part in text
    assert "<b>boom" not in text


def test_vram_bars():
    report = VramReport((), {"splat": (50 << 20, 100 << 20), "image": (0, 0)}, 100 << 20, 0, 200 << 20, 0, 0, 0)
    text = vram_html(report)
    assert "width:25.0%" in text and "width:50.0%" in text and "image" not in text and "200 MiB budget" in text


def test_a_curve_is_thinned_and_keeps_both_ends():
    curve = Curve()
    for i in range(10 * CURVE_POINTS):
        curve.add(float(i), float("nan") if i % 7 == 0 else i)
    x, y = curve.data()
    assert len(x) == len(y) <= CURVE_POINTS and np.array_equal(x, y) and x[0] == 1 and x[-1] > 9.8 * CURVE_POINTS
    assert all(len(a) == 1 for a in Curve().data())


def test_only_live_parameters_can_be_changed():
    names = [name for name, _, _ in adjustable(Config())]
    assert "train.steps_per_frame" in names and "prune.relocate" in names
    assert not {"engine.max_gaussians", "train.start_map", "train.max_keyframes"} & set(names)
