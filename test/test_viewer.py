"""The live viewer at work: a mapper's, a replay's, a file's; and what a browser shows."""
import contextlib
import io
import os
import re
import signal
import socket
import threading

import numpy as np
import pytest

import browser
from conftest import importorskip
from spirula_gpu.formats import write_map
from spirula_gpu.mapper import Wants
from spirula_ros.params import WebConfig
from spirula_ros.web_scene import pack
from test_mapper import wait_for
from test_web import fed, get, splats, websocket

msgspec = importorskip("msgspec", "run `make test`, which installs viser, whose messages it packs")


def camera_message() -> bytes:
    return msgspec.msgpack.encode({"type": "ViewerCameraMessage", "wxyz": (1.0, 0, 0, 0), "position": (0.0, 0, 0), "fov": 1.0, "near": 0.01, "far": 1000.0,
                                   "image_height": 30, "image_width": 40, "look_at": (0.0, 0, 1), "up_direction": (0.0, -1, 0)})


@pytest.fixture
def viewer(tmp_path):
    from spirula_ros.web import Viewer
    mapper = fed()
    mapper.start()
    viewer = Viewer(mapper, WebConfig(port=0, period_s=0.1), note=lambda: "a note", save_to=str(tmp_path / "map.ply"), drive=True)
    yield viewer, mapper
    viewer.close()
    mapper.close()


def test_splats_flow_while_somebody_looks(viewer):
    viewer, mapper = viewer
    trains_on(mapper)
    mapper.command("pause", True).result(60)   # one snapshot, then: the viewer may leave out those that others follow at once
    assert mapper.splats.get() is None and mapper.wants == Wants()
    with websocket(viewer._server.get_port()) as ws:
        ws.send(camera_message())
        wait_for(lambda: mapper.splats.get() is not None)
        snapshot, seen = mapper.splats.get(), b""
        needle = pack(snapshot.splats)[:1].tobytes()[:12]   # a mean, as it is sent
        while needle not in seen:
            seen = ws.recv(timeout=60)
        mapper.command("pause", False).result(60)
        wait_for(lambda: mapper.splats.get() is not snapshot)   # training goes on
    wait_for(lambda: mapper.wants == Wants())
    mapper.command("view").result(60)   # the tick that was under way, and may have seen other wants, is over
    last, mapper._showing_s = mapper.splats.get(), 0.0
    trains_on(mapper)
    assert mapper.splats.get() is last and not viewer._problem


def trains_on(mapper) -> None:
    """A while in which a viewer could have wanted something, counted in steps."""
    steps = mapper.status().steps
    wait_for(lambda: mapper.status().steps > steps + 20)


def test_what_is_pressed_reaches_the_mapper(viewer, tmp_path):
    viewer, mapper = viewer
    viewer._act("pause", True)
    wait_for(lambda: mapper.status().state == "paused")
    viewer._act("pause", False)
    wait_for(lambda: mapper.status().state == "running")
    viewer._act("save")
    wait_for(lambda: viewer._said.startswith("saved to"))
    assert (tmp_path / "map.ply").stat().st_size > 1000
    viewer._act("configure", {"train.steps_per_frame": 7})
    wait_for(lambda: mapper.config.train.steps_per_frame == 7)
    viewer._act("configure", {"train.steps_per_frame": -7})
    wait_for(lambda: "must lie in" in viewer._said)
    viewer._act("reset")
    wait_for(lambda: mapper.status().gaussians == 0 and viewer._said == "the map is empty")
    viewer._act("save")
    wait_for(lambda: "the map is empty; " in viewer._said)   # the mapper's own words
    assert not viewer._problem


def test_two_quick_changes_of_parameters_are_two_changes():
    from spirula_ros.web import Viewer
    mapper = fed()   # without a thread: what is asked waits for the tick
    viewer = Viewer(mapper, WebConfig(port=0))
    try:
        viewer._act("configure", {"train.lr_mean": 1e-3})
        viewer._act("configure", {"prune.growth": 0.1})
        wait_for(lambda: mapper._commands.qsize() == 2)
        mapper.tick()
        assert (mapper.config.train.lr_mean, mapper.config.prune.growth) == (1e-3, 0.1)
    finally:
        viewer.close()
        mapper.close()


# ---- files ---------------------------------------------------------------------------------------------------------------------------------

class Served:
    """`spirula view` on a thread of its own."""

    def __init__(self, path, capsys, **config):
        from spirula_ros.web_file import view
        self._stop = threading.Event()
        self._thread = threading.Thread(target=view, args=(str(path), WebConfig(port=0, **config), "z", self._stop))
        self._thread.start()
        self.said = ""

        def told() -> bool:
            assert self._thread.is_alive()
            self.said += capsys.readouterr().out
            return "Ctrl-C" in self.said
        wait_for(told)
        self.url = next(word for word in self.said.split() if word.startswith("http://"))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("suffix", [".ply", ".spz", ".splat"])
def test_view_serves_maps(suffix, tmp_path, capsys):
    path = tmp_path / f"map{suffix}"
    write_map(path, splats(300))
    with Served(path, capsys, max_splats=200) as served:
        assert "300 Gaussians, 200 of them shown" in served.said
        assert get(int(served.url.split(":")[2].strip("/")))[0] == 200


def test_view_serves_meshes(tmp_path, capsys):
    import trimesh
    for name in ("mesh.ply", "mesh.glb"):
        trimesh.creation.box().export(tmp_path / name)
        with Served(tmp_path / name, capsys) as served:
            assert "12 triangles" in served.said


