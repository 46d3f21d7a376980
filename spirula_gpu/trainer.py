"""One step on one keyframe; insertion from one keyframe; pruning; the order of the map. The only writer of the Gaussians."""
from __future__ import annotations

import numpy as np

from .config import Config
from .correct import Motions, move_gaussians
from .keyframes import Keyframe, Keyframes
from .native import Engine, Hyper, InsertParams, NativeError
from .refine import Refinement
from .splats import Splats
from .strategy import append_transparent
from .track import Moments

ADAM_EPS = 1e-15
NO_KEYFRAME = -1  # owner of Gaussians that came from a file
SHORT_STEPS = 1000  # once memory was refused, the map does not grow for so long: what it would take is what a step needs
LARGE_MAP = 1_000_000  # Gaussians; a larger map is pruned as much more rarely, since that reads all of it
SORT_STEPS = 100  # at least so many between two sorts: one costs as much as a few steps
ROOM_ATTEMPTS = 9  # from the third on, each asks for about half of what the one before asked for
YOUNG_STEPS = 10   # for so many of its steps a keyframe is trained at half size while the mapper is behind
PATIENCE = 20      # times that the map makes room for memory that others hold (0.95^20 = 36 % are left), and one more with each frame taken in


def refused(error: NativeError) -> bool:
    """For want of memory: of the budget's, or of what the device or the machine has left."""
    return error.kind in ("capacity", "memory")


USUAL_M = 2.0      # median depth of the scenes that the parameters in metres are chosen for


