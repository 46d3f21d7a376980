"""Offline training of a posed scene on the engine: frames -> initial map -> schedule with growth -> held-out figures.

    data = TrainingSet(read_colmap("desk").frames(size=(953, 535)), extent)
    with OfflineRun(data, OfflineConfig()) as run:
        run.train(until=7000)
        print(run.evaluate())
"""
from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Iterator, NamedTuple, Sequence

import numpy as np

from .camera import Frame
from .config import EngineConfig, InsertConfig, param, rows
from .dataset import SceneError
from .formats import write_map
from .metrics import cc_psnr, psnr, ssim
from .native import PRECISIONS, Engine, Hyper, InsertParams, NativeError, view
from .output import HeldOut, whole_map
from .splats import SH0
from .strategy import GrowConfig, Growth

ADAM_EPS = 1e-15
AT_ONCE = 16  # held-out frames that are rendered before they are measured


@dataclass(frozen=True)
class InitConfig:
    source: str = param("points", "", "points: the scene's sparse points, else depth pixels at random; insert: the live mapper's insertion, frame after frame")
    points: int = param(200_000, "Gaussians", "at the start, if there are as many points; insertion ends when it has reached this", 1, 200_000_000)
    opacity: float = param(0.5, "", "at birth (source points; else insert.opacity)", 0.01, 0.99)
    size: float = param(1.0, "", "sigma at birth over the root mean square distance of the 3 nearest points", 0.01, 10)
    frames: int = param(100, "frames", "training frames that insertion sees, chosen at random", 1, 1_000_000)


@dataclass(frozen=True)
class ScheduleConfig:
    """Red kitchen 160x120, 3000 steps, single runs: gsplat's rates 22.59 dB, the live mapper's 23.80, these 24.03."""
    max_steps: int = param(7000, "steps", "length of the run: every decay ends here", 1, 10_000_000)
    lr_mean: float = param(3e-4, "extent", "Adam step of positions at the start, in units of the scene's extent", 0, 1)
    lr_mean_final: float = param(0.05, "", ".. which falls exponentially to this share of it", 1e-9, 1)
    lr_quat: float = param(6e-3, "", "Adam step of rotations", 0, 1)
    lr_log_scale: float = param(3e-2, "", "Adam step of log scales", 0, 1)
    lr_logit_opacity: float = param(0.14, "", "Adam step of opacity logits", 0, 1)
    lr_sh0: float = param(1.4e-2, "", "Adam step of the base colour", 0, 1)
    lr_sh_rest: float = param(1e-3, "", "Adam step of the view-dependent colour", 0, 1)
    lr_final: float = param(0.4, "", "share to which all of these but lr_mean fall exponentially; 1: constant", 1e-9, 1)
    beta1: float = param(0.9, "", "Adam", 0, 0.9999)
    beta2: float = param(0.999, "", "Adam", 0, 0.99999)
    sh_interval_steps: int = param(300, "steps", "one more SH degree is trained after this many steps", 1, 1_000_000)
    ssim_weight: float = param(0.2, "", "loss = (1-w) L1 + w (1-SSIM) + depth_weight * relative depth error", 0, 1)
    depth_weight: float = param(0.0, "", "see ssim_weight", 0, 100)
    opacity_reg: float = param(0.01, "", "weight of the mean opacity of visible Gaussians", 0, 1)
    scale_reg: float = param(0.01, "", "weight of their mean size over their depth", 0, 1)
    noise: float = param(5e5, "", "position noise: covariance * normal * lr_mean * this, faded out with opacity; in units of extent 1; 0: none", 0, 1e9)
    blur_px2: float = param(0.3, "px^2", "added to every screen covariance", 0, 10)
    near: float = param(0.01, "extent", "Gaussians nearer than this are not drawn", 1e-6, 10)


@dataclass(frozen=True)
class OfflineConfig:
    """The one table; `config.rows` and `config.replaced` read and change it. engine.max_gaussians is the cap of the growth."""
    engine: EngineConfig = EngineConfig(sh_degree=3, max_gaussians=400_000)
    init: InitConfig = InitConfig()
    insert: InsertConfig = InsertConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    grow: GrowConfig = GrowConfig()


