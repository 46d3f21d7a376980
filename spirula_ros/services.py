"""The services of the node: the answer is the outcome, and nothing waits for it on the executor's thread."""
from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import Any, Callable

import numpy as np
from geometry_msgs.msg import PoseStamped
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.qos import qos_profile_sensor_data
from rclpy.task import Future
from std_srvs.srv import SetBool, Trigger

from spirula_gpu.camera import Camera
from spirula_gpu.ply import check_path

from .convert import BadMessage, camera_from_info, check_near, pose_from_msg
from .errors import said
from .finish import finish
from .publish import VIEW_FRAME, camera_info_msg, depth_msg, header, image_msg
from .srv import LoadMap, RenderView, SaveMap, SetView


class Services:
    """save_map, load_map, reset, pause, finish, set_view, render_view, and the topic ~/view, on the node of a Session."""

    def __init__(self, session, stack: ExitStack):
        self._session, self._node, self._mapper, self.answering = session, session.node, session.mapper, 0
        # reentrant: a handler that awaits would keep a mutually exclusive group, and with it every topic, locked
        group = ReentrantCallbackGroup()
        for kind, name, handler in ((SaveMap, "save_map", self._save_map), (LoadMap, "load_map", self._load_map), (Trigger, "reset", self._reset),
                                    (SetBool, "pause", self._pause), (Trigger, "finish", self._finish), (SetView, "set_view", self._set_view),
                                    (RenderView, "render_view", self._render_view)):
            service = self._node.create_service(kind, f"~/{name}", handler, callback_group=group)
            stack.callback(self._node.destroy_service, service)
        view = self._node.create_subscription(PoseStamped, "~/view", session.safely("the topic ~/view", self._on_view), qos_profile_sensor_data)
        stack.callback(self._node.destroy_subscription, view)

    async def _answer(self, response, ask: Callable[[], Any], text: Callable[[Any], str]):
        """While it waits, `answering` counts it. Fills success and message of a service response from the concurrent.futures.Future of ask(); text: result -> message."""
        self.answering += 1
        try:
            if self._session.failed:
                raise RuntimeError(self._mapper.status().last_error)
            response.message = text((await settled(self._node.executor, ask())).result())
            response.success = True
        except BadMessage as e:
            response.success, response.message = False, e.text
        except Exception as e:
            response.success, response.message = False, said(e)
        finally:
            self.answering -= 1
        if not response.success:
            self._session.log.error(response.message)
        return response

    async def _save_map(self, request, response):
        path = os.path.expanduser(request.path) or self._session.ros.output.map_path
        if not path:
            response.success, response.message = False, "no path: give one in the request, or set the parameter output.map_path"
            return response

        def begin():
            check_path("path", path)
            return self._mapper.command("save_map", path)
        return await self._answer(response, begin, lambda written: f"{written} Gaussians in {path}")

    async def _load_map(self, request, response):
        path = os.path.expanduser(request.path)
        return await self._answer(response, lambda: self._mapper.command("load_map", path), lambda n: self._emptied(f"{n} Gaussians of {path}"))

    async def _reset(self, request, response):
        return await self._answer(response, lambda: self._mapper.command("reset"), lambda _: self._emptied("the map is empty"))

    def _emptied(self, said: str) -> str:
        """What limited the map before is said again when it limits the next one."""
        self._session.limits_told.clear()
        return said

    async def _pause(self, request, response):
        if not self._session.active and not request.data:
            response.success, response.message = False, f"the node is inactive and does not train: ros2 lifecycle set {self._node.get_fully_qualified_name()} activate"
            return response
        self._session.paused_by_us = False   # whoever pauses an inactive node finds it paused afterwards
        return await self._answer(response, lambda: self._mapper.command("pause", request.data), lambda _: "paused" if request.data else "running")

    async def _finish(self, request, response):
        session, output = self._session, self._session.ros.output
        if not output.report_dir:
            response.success, response.message = False, "nowhere to write: set the parameter output.report_dir"
            return response

        def begin():
            session.intake.flush()
            session.images_at_finish, session.hint = self._mapper.ledger.counts().frames_in, ""
            return session.background.submit(finish, self._mapper, session.command, output, session.first_at or time.monotonic())
        return await self._answer(response, begin, str)

    # ---- views ----

    def _set_view(self, request, response):
        try:
            T = None if request.follow else self._pose(request.pose)
            self._session.show(T, camera_of(request.camera))
            response.success, response.message = True, "the newest keyframe" if T is None else f"a fixed pose at {T[:3, 3].round(3).tolist()}"
        except BadMessage as e:
            response.success, response.message = False, e.text
        return response

    def _on_view(self, msg: PoseStamped) -> None:
        try:
            self._session.show(self._pose(msg), self._session.view[1])
        except BadMessage as e:
            self._session.log.warning(f"{self._node.resolve_topic_name('~/view')}: {e.text}", throttle_duration_sec=5.0)

    async def _render_view(self, request, response):
        def begin():
            T, camera = self._pose(request.pose), camera_of(request.camera) or self._session.newest_camera
            if camera is None:
                raise BadMessage("uncalibrated", "no frame has come yet, so there is no camera: give width, height and k of one in the request")
            if not self._mapper.status().gaussians:
                raise BadMessage("empty", "the map is empty: there is nothing to render")
            response.camera_info = camera_info_msg(camera, self._head())
            return self._mapper.command("render", T, camera)

        def filled(images) -> str:
            response.image, response.depth = image_msg(images[0], response.camera_info.header), depth_msg(images[1], response.camera_info.header)
            return f"{response.image.width}x{response.image.height}, {100 * float((images[2] >= 0.5).mean()):.0f} % of it shows the map"
        return await self._answer(response, begin, filled)

    def _pose(self, msg: PoseStamped) -> np.ndarray:
        """T_world_cam [4,4] of a pose in the map's frame. Raises BadMessage."""
        frame, ours = msg.header.frame_id.lstrip("/"), self._session.intake.map_frame
        if frame not in ("", ours):
            raise BadMessage("bad_pose", f"the pose is in frame '{frame}', the map in '{ours}'; give it in that frame")
        return check_near(pose_from_msg(msg), "bad_pose")

    def _head(self):
        return header(self._node.get_clock().now().nanoseconds, VIEW_FRAME)


MAX_PIXELS = 1 << 23   # of a view that somebody asks for: 3840x2160 fits; rendering one takes some 100 bytes a pixel


def camera_of(info) -> Camera | None:
    """The pinhole of a CameraInfo, None when its width is 0. Raises BadMessage."""
    if not info.width:
        return None
    if info.width * info.height > MAX_PIXELS:
        raise BadMessage("bad_image_size", f"the camera has {info.width}x{info.height} = {info.width * info.height:,} pixels, at most {MAX_PIXELS:,} are rendered: ask for a smaller "
                                           "picture, or for several with other k")
    if np.any(info.d):
        raise BadMessage("unsupported_distortion", f"the camera has D = {list(info.d)}: views are rendered without distortion, so d must be zero")
    return camera_from_info(info)


def settled(executor, future) -> Future:
    """An awaitable for a concurrent.futures.Future: its result is the done one. The executor's task, not the thread that settles it, sets the
    bridge: create_task also wakes the executor."""
    bridge = Future(executor=executor)
    future.add_done_callback(lambda done: executor.create_task(bridge.set_result, done))
    return bridge
