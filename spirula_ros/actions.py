"""The actions of the node, refine and extract_mesh: long jobs with feedback, which can be cancelled. One of each kind at a time; sensors go on."""
from __future__ import annotations

import concurrent.futures
import os
import time
from contextlib import ExitStack
from typing import Callable

from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.callback_groups import ReentrantCallbackGroup

from spirula_gpu.output import HeldOut
from spirula_gpu.ply import check_path

from .action import ExtractMesh, Refine
from .errors import said
from .finish import refine, waitable
from .services import settled

DEACTIVATED = "the node was deactivated"
FEEDBACK_S = 0.2  # between two messages of feedback, at least


class Cancelled(Exception):
    """Somebody wants it no more."""


class Actions:
    """Action servers on the node of a Session."""

    def __init__(self, session, stack: ExitStack):
        self._session, self._node, self._mapper = session, session.node, session.mapper
        self._threads = concurrent.futures.ThreadPoolExecutor(2, "action")
        stack.callback(self._threads.shutdown, wait=False, cancel_futures=True)
        self._running: list[list] = []
        group = ReentrantCallbackGroup()
        for kind, name, work, unknown in ((Refine, "refine", self._refine, {"heldout_psnr": float("nan")}), (ExtractMesh, "extract_mesh", self._extract_mesh, {})):
            running = []
            self._running.append(running)
            server = ActionServer(self._node, kind, f"~/{name}", self._execute(lambda kind=kind, unknown=unknown: kind.Result(**unknown), name, work, running), callback_group=group,
                                  goal_callback=self._accept(name, running), cancel_callback=lambda goal: CancelResponse.ACCEPT)
            stack.callback(server.destroy)

    @property
    def busy(self) -> bool:
        """A goal was accepted, and its result is not sent yet."""
        return any(self._running)

    def _accept(self, name: str, running: list):
        def decide(request) -> GoalResponse:
            if running:
                self._session.log.warning(f"~/{name}: refused, one is running: cancel it first, or wait")
                return GoalResponse.REJECT
            running.append(request)
            return GoalResponse.ACCEPT
        return decide

    def _execute(self, make_result: Callable, name: str, work: Callable, running: list):
        async def execute(goal):
            result, epoch = make_result(), self._session.epoch
            try:
                result.message = (await settled(self._node.executor, self._threads.submit(work, goal, result))).result()
                result.success = True
                goal.succeed()
            except Cancelled as e:
                result.message = f"cancelled: {e}"
                goal.canceled()
            except Exception as e:
                result.message = said(e) if epoch == self._session.epoch or DEACTIVATED in str(e) else DEACTIVATED
                self._session.log.error(f"~/{name}: {result.message}")
                goal.abort()
            finally:
                running.clear()
            return result
        return execute

    def _tell(self, goal) -> Callable:
        """told(feedback): published on the executor's thread, not too often."""
        last = 0.0

        def told(feedback) -> None:
            nonlocal last
            if time.monotonic() - last >= FEEDBACK_S:
                last = time.monotonic()
                self._node.executor.create_task(goal.publish_feedback, feedback)
        return told

    def _go_on(self, goal, epoch: int, done: str) -> None:
        """Raises Cancelled, with what was done, when the client wants it no more, RuntimeError when the node was deactivated."""
        if goal.is_cancel_requested:
            raise Cancelled(done)
        if self._session.epoch != epoch:
            raise RuntimeError(f"{DEACTIVATED}; {done}")

    # ---- the work, on a thread of its own ----

    def _refine(self, goal, result: Refine.Result) -> str:
        want, tell, epoch = goal.request, self._tell(goal), self._session.epoch
        if not (want.steps or want.seconds > 0):
            raise ValueError(f"steps = {want.steps}, seconds = {want.seconds:g}: one must be more than 0")
        if not waitable(self._mapper).keyframes:   # a failed or paused mapper would never get there
            raise ValueError("the map has no keyframe to train with; wait for frames")

        def told(share: float, made: int) -> None:
            result.steps, status = made, self._mapper.status()
            tell(Refine.Feedback(share=share, steps=made, steps_per_s=float(status.steps_per_s), loss=float(status.loss)))
            self._go_on(goal, epoch, f"{made} steps were made")
        result.steps = refine(self._mapper, self._session.command, want.seconds, want.steps, told)
        held_out = self._session.command("evaluate").result()
        result.heldout_psnr = mean_psnr(held_out)
        return f"{result.steps} steps" + (f", {result.heldout_psnr:.2f} dB over {len(held_out)} held-out frames" if held_out else "")

    def _extract_mesh(self, goal, result: ExtractMesh.Result) -> str:
        path, tell, epoch = os.path.expanduser(goal.request.path), self._tell(goal), self._session.epoch
        if not path.endswith(".ply"):
            raise ValueError(f"path '{path}': must end in .ply")
        check_path("path", path)

        def progress(done: int, of: int) -> None:   # on the mapper's thread
            self._go_on(goal, epoch, f"{done} of {of} keyframes were fused; {path} was not touched")
            tell(ExtractMesh.Feedback(share=done / of, keyframes=done))
        result.vertices, result.triangles = self._session.command("mesh", path, goal.request.voxel_m, progress).result()
        return f"{result.vertices} vertices, {result.triangles} triangles in {path}"


def mean_psnr(held_out: list[HeldOut]) -> float:
    """dB; NaN: there is none."""
    return sum(h.psnr for h in held_out) / len(held_out) if held_out else float("nan")