CHOICES = {"engine.backend": ("auto", "cpu", "cuda"), "engine.precision": tuple(PRECISIONS), "init.source": ("points", "insert")}


def check_words(config: OfflineConfig) -> None:
    """That rows of text have one of their words. Raises SceneError."""
    for name, value, _ in rows(config):
        if value not in CHOICES.get(name, (value,)):
            raise SceneError(f"{name} = '{value}': must be {' or '.join(CHOICES[name])}")


class Figures(NamedTuple):
    step: int
    psnr: float          # dB, mean over the held-out frames; renders are clipped to [0,1], not rounded
    cc_psnr: float       # dB, after an affine colour fit per frame
    ssim: float
    gaussians: int
    ms_per_step: float   # wall time of everything but the measuring, from the first step
    engine_bytes: int    # all buffers of the engine
    image_bytes: int     # training images where the engine reads them


class TrainingSet:
    """Frames and, once a backend has asked for them, its targets: shared by the runs of a sweep.

    extent: length that positions and their rates are relative to, world units; points [P,3], colors [P,3] uint8: may be empty. Raises SceneError."""

    def __init__(self, frames: list[Frame], extent: float, points=np.empty((0, 3)), colors=np.empty((0, 3), np.uint8)):
        self.train = [f for f in frames if not f.held_out]
        self.held_out = [f for f in frames if f.held_out]
        if not self.train:
            raise SceneError(f"0 training frames: {len(self.held_out)} of {len(frames)} are held out; hold out every second (2) or fewer")
        if not extent > 0:
            raise SceneError(f"{len(self.train)} training frames, extent {extent}: must be positive, cameras at one place have none; give images from several places")
        self.extent, self.points, self.colors = float(extent), np.asarray(points), np.asarray(colors)
        self._targets: dict[tuple[str, int, bool], list] = {}

    def targets(self, backend: str, device: int, depth: bool) -> list[tuple]:
        """(rgb, depth or None) of each training frame: on the GPU where torch can put them there, else on the host."""
        key = backend, device, depth
        if key not in self._targets:
            depths = [f.depth_m if depth else None for f in self.train]
            if depth and any(d is None for d in depths):
                raise SceneError("schedule.depth_weight > 0, but not every training frame has depth")
            put = _uploader(backend, device)
            self._targets[key] = [(put(f.rgb), None if d is None else put(d)) for f, d in zip(self.train, depths)]
        return self._targets[key]


def _uploader(backend: str, device: int):
    """What brings an array to where the backend reads it without a copy."""
    if backend == "cuda":
        import torch
        if torch.cuda.is_available():
            return lambda array: torch.from_numpy(array).to(f"cuda:{device}")  # a copy from pageable memory: finished when it returns
    return lambda array: array


