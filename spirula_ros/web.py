"""The live viewer: a mapper in the browser, and saved maps. Off by default; `web.enabled`, `spirula replay --web`, `spirula view FILE`.

Threads: viser's own serve the browsers. One of ours (`spirula-web`) does what is pressed there and moves what is new from mapper to browsers; nothing else touches
scene and panel. T1 only hands over a copy of the map, and only while somebody looks; packing and sending are done here."""
from __future__ import annotations

import os
import queue
import threading
import time
import traceback
from dataclasses import replace
from typing import Any, Callable

from spirula_gpu.mapper import Mapper, Wants

from .params import WebConfig
from .web_panel import Panel
from .web_scene import Scene, camera_of, hide_picture, look_from, show_picture
from .web_server import Named, close_server, open_server

TICK_S, PANEL_S = 0.1, 0.5
PICTURE_PX = 1600     # a picture that a browser asks for is no longer than this
BEHIND_M = 0.5        # the newest pose is looked at from so far behind, so that its frustum is seen
FOLLOW_M = 0.01       # the robot moved when its newest pose did by so much


class Viewer:
    """note: hints and errors of the surroundings, shown with the mapper's. configure: takes {name: value} when somebody changes parameters; it may be called on
    any thread. drive: set the mapper's wants here (a node that has other listeners asks wanted() instead). Raises InputError."""

    def __init__(self, mapper: Mapper, config: WebConfig, *, note: Callable[[], str] = str, configure: Callable[[dict[str, Any]], None] | None = None,
                 save_to: str = "", drive: bool = False, named: Named = Named()):
        self.config, self._mapper, self._note, self._drive, self._save_to = config, mapper, note, drive, os.path.abspath(save_to or "map.ply")
        self._configure = configure or (lambda values: self._ask("", "configure", values))
        self._server, self.url = open_server(config, "spirula", named)
        self._scene, self._panel = Scene(self._server), Panel(self._server, self._act, mapper.config, self._save_to)
        self._begun = time.monotonic()
        self._put, self._mesh_wanted, self._follow, self._followed = None, False, False, None
        self._pictures: set[int] = set()   # clients that look at a picture, or wait for one
        self._said, self._problem, self._panel_at = "", "", 0.0
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()   # (function, arguments) for our thread; None: end
        self._thread = threading.Thread(target=self._run, name="spirula-web", daemon=True)
        self._server.on_client_connect(self._greet)
        self._thread.start()

    def wanted(self, base: Wants = Wants()) -> Wants:
        """base, and what the browsers want beside."""
        if not self._server.get_clients():
            return base
        return replace(base, mesh=base.mesh or self._mesh_wanted, splats=self.config.max_splats, splats_period_s=self.config.period_s)

    def close(self) -> None:
        """The port is free afterwards, and no thread of the viewer works on."""
        self._jobs.put(None)
        self._thread.join()
        if self._drive:
            self._mapper.wants = Wants()
        close_server(self._server)

    # ---- from mapper to browsers: our own thread ----

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=TICK_S)
            except queue.Empty:
                job = self._update, ()
            if job is None:
                return
            try:
                job[0](*job[1])
            except Exception as e:  # it goes on; the panel and the log say what happened
                problem = f"the viewer: {type(e).__name__}: {e}"
                if problem != self._problem:
                    traceback.print_exc()
                self._problem = problem

    def _update(self) -> None:
        now, status = time.monotonic(), self._mapper.status()
        if self._drive:
            self._mapper.wants = self.wanted()
        due = now - self._panel_at >= PANEL_S
        if due:
            self._panel_at = now
            self._panel.record(now - self._begun, status)
        if not self._server.get_clients():
            return
        if due:
            self._panel.show(status, self._mapper.vram(), [note for note in (self._note(), self._problem, self._said) if note])
        self._put_new()

    def _put_new(self) -> None:
        snapshot = self._mapper.splats.get()
        if snapshot is self._put:
            pass
        elif snapshot is None:   # reset
            self._scene.clear()
        else:
            self._scene.put(snapshot)
            if self._put is None and len(snapshot.poses):
                self._look(snapshot.poses[-1])
        self._put = snapshot
        latest = self._mapper.latest.get()
        if self._mesh_wanted and latest is not None:
            self._scene.put_mesh(latest.mesh)
        if self._follow and snapshot is not None and len(snapshot.poses):
            if self._followed is None or abs(snapshot.poses[-1] - self._followed).max() > FOLLOW_M:
                self._look(snapshot.poses[-1])

    def _look(self, T_world_cam) -> None:
        """Every browser, and those that come later."""
        self._followed = T_world_cam
        look_from(self._server.initial_camera, T_world_cam, BEHIND_M)
        for client in self._server.get_clients().values():
            with client.atomic():
                look_from(client.camera, T_world_cam, BEHIND_M)

    # ---- from browsers to the mapper ----

    def _act(self, name: str, *args) -> None:
        """Called on viser's threads."""
        self._jobs.put((getattr(self, f"_do_{name}"), args))

    def _greet(self, client) -> None:
        client.camera.on_update(lambda _: self._act("moved", client))

    def _do_moved(self, client) -> None:
        if client.client_id in self._pictures:
            self._pictures.discard(client.client_id)
            hide_picture(client)

    def _do_show(self, what: str, visible: bool) -> None:
        if what == "mesh":
            self._mesh_wanted = visible
        self._scene.show(what, visible)

    def _do_follow(self, on: bool) -> None:
        self._follow, self._followed = on, None

    def _do_pause(self, on: bool) -> None:
        self._ask("", "pause", on)

    def _do_save(self) -> None:
        self._ask(f"saved to {self._save_to}", "save_map", self._save_to)

    def _do_reset(self) -> None:
        self._ask("the map is empty", "reset")

    def _do_configure(self, values: dict[str, Any]) -> None:
        self._configure(values)

    def _do_render(self, client) -> None:
        if client is None or client.client_id in self._pictures:
            return
        self._pictures.add(client.client_id)
        self._ask("", "render", *camera_of(client.camera, PICTURE_PX), then=lambda images: self._picture(client, images[0]))

    def _picture(self, client, rgb) -> None:
        if client.client_id in self._pictures:   # it has not moved meanwhile
            show_picture(client, rgb)

    def _ask(self, outcome: str, name: str, *args, then: Callable[[Any], None] | None = None) -> None:
        """A command of the mapper; what came of it is shown."""
        def done(future) -> None:
            error = future.exception()
            self._said = f"{name}: {type(error).__name__}: {error}" if error else outcome
            if error:
                self._pictures.clear()
            elif then:
                then(future.result())
        self._mapper.post(name, *args).add_done_callback(lambda future: self._jobs.put((done, (future,))))
