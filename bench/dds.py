"""Images over DDS from another process into the node while its mapper trains: does the intake keep up, and what does training lose by it?

    python bench/dds.py --out dds.json                                  # 1920x1080 rgb8 at 30 Hz
    python bench/dds.py --depth --seconds 20 --threads 1                # .. and depth 16UC1 at 30 Hz
    python bench/dds.py --compressed --path new                         # jpeg, over new ground

Two processes: a publisher of messages that were serialised beforehand (only stamps change), and train_node's own node with the real mapper. A few
keyframes make a small map; then silence and images take turns, --seconds each. `known`: the camera goes to and fro over what is mapped and no frame
becomes a keyframe: what the intake itself costs. `new`: it goes on, and the worker also takes keyframes in, which costs steps with any intake.

T0 latency: from the begin of the image's callback (with rclpy's SingleThreadedExecutor: of its take, deserialisation included) to the frame being given
to the mapper or dropped with a reason. sent: from the publisher's clock before publish() to the same end. Steps a second are those of the worker; net: of
its time but that in which it took frames in or triangulated."""
import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

import cv2
import numpy as np

STEP_M, WALL_M, IMAGES = 0.01, 2.0, 24   # the camera moves so far from frame to frame, beside a wall whose picture repeats after so many frames
MODES = {"known": lambda i, n: n - 1 - abs(i % (2 * n - 2) - (n - 1)), "new": lambda i, n: n + i}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1920x1080")
    parser.add_argument("--hz", type=float, default=30.0)
    parser.add_argument("--depth", action="store_true", help="depth 16UC1 of the same size with each image")
    parser.add_argument("--compressed", action="store_true", help="jpeg instead of rgb8")
    parser.add_argument("--path", choices=MODES, default="known")
    parser.add_argument("--prepare", type=int, default=24, help="frames of the map that is prepared")
    parser.add_argument("--gaussians", type=int, default=100_000, help="most of the map")
    parser.add_argument("--settle", type=float, default=10.0, help="seconds of training before anything is measured")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase")
    parser.add_argument("--threads", type=int, default=0, help="engine.threads: of the CPU backend; 0 = all")
    parser.add_argument("--executor", choices=("single", "events", "node"), default="node", help="of rclpy; node: what train_node takes")
    parser.add_argument("--rounds", type=int, default=2, help="of silence and images; silence ends it")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a parameter of the node, value in JSON")
    parser.add_argument("--malloc", choices=("kept", "plain"), default="kept", help="kept: freed memory is kept as train_node does")
    parser.add_argument("--label", default="", help="goes into the JSON")
    parser.add_argument("--profile", action="store_true", help="also print where T0's time goes (cProfile)")
    parser.add_argument("--out", help="a JSON file; runs are added to those in it")
    parser.add_argument("--publish", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.width, options.height = map(int, options.size.split("x"))
    return options


# ---------------------------------------------------------------------------------------------------------------- the publisher

class Camera:
    """Publishes as a driver does: best effort, each message serialised once."""

    def __init__(self, node, o):
        from geometry_msgs.msg import PoseStamped
        from rclpy.qos import QoSProfile, ReliabilityPolicy
        from rclpy.serialization import serialize_message
        from sensor_msgs.msg import CameraInfo, CompressedImage, Image

        from spirula_gpu.camera import Camera as Pinhole
        from spirula_ros.publish import camera_info_msg, header, image_msg
        qos, head = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT), header(0, "camera")
        create = lambda kind, name: node.create_publisher(kind, name, qos)
        self.image = create(CompressedImage, "image/compressed") if o.compressed else create(Image, "image")
        self.info, self.pose, self.depth = create(CameraInfo, "camera_info"), create(PoseStamped, "pose"), create(Image, "depth") if o.depth else None
        camera = Pinhole(o.width, o.height, 0.8 * o.width, 0.8 * o.width, o.width / 2, o.height / 2)
        px = STEP_M * camera.fx / WALL_M
        period = round(IMAGES * px)
        wall = np.random.default_rng(0).integers(0, 256, (o.height // 8 + 1, period // 8, 3)).astype(np.uint8)
        wall = cv2.resize(np.tile(wall, (1, -(-o.width // period) + 2, 1)), None, fx=8, fy=8, interpolation=cv2.INTER_CUBIC)
        views = (np.ascontiguousarray(wall[:o.height, (x := round(k * px)):x + o.width]) for k in range(IMAGES))
        jpeg = lambda rgb: CompressedImage(header=head, format="jpeg", data=cv2.imencode(".jpg", rgb[..., ::-1])[1].tobytes())
        self.images = [bytearray(serialize_message(jpeg(v) if o.compressed else image_msg(v, head))) for v in views]
        self.infos = bytearray(serialize_message(camera_info_msg(camera, head)))
        self.poses = bytearray(serialize_message(PoseStamped(header=header(0, "map"))))
        if o.depth:
            blank = Image(header=head, height=o.height, width=o.width, encoding="16UC1", step=2 * o.width)
            blank.data.frombytes(np.full((o.height, o.width), 1000 * WALL_M, np.uint16).tobytes())
            self.depths = bytearray(serialize_message(blank))

    @property
    def publishers(self):
        return [p for p in (self.info, self.pose, self.depth, self.image) if p]

    def send(self, position: int) -> None:
        stamp = time.time_ns()
        at = np.array([STEP_M * position, 0, 0, 0, 0, 0, 1])
        self.poses[-56:] = at.tobytes()   # position and orientation are the last of the message
        for publisher, message in ((self.info, self.infos), (self.pose, self.poses), (self.depth, self.depth and self.depths), (self.image, self.images[position % IMAGES])):
            if publisher:
                message[4:12] = np.array([stamp // 10**9, stamp % 10**9], np.uint32).tobytes()   # behind the header of CDR
                publisher.publish(bytes(message))


def publish(o) -> None:
    """Commands on stdin: path, frames, Hz. Says in JSON what was sent."""
    import rclpy
    rclpy.init()
    camera = Camera(rclpy.create_node("camera", namespace="/bench"), o)
    while not all(p.get_subscription_count() for p in camera.publishers):
        time.sleep(0.05)
    print("ready", flush=True)
    for line in sys.stdin:
        path, frames, hz = line.split()
        begin, cpu, late = time.monotonic(), time.process_time(), 0.0
        for i in range(int(frames)):
            wait = begin + i / float(hz) - time.monotonic()
            late = max(late, -wait)
            time.sleep(max(wait, 0))
            camera.send(MODES[path](i, o.prepare) if path != "prepare" else i)
        seconds = time.monotonic() - begin
        print(json.dumps({"sent": int(frames), "seconds": round(seconds, 2), "late_ms": round(1e3 * late, 1), "cpu": round((time.process_time() - cpu) / seconds, 3)}), flush=True)
    rclpy.shutdown()


# --------------------------------------------------------------------------------------------------------------------- the node

def timed_node(parameters):
    """train_node's node; its session's `waits` has (stamp, taken) of the images without a decision, `latencies` (T0, sent) in s of the others."""
    from rclpy.parameter import Parameter

    import spirula_ros.node
    from spirula_ros.session import Session

    class TimedSession(Session):
        waits, latencies, take_begin = deque(), [], None

        def _receiver(self, source):
            receive, image = super()._receiver(source), source.kind in ("image", "compressed")

            def timed(msg):
                if image:
                    self.waits.append([self.take_begin or time.monotonic(), None])
                receive(msg)
                if image:
                    self.waits[-1][1] = self.intake.cameras[0].inputs["image"].last_stamp_ns
                self.decided()
            return timed

        def decided(self):
            while len(self.waits) > self.intake.pending:
                taken, stamp = self.waits.popleft()
                self.latencies.append((time.monotonic() - taken, (time.time_ns() - stamp) / 1e9))

        def _tick(self):
            super()._tick()
            self.decided()
    spirula_ros.node.Session = TimedSession
    return spirula_ros.node.TrainNode(namespace="/bench", parameter_overrides=[Parameter(name, value=value) for name, value in parameters.items()])


def executor_of(name):
    import rclpy.executors
    from rclpy.experimental.events_executor import EventsExecutor

    import spirula_ros.node
    if name == "node":
        return getattr(spirula_ros.node, "make_executor", rclpy.executors.SingleThreadedExecutor)()
    return EventsExecutor() if name == "events" else rclpy.executors.SingleThreadedExecutor()


def thread_cpu_s(thread) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def counted(before, after, sent):
    dropped = {reason: n - before.dropped.get(reason, 0) for reason, n in after.dropped.items() if n > before.dropped.get(reason, 0)}
    received = after.frames_in - before.frames_in
    return {"sent": sent, "received": received, "missing": sent - received, "used": after.used - before.used, "dropped": dropped, "undecided": after.pending}


def latencies(pairs):
    ms = 1e3 * np.array(pairs).reshape(-1, 2)
    figures = lambda x: {"median": round(float(np.median(x)), 2), "p99": round(float(np.quantile(x, 0.99)), 2), "max": round(float(x.max()), 2)} if len(x) else None
    return {"t0_latency_ms": figures(ms[:, 0]), "sent_latency_ms": figures(ms[:, 1])}


def rates(silent, busy):
    mean = lambda phases, name: float(np.mean([p[name] for p in phases]))
    out = {f"{name}_{when}": round(mean(phases, name), 4) for name in ("steps_per_s", "steps_per_s_net", "t0_cpu") for when, phases in (("idle", silent), ("intake", busy))}
    return out | {name: round(out[f"{key}_intake"] / (out[f"{key}_idle"] or np.nan), 3) for name, key in (("ratio", "steps_per_s"), ("ratio_net", "steps_per_s_net"))}


class Bench:
    def __init__(self, o):
        import rclpy
        self.o = o
        if o.malloc == "kept":
            from spirula_ros.node import keep_freed_memory
            keep_freed_memory()
        rclpy.init()
        parameters = {"intake.depth": "require" if o.depth else "ignore", "engine.threads": o.threads, "engine.max_gaussians": o.gaussians, **({"gate.max_interval_s": 3600.0} if o.path == "known" else {}), "topics.image_transport": "compressed" if o.compressed else "raw",
                      **{name: json.loads(value) for name, value in (item.split("=", 1) for item in o.set)}}
        self.node, self.executor = timed_node(parameters), executor_of(o.executor)
        self.session = self.node.session
        self.executor.add_node(self.node)
        if hasattr(self.executor, "_take_subscription"):
            self._time_takes()
        self.taking_s = self._time_frames()
        self.publisher = subprocess.Popen([sys.executable, __file__, "--publish", *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.until(lambda: self.said == "ready", 120)

    def _time_takes(self):
        take, session = self.executor._take_subscription, self.session

        def timed(subscription):
            session.take_begin = time.monotonic()
            return take(subscription)
        self.executor._take_subscription = timed

    def _time_frames(self):
        """[s] that the worker has spent on taking frames in and on triangulation: no steps."""
        mapper, spent = self.session.mapper, [0.0]

        def timed(work):
            def call(*args):
                begin = time.monotonic()
                try:
                    return work(*args)
                finally:
                    spent[0] += time.monotonic() - begin
            return call
        mapper._take_frame, mapper._triangulate = timed(mapper._take_frame), timed(mapper._triangulate)
        return spent

    def until(self, done, limit_s):
        """Spins until done() and reads meanwhile what the publisher says."""
        self.said = None
        reader = threading.Thread(target=lambda: setattr(self, "said", self.publisher.stdout.readline().strip()), daemon=True)
        if self.publisher.poll() is None:
            reader.start()
        end = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > end:
                raise RuntimeError(f"nothing for {limit_s} s; received {self.session.mapper.ledger.counts()}; {self.session.intake.describe_silence()}")
            self.executor.spin_once(timeout_sec=0.1)

    def spin(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.executor.spin_once(timeout_sec=min(0.1, max(end - time.monotonic(), 0)))

    def send(self, path, frames, hz):
        self.publisher.stdin.write(f"{path} {frames} {hz}\n")
        self.publisher.stdin.flush()
        self.until(lambda: self.said, frames / hz * 3 + 60)
        return json.loads(self.said)

    def prepare(self):
        """A map; afterwards the worker has taken what waits, and trains without being due."""
        mapper = self.session.mapper
        self.send("prepare", self.o.prepare, 4.0)
        while len(mapper._inbox) or mapper._due > 0:
            self.spin(0.2)
        drained = mapper.command("drain")
        while not drained.done():
            self.spin(0.2)
        self.spin(self.o.settle)

    def phase(self, work):
        """Steps a second of the worker and the shares of a core of its thread, of T0 and of all others of this process."""
        mapper = self.session.mapper
        before = mapper._trainer.steps, time.monotonic(), time.thread_time(), thread_cpu_s(mapper._thread), time.process_time(), self.taking_s[0]
        result = work()
        after = mapper._trainer.steps, time.monotonic(), time.thread_time(), thread_cpu_s(mapper._thread), time.process_time(), self.taking_s[0]
        steps, seconds, t0, t1, all_, taking = (b - a for a, b in zip(before, after))
        return result, {"seconds": round(seconds, 2), "steps_per_s": round(steps / seconds, 3), "taking_s": round(taking, 2), "steps_per_s_net": round(steps / (seconds - taking), 3), "t0_cpu": round(t0 / seconds, 4), "worker_cpu": round(t1 / seconds, 3),
                        "process_cpu": round(all_ / seconds, 3), "load": round(os.getloadavg()[0], 2)}

    def stream(self):
        o = self.o
        sent = self.send(o.path, round(o.hz * o.seconds), o.hz)
        self.spin(0.3)   # what is on the way
        return sent

    def lost(self):
        return sum(i.lost for i in self.session.inputs if i.kind in ("image", "compressed"))

    def run(self):
        o, session, ledger = self.o, self.session, self.session.mapper.ledger
        self.prepare()
        before, lost, profile = ledger.counts(), self.lost(), cProfile.Profile()
        session.latencies.clear()
        silent, busy, sent = [], [], []
        for _ in range(o.rounds):
            silent.append(self.phase(lambda: self.spin(o.seconds))[1])
            if o.profile:
                profile.enable()
            said, shares = self.phase(self.stream)
            profile.disable()
            sent.append(said), busy.append(shares)
        silent.append(self.phase(lambda: self.spin(o.seconds))[1])
        if o.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(22)
        return {**counted(before, ledger.counts(), sum(s["sent"] for s in sent)), "lost_by_dds": self.lost() - lost, **latencies(session.latencies), **rates(silent, busy),
                "gaussians": session.mapper.status().gaussians, "keyframes": session.mapper.status().keyframes, "internal_errors": session.internal_errors,
                "publisher": sent, "silent": silent, "intake": busy}

    def close(self):
        self.publisher.stdin.close()
        self.publisher.wait(20)
        self.node.close()
        self.executor.shutdown()


def main():
    o = arguments()
    if o.publish:
        return publish(o)
    from spirula_ros.dds import fastdds_profile
    os.environ.update(fastdds_profile(os.environ))
    os.environ["ROS_DOMAIN_ID"] = str(1 + os.getpid() % 100)
    import rclpy
    bench = Bench(o)
    try:
        case = {"label": o.label, "size": o.size, "hz": o.hz, "transport": "jpeg" if o.compressed else "rgb8", "depth": o.depth, "path": o.path, "threads": o.threads,
                "executor": type(bench.executor).__name__, "backend": bench.session.mapper.backend, "set": o.set, "malloc": o.malloc, "cores": len(os.sched_getaffinity(0))}
        result = {**case, **bench.run()}
        print(json.dumps(result, indent=1), flush=True)
    finally:
        bench.close()
        rclpy.try_shutdown()
    if o.out:
        path = Path(o.out)
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else []) + [result], indent=1) + "\n")


if __name__ == "__main__":
    main()