class OfflineRun:
    """One training run. The caller decides when to measure; what happens at a step depends on its number alone. Raises SceneError when it cannot begin."""

    def __init__(self, data: TrainingSet, config: OfflineConfig = OfflineConfig()):
        check_words(config)
        e = config.engine
        self.data, self.config, self.step, self.train_s, self.loss = data, config, 0, 0.0, float("nan")  # loss: of the newest step that was waited for
        self.engine = Engine(e.backend, sh_degree=e.sh_degree, max_gaussians=e.max_gaussians, budget_bytes=e.vram_budget_mb << 20, threads=e.threads,
                             device=e.device, arena_alias=e.arena_alias, arena_debug=e.arena_debug, precision=e.precision, antialiased=e.antialiased)
        self._rng = np.random.default_rng(e.seed)
        self._views = [self._view(f) for f in data.train]
        self._targets = data.targets(self.engine.backend, e.device, config.schedule.depth_weight > 0)
        self.growth = Growth(self.engine, config.grow, e.max_gaussians, e.seed + 1)
        self._hyper, self._order = self._rates(), iter(())
        self._begin()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()

    def train(self, until: int) -> None:
        """Steps up to number `until`. Raises NativeError when the engine refuses one; the map is then as the steps before have left it."""
        g, last_growth = self.config.grow, self.config.grow.stop * self.config.schedule.max_steps
        begin = time.perf_counter()
        try:
            while self.step < until:
                self._one_step(wait=self.step + 1 == until)
                self.step += 1
                if g.start <= self.step <= last_growth and self.step % g.every == 0:
                    self.growth.apply()
        finally:
            self.train_s += time.perf_counter() - begin

    def evaluate(self) -> Figures:
        """The figures of now."""
        return self.figures([(h.psnr, h.cc_psnr, h.ssim) for h in self.held_out()])

    def figures(self, measured: Sequence[tuple[float, float, float]]) -> Figures:
        """Of (psnr, cc_psnr, ssim) of each held-out frame; NaN where there are none."""
        means = np.mean(measured, axis=0) if len(measured) else np.full(3, np.nan)
        image_bytes = sum(x.nbytes for pair in self._targets for x in pair if x is not None)
        return Figures(self.step, *map(float, means), len(self.engine), 1e3 * self.train_s / max(self.step, 1), self.engine.vram().total, image_bytes)

    def held_out(self) -> Iterator[HeldOut]:
        """Each held-out frame as the map shows it now. Measured are the renders themselves, clipped to [0,1], not the rounded ones that are handed out."""
        frames = self.data.held_out
        with ThreadPoolExecutor() as pool:  # numpy and OpenCV let go of the interpreter
            for first in range(0, len(frames), AT_ONCE):
                yield from pool.map(_measure, [(f, self.render(f)) for f in frames[first:first + AT_ONCE]])

    def save(self, path: str) -> int:
        """In the format that the suffix says (formats.py). Returns how many Gaussians. Raises FormatError, OSError."""
        return write_map(path, whole_map(self.engine))

    def render(self, frame: Frame) -> np.ndarray:
        """The map from the frame's camera: [H,W,3] float32 in [0,1]."""
        v = self._view(frame)
        v.sh_degree = self._degree()
        return self.engine.render(v)[0][0].clip(0, 1)

    # ---- a step --------------------------------------------------------------------------------------------------------
    def _one_step(self, wait: bool) -> None:
        """Every training frame once per epoch, in random order."""
        i = next(self._order, None)
        if i is None:
            self._order = iter(self._rng.permutation(len(self._views)).tolist())
            i = next(self._order)
        self._set_rates()
        self._views[i].sh_degree = self._degree()
        rgb, depth_m = self._targets[i]
        stats = self.engine.train_step(self._views[i], rgb, self._hyper, depth_m, wait=wait)
        if wait:
            self.loss = stats.loss

    def _degree(self) -> int:
        return min(self.engine.sh_degree, self.step // self.config.schedule.sh_interval_steps)

    def _rates(self) -> Hyper:
        s = self.config.schedule  # noise: covariance * rate would grow with the third power of the unit of length
        return Hyper(lr_quat=s.lr_quat, lr_log_scale=s.lr_log_scale, lr_logit_opacity=s.lr_logit_opacity, lr_sh0=s.lr_sh0, lr_sh_rest=s.lr_sh_rest,
                     beta1=s.beta1, beta2=s.beta2, eps=ADAM_EPS, ssim_weight=s.ssim_weight, depth_weight=s.depth_weight, opacity_reg=s.opacity_reg,
                     scale_reg=s.scale_reg, noise=s.noise / self.data.extent**2, seed=self.config.engine.seed)

    def _set_rates(self) -> None:
        """What changes from step to step."""
        s, h, progress = self.config.schedule, self._hyper, self.step / self.config.schedule.max_steps
        h.lr_mean = s.lr_mean * self.data.extent * s.lr_mean_final ** progress
        if s.lr_final != 1:
            fall = s.lr_final ** progress
            h.lr_quat, h.lr_log_scale, h.lr_logit_opacity = fall * s.lr_quat, fall * s.lr_log_scale, fall * s.lr_logit_opacity
            h.lr_sh0, h.lr_sh_rest = fall * s.lr_sh0, fall * s.lr_sh_rest

    def _view(self, frame: Frame):
        s = self.config.schedule
        return view(frame.camera, frame.T_cam_world, 0, blur_px2=s.blur_px2, near_m=s.near * self.data.extent, antialiased=self.engine.antialiased)

    # ---- the first map ---------------------------------------------------------------------------------------------------
    def _begin(self) -> None:
        if self.config.init.source == "insert":
            self._begin_by_insertion()
        elif len((points := self._points())[0]):
            self._begin_with(*points)
        if not len(self.engine):
            raise SceneError("no Gaussian to begin with: the scene has neither sparse points nor depth within insert.min_depth_m..max_depth_m")

    def _points(self) -> tuple[np.ndarray, np.ndarray]:
        """At most init.points, and as many as the cap allows: [P,3] world, [P,3] uint8."""
        points, colors, most = self.data.points, self.data.colors, min(self.config.init.points, self.config.engine.max_gaussians)
        if not len(points):
            points, colors = depth_points(self.data.train, most, self.config.insert, self._rng)
        if len(points) > most:
            chosen = self._rng.permutation(len(points))[:most]
            points, colors = points[chosen], colors[chosen]
        return points, colors

    def _begin_with(self, points: np.ndarray, colors: np.ndarray) -> None:
        """Isotropic, as large as the gaps between them."""
        n, init = len(points), self.config.init
        sigma = np.maximum(init.size * neighbour_distance(points), 1e-6 * self.data.extent)
        sh = np.zeros((n, (self.engine.sh_degree + 1) ** 2, 3), np.float32)
        sh[:, 0] = (colors / 255.0 - 0.5) / SH0
        self.engine.append(points, np.tile([1, 0, 0, 0], (n, 1)), np.tile(np.log(sigma)[:, None], (1, 3)),
                           np.full(n, np.log(init.opacity / (1 - init.opacity))), sh)

    def _begin_by_insertion(self) -> None:
        """As the live mapper does, from training frames in random order, until there are init.points Gaussians or the map is full."""
        frames = self.data.train
        for owner, k in enumerate(self._rng.permutation(len(frames))[:self.config.init.frames]):
            params = InsertParams(**asdict(self.config.insert), owner=owner, seed=self.config.engine.seed * 1_000_003 + owner)
            if frames[k].depth_m is None:
                raise SceneError(f"init.source insert needs depth, and {frames[k].frame_id} has none")
            try:
                self.engine.insert(self._views[k], frames[k].rgb, frames[k].depth_m, params)
            except NativeError as e:
                if e.kind != "capacity" or not len(self.engine):
                    raise
                return
            if len(self.engine) >= self.config.init.points:
                return


def depth_points(frames: list[Frame], n: int, limits: InsertConfig, rng) -> tuple[np.ndarray, np.ndarray]:
    """About n pixels with depth, chosen evenly over the frames: world [P,3] float32, colours [P,3] uint8."""
    points, colors = [np.empty((0, 3), np.float32)], [np.empty((0, 3), np.uint8)]
    for f in frames:
        if f.depth_m is None:
            continue
        v, u = np.nonzero((f.depth_m >= limits.min_depth_m) & (f.depth_m <= limits.max_depth_m))
        chosen = rng.permutation(len(v))[:-(-n // len(frames))]
        v, u, c = v[chosen], u[chosen], f.camera
        z = f.depth_m[v, u].astype(np.float64)
        local = np.stack([(u + 0.5 - c.cx) / c.fx * z, (v + 0.5 - c.cy) / c.fy * z, z], 1)
        points.append((local @ f.T_world_cam[:3, :3].T + f.T_world_cam[:3, 3]).astype(np.float32))
        colors.append(f.rgb[v, u])
    return np.concatenate(points), np.concatenate(colors)


def neighbour_distance(points: np.ndarray) -> np.ndarray:
    """[P]: root mean square distance to the 3 nearest other points, as 3DGS and gsplat begin."""
    from scipy.spatial import cKDTree
    near = cKDTree(points).query(points, k=min(4, len(points)), workers=-1)[0].reshape(len(points), -1)[:, 1:]
    return np.sqrt(np.square(near).mean(1)) if near.shape[1] else np.ones(len(points))


def _measure(pair: tuple[Frame, np.ndarray]) -> HeldOut:
    frame, render = pair
    image, truth = render.astype(np.float64), frame.rgb / 255.0
    return HeldOut(frame, (render * 255 + 0.5).astype(np.uint8), psnr(image, truth), ssim(image, truth), cc_psnr(image, truth))
