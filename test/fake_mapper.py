"""A Mapper without an engine: takes every frame, renders its image, fails on request. What the node's tests need, fast."""
import concurrent.futures
import threading

import numpy as np

from spirula_gpu.config import replaced
from spirula_gpu.correct import Corrected
from spirula_gpu.report import FrameLedger, Latest, MeshChunk, Snapshot, Status, VramReport, VramRow


def triangle(key=(0, 0, 0), shift=0.0):
    return MeshChunk(key, np.array([[0, 0, shift], [1, 0, shift], [0, 1, shift]], np.float32), np.array([[0, 1, 2]], np.int32),
                     np.full((3, 3), 200, np.uint8))


WRITTEN = 777  # Gaussians that save_map says it wrote; the status knows of 1000


class FakeMapper:
    backend, resumed = "fake", None

    def __init__(self, config):
        self.config, self.ledger, self.latest = config, FrameLedger(), Latest()
        self.path, self.splats = Latest(), Latest()
        self.wants, self.frames, self.commands = None, [], []
        self.state, self.error, self.busy_s = "waiting", "", 0.0
        self.started = self.stopped = False

    def start(self):
        self.started = True

    def stop(self):
        self.stopped, self.state = True, "error" if self.state == "error" else "stopped"

    def close(self):
        self.stop()

    def refuses(self, stamp_ns, T_world_cam, sensor=0, lap=0):
        return False

    def submit(self, frame):
        self.frames.append(frame)
        self.ledger.used()
        self.state = "running"
        self.latest.set(Snapshot(len(self.frames), frame.stamp_ns, frame.camera, frame.T_world_cam, frame.rgb,
                                 np.ones(frame.rgb.shape[:2], np.float32), np.ones(frame.rgb.shape[:2], np.float32),
                                 self.status(), self.vram(), (triangle(),)))

    def command(self, name, *args):
        """Answered from another thread after `busy_s`, as the real one does."""
        self.commands.append((name, *args))
        future = concurrent.futures.Future()
        if self.state == "error":
            future.set_exception(RuntimeError("the mapper has stopped: " + self.error))
        else:
            threading.Timer(self.busy_s, self._run, (future, name, args)).start()
        return future

    def _run(self, future, name, args):
        try:
            if name in ("save_map", "save_poses", "mesh"):
                with open(args[0], "w") as file:
                    file.write("ply\n")
            if name == "reset":
                self.latest.set(None)
            if name == "configure":
                self.config = replaced(self.config, args[0])
            future.set_result({"evaluate": [], "save_map": WRITTEN, "correct": Corrected(3, 2, 500), "refine": 10}.get(name))
        except OSError as e:
            future.set_exception(e)

    def status(self):
        return Status(state=self.state, gaussians=1000, steps=10, keyframes=len(self.frames), latency_ms=5.0,
                      frames=self.ledger.counts(), last_error=self.error)

    def vram(self):
        row = VramRow("means", "splat", 900, 1000, False)
        return VramReport((row,), {"splat": (900, 1000)}, 1000, 64, 0, 2000, 3000, 4000)

    def fail(self, text):
        self.state, self.error = "error", text