class Trainer:
    def __init__(self, engine: Engine, config: Config):
        self.engine, self.config = engine, config
        self.steps, self.loss, self.hint = 0, float("nan"), ""
        self.refinement = Refinement(engine, config)
        self._unit_known = False   # engine.unit_m is measured; see measure_unit
        self._short_until = 0         # step until which memory is short
        self._pruned_at = 0           # step of the last prune
        self._lost = self._gave = 0   # steps in a row that had no memory; see PATIENCE
        self._unsorted = 0  # Gaussians that came or were relocated since the map was sorted ..
        self._first_degree = 0  # SH degree of the first steps: that of a map that was begun with
        self._sort_at = 0   # .. which it is again from this step on
        self._running: Keyframe | None = None  # of the step whose loss comes with the next one: the GPU is not waited for
        self._half = False   # .. and whether that one was at half the size
        self._seen = (0, 0)  # pairs and intersections of the newest step at full size that is known; what memory a step takes follows from them
        self._resumed_loss: float | None = None  # of `_running`, when that step was made before a checkpoint
        self._rng = np.random.default_rng(config.engine.seed + 1)
        self.refined = 0.0  # share of the refinement that is over; it stays until the next frame

    def step(self, keyframes: Keyframes, behind: bool = False) -> None:
        """Choose a keyframe, render, compare, descend; prune when it is time. behind: a young keyframe at half the size, which costs half."""
        t = self.config.train
        keyframe = keyframes.choose(t)
        interval = self.config.refine.interval_steps
        if interval and self.steps % interval == 0 and self.refinement.due():
            self.refine(keyframe)
            self.refinement.centre(keyframes)
        degree = min(self.engine.sh_degree, self._first_degree + self.steps // t.sh_interval_steps if t.sh_interval_steps else 3)
        half = behind and keyframe.steps < YOUNG_STEPS
        view, target, depth_m, mask = keyframe.compared(self.engine, degree, half)
        try:
            stats = self.engine.train_step(view, target, self._hyper(), depth_m, mask, wait=False)
        except NativeError as e:
            self._refused(e)
            self.steps += 1  # this one is lost: the scratch of the view did not fit beside the map, which makes room now
            self._lost += 1
            self._make_room(e)
            return
        self._lost = 0
        if stats.n_pairs >= 0 and not self._half:
            self._seen = stats.n_pairs, stats.n_isects
        if self._running:
            loss = stats.loss if self._resumed_loss is None else self._resumed_loss
            self._running.trained(loss)
            self.loss = loss if np.isnan(self.loss) else 0.95 * self.loss + 0.05 * loss
        self._running, self._half, self._resumed_loss = keyframe, half, None
        self.steps += 1
        interval = self.config.prune.interval_steps * max(len(self.engine) / LARGE_MAP, 1)
        if interval and self.steps - self._pruned_at >= interval:
            self.prune()
        self._sort_when_due()

    def begin_with(self, splats: Splats) -> None:
        """Gaussians that were trained before, of no keyframe, into an empty map. They begin with the rates of new ones: those of old ones
        (adam.steps = lr_decay_steps) made no difference (31.18 and 31.22 dB in the room, 450 steps)."""
        self.engine.append(*splats.with_degree(self.engine.sh_degree).arrays, owner=NO_KEYFRAME)
        self._unsorted, self._first_degree, self.refinement.given = len(splats.means), splats.degree, True

    def refine(self, keyframe: Keyframe) -> None:
        """Its pose and exposure from the map; they stay as they are when there is no memory for the render, which `hint` says."""
        try:
            self.refinement.apply(keyframe)
        except NativeError as e:
            if not refused(e):
                raise
            self.hint = str(e)

    def state(self) -> dict:
        """What a checkpoint keeps beside the map, for JSON. Waits for the step that runs; its loss still counts with the next one."""
        running, last = None, self.engine.last_step()
        if last.n_pairs >= 0 and not self._half:
            self._seen = last.n_pairs, last.n_isects
        if self._running:
            running = dict(id=self._running.id, loss=repr(last.loss if self._resumed_loss is None else self._resumed_loss))
        return dict(steps=self.steps, loss=repr(self.loss), hint=self.hint, unit_m=self.engine.unit_m if self._unit_known else None, running=running,
                    random=self._rng.bit_generator.state, unsorted=self._unsorted, sort_at=self._sort_at, lost=self._lost, gave=self._gave,
                    short_until=self._short_until, pruned_at=self._pruned_at, seen=self._seen, first_degree=self._first_degree,
                    refinement=self.refinement.state())

    def resume(self, state: dict, keyframes: Keyframes) -> None:
        """Go on as the trainer whose state() this is."""
        self.steps, self.loss, self.hint, self._rng.bit_generator.state = int(state["steps"]), float(state["loss"]), str(state["hint"]), state["random"]
        if (unit_m := state["unit_m"]) is not None:
            self.engine.unit_m, self._unit_known = float(unit_m), True
        self._unsorted, self._sort_at, self._lost, self._gave, self._short_until, self._pruned_at = (
            int(state[k]) for k in ("unsorted", "sort_at", "lost", "gave", "short_until", "pruned_at"))
        self._first_degree, self._seen = int(state["first_degree"]), tuple(map(int, state["seen"]))
        self.refinement.resume(state["refinement"])
        if (running := state["running"]) is not None:  # it may have left the keyframes: then only the mean loss hears of it
            self._running = next((k for k in keyframes if k.id == running["id"]), None) or Keyframe(running["id"], None, 0.0)
            self._resumed_loss = float(running["loss"])

    def new_limits(self) -> None:
        """What was refused under the old ones may be had now."""
        self.hint, self._short_until = "", 0

    def _refused(self, error: NativeError) -> None:
        """There was no memory, which `hint` says; anything else is raised. The loss of the step that ran goes with the refusal."""
        if not refused(error):
            raise error
        self.hint, self._running, self._resumed_loss, self._short_until = str(error), None, None, self.steps + SHORT_STEPS

    @property
    def starved(self) -> bool:
        """There has been no memory for any of many steps."""
        return self._lost > PATIENCE

    def _hyper(self) -> Hyper:
        t, fall = self.config.train, self.config.refine.lr_final ** self.refined
        return Hyper(lr_mean=fall * t.lr_mean * self.unit_m, lr_mean_final=fall * t.lr_mean_final * self.unit_m, lr_decay_steps=t.lr_decay_steps, lr_quat=fall * t.lr_quat,
                     lr_log_scale=fall * t.lr_log_scale, lr_logit_opacity=fall * t.lr_logit_opacity, lr_sh0=fall * t.lr_sh0, lr_sh_rest=fall * t.lr_sh_rest, beta1=t.beta1, beta2=t.beta2, eps=ADAM_EPS,
                     ssim_weight=t.ssim_weight, depth_weight=t.depth_weight, opacity_reg=t.opacity_reg, scale_reg=t.scale_reg)

    @property
    def unit_m(self) -> float:
        return self.engine.unit_m

    def measure_unit(self, depth_m: np.ndarray, own: bool) -> None:
        """The first depth that is measured in a map says it: a frame's own is in metres, that of several views in the unit of the poses."""
        if self._unit_known or not (depth_m > 0).any():
            return
        self._unit_known = True
        if not own:
            self.engine.unit_m = float(np.median(depth_m[depth_m > 0])) / USUAL_M

    def insert(self, keyframe: Keyframe, depth_m: np.ndarray) -> int:
        """New Gaussians from depth_m [H,W], the keyframe's own or of several views. At the limit the weakest make room, then the new
        ones come more sparsely; `hint` says so. Returns how many came."""
        frame, spacing, gain = keyframe.frame, self.config.insert.hole_spacing_px, self.config.insert.detail_gain
        self.measure_unit(depth_m, own=frame.depth_m is not None)
        self.hint = ""
        for attempt in range(ROOM_ATTEMPTS):
            try:
                n = self.engine.insert(keyframe.view(self.engine, self.engine.sh_degree), keyframe.target, depth_m, self._insertion(keyframe.id, spacing, gain), frame.mask)
                self._unsorted += n
                self._gave = max(self._gave - 1, 0)
                if not len(self.engine):
                    i = self.config.insert
                    self.hint = f"no Gaussian yet: no pixel has a depth between insert.min_depth_m {i.min_depth_m} and insert.max_depth_m {i.max_depth_m}"
                return n
            except NativeError as e:
                self._refused(e)
                refusal = e
            if attempt == 0:
                self._make_room(refusal)
            else:
                spacing, gain = 1.5 * spacing, gain / 2
        return 0

    def _insertion(self, owner: int, hole_spacing_px: float, detail_gain: float) -> InsertParams:
        i = self.config.insert
        return InsertParams(alpha_below=i.alpha_below, depth_error=i.depth_error, detail_gain=detail_gain, min_depth_m=i.min_depth_m * self.unit_m,
                            max_depth_m=i.max_depth_m * self.unit_m, hole_spacing_px=hole_spacing_px, size=i.size, opacity=i.opacity, owner=owner,
                            seed=self.config.engine.seed * 1_000_003 + owner)

    def correct(self, motions: Motions, owners: Moments, as_one: bool) -> int:
        """The Gaussians of a corrected path move, each with its owner, which was taken at owners [owner]; as one, they are trained on as they were. Returns how many."""
        n = move_gaussians(self.engine, *motions.of(owners), forget=not as_one)
        self._unsorted += n
        return n

    def prune(self) -> None:
        """Remove what is transparent, oversized or not finite, then divide what fits badly; at the limit only as many as were removed."""
        self._pruned_at = self.steps
        if not len(self.engine):
            return
        try:
            self._prune()
        except NativeError as e:  # moving Gaussians takes some scratch
            self._refused(e)

    def _prune(self) -> None:
        p, n, limit = self.config.prune, len(self.engine), self.config.engine.max_gaussians
        logit, scale, mean = (self.engine.read(f"map.{row}") for row in ("logit_opacity", "log_scale", "mean"))
        with np.errstate(divide="ignore", invalid="ignore"):
            least = np.log(p.min_opacity) - np.log1p(-p.min_opacity)
            good = (logit >= least) & (scale.T <= np.log(max(p.max_scale_m * self.unit_m, 1e-30))).all(0) & np.isfinite(mean.T.sum(0))  # inf - inf is NaN
        full, removed = n > 0.95 * limit or self.steps < self._short_until, n - int(np.count_nonzero(good))
        if removed:
            self.engine.keep(good)
        most = removed * p.relocate if full else int(p.growth * n)
        if most:
            error = np.nan_to_num(self.engine.read("stat.error"), posinf=0)
            bad = np.flatnonzero(error >= (np.finfo(np.float32).tiny if full else max(p.growth_error, 1e-30)))
            self._divide(bad, error[bad] / (1 + np.exp(-logit[good][bad])), min(most, limit - len(self.engine)))

    def _divide(self, which: np.ndarray, weight: np.ndarray, most: int) -> None:
        """Each of at most so many of the Gaussians `which` [m], drawn with this weight [m] (an exponential race: Efraimidis and Spirakis 2006), becomes two
        at its place that together show what it did."""
        n, count = len(self.engine), min(most, len(which))
        if count <= 0:
            return
        finish = self._rng.standard_exponential(len(which), np.float32) / weight
        src = which[np.sort(np.argpartition(finish, count - 1)[:count])]
        append_transparent(self.engine, count)
        self.engine.relocate(np.arange(n, n + count), src, self.config.prune.min_opacity)
        self._unsorted += count

    def _sort_when_due(self) -> None:
        """Spatial order, once enough has come. Where scratch memory for it is not to be had, the map stays as it is until as much has come again."""
        growth = self.config.train.sort_growth
        if not growth or self.steps < self._sort_at or self._unsorted <= growth * len(self.engine):
            return
        self._unsorted, self._sort_at = 0, self.steps + SORT_STEPS
        try:
            self.engine.sort()
        except NativeError as e:
            self._refused(e)

    def _make_room(self, refusal: NativeError) -> None:
        """Remove the 5 % that have contributed least to any view; new ones, hardly seen, only when there are no others."""
        self.hint, n = str(refusal), len(self.engine)
        if not (self.config.prune.relocate and n) or (refusal.kind == "memory" and self._gave >= PATIENCE):
            return
        self._gave += refusal.kind == "memory"
        weight = self.engine.read("stat.weight")
        weight[self.engine.read("adam.steps") < 20] = np.inf
        known = int(np.isfinite(weight).sum())
        weakest = np.argsort(weight, kind="stable")[:min(n // 20 + 1, known)] if known else np.arange(0, n, 20)
        keep = np.ones(n, bool)
        keep[weakest] = False
        try:
            self.engine.keep(keep)
        except NativeError as e:
            if not refused(e):
                raise