@pytest.mark.parametrize("name, content, text", [
    ("none.ply", None, "No such file"), ("map.xyz", b"", "maps are read from files that end in"), ("mesh.obj", b"v 0 0 0\n", "mesh.obj: "),
])
def test_view_says_what_it_cannot_show(name, content, text, tmp_path):
    from spirula_ros.cli import main
    if content is not None:
        (tmp_path / name).write_bytes(content)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert main(["view", str(tmp_path / name), "--port", "0"]) == 2
    assert text in said.getvalue() and said.getvalue().count("\n") == 1, said.getvalue()


@pytest.mark.parametrize("command, options, text", [
    (["view", "map.ply"], ["--port", "TAKEN"], "take another one (--port; 0 ="), (["view", "map.ply"], ["--host", "0.0.0.0"], "--host 0.0.0.0: whoever reaches it could look, save and reset: set --token"),
    (["view", "map.ply"], ["--token", "short"], "--token: 12 or more"), (["replay", "room", "--lossless"], ["--web", "TAKEN"], "take another one (--web PORT; 0 ="),
    (["replay", "room", "--lossless"], ["--web", "0", "--set", "web.host=0.0.0.0"], "set --set web.token")])
def test_remedies_name_what_the_command_has(command, options, text, capsys):
    from spirula_ros.cli import main
    from spirula_ros.synthetic import make_bag
    write_map("map.ply", splats(5))
    make_bag("room", frames=2, size=(8, 6), say=lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main([*command, *(str(taken.getsockname()[1]) if word == "TAKEN" else word for word in options)]) == 2
    said = capsys.readouterr().err
    assert text in said and "web.port" not in said and (command[0] == "replay" or "web." not in said), said


def test_view_says_what_it_leaves_out(tmp_path, capsys):
    s = splats(100)
    s.means[3] = np.inf
    write_map(tmp_path / "map.ply", s)
    with Served(tmp_path / "map.ply", capsys) as served:
        assert "1 of 100 Gaussians are not finite or absurd (1 not finite): left out" in served.said and "99 Gaussians" in served.said


def test_replay_serves_while_it_runs(tmp_path, capsys, monkeypatch):
    """Lossless: the mapper has no thread, and what browsers want is done between its steps."""
    from spirula_ros.cli import main
    from spirula_ros.synthetic import make_bag
    make_bag(str(tmp_path / "room"), frames=12, size=(64, 48), fps=15.0, seed=0, storage="mcap")
    capsys.readouterr()
    seen, packed, ended = [], [], threading.Event()

    def packing(splats) -> np.ndarray:
        rows = pack(splats)
        packed.append(rows[0].tobytes()[:12])   # a mean, as it is sent
        return rows
    monkeypatch.setattr("spirula_ros.web_scene.pack", packing)

    def look() -> None:
        said = ""
        while not (address := re.search(r"viewer: http://localhost:(\d+)/", said)):
            assert not ended.wait(0.02)
            said += capsys.readouterr().err
        with websocket(int(address[1])) as ws:
            ws.send(camera_message())
            message = b""
            while not any(mean in message for mean in packed):
                message = ws.recv(timeout=300)
        seen.append("splats")

    def look_and_stop() -> None:
        try:
            look()
        finally:
            if not ended.is_set():
                os.kill(os.getpid(), signal.SIGINT)   # enough: the replay finishes with what is there
    thread = threading.Thread(target=look_and_stop)
    thread.start()
    try:
        code = main(["replay", str(tmp_path / "room"), "--lossless", "--refine-seconds", "3600", "--no-mesh", "--web", "0", "--backend", "cpu", "--threads", "1",
                     "--out", str(tmp_path / "out")])
    finally:
        ended.set()
        thread.join()
    assert code == 0 and seen


# ---- a real browser --------------------------------------------------------------------------------------------------------------------------

def picture(png: bytes) -> np.ndarray:
    import cv2
    return cv2.cvtColor(cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)


@pytest.mark.parametrize("size, phone", [((900, 700), False), ((390, 844), True)])
def test_a_browser_shows_map_and_panel(size, phone, viewer, tmp_path):
    if not os.environ.get("SPIRULA_BROWSER"):
        pytest.skip("WebGL in software takes minutes on a busy machine; SPIRULA_BROWSER=1 looks with Chromium")
    if browser.missing():
        pytest.skip(f"no browser to look with: {browser.missing()} not installed (apt-get install chromium chromium-driver)")
    viewer, mapper = viewer
    with browser.Browser(tmp_path, size, phone) as page:
        page.open(viewer.url)
        page.wait("return document.body.innerText.includes('keyframes') && document.body.innerText.includes('running')")

        def lit() -> float:
            """Share of the scene's left part that is not background."""
            image = picture(page.screenshot())
            part = image[image.shape[0] // 4:image.shape[0] // 2, :image.shape[1] // 3].astype(int)
            return float((part.max(2) - part.min(2) > 30).mean())   # the wall is colourful, the page grey
        wait_for(lambda: lit() > 0.2)
        page.click("Control")
        page.click("Pause")
        wait_for(lambda: mapper.status().state == "paused")
        page.click("View")
        page.click("splats")
        wait_for(lambda: lit() < 0.1)
        page.click("Render from here")
        wait_for(lambda: lit() > 0.2)   # the picture of our own renderer
        page.click("Control")
        page.click("Reset")
        page.click("Cancel")
        page.wait("return !document.body.innerText.includes('Throw the map away?')")
        mapper.command("view").result(60)   # whatever was asked before is done
        assert mapper.status().gaussians > 0
        assert not [line for line in page.log() if "Uncaught" in line] and not viewer._problem
