"""Every parameter of the engine and the mapper, once: name, default, unit, range, help.

The ROS parameters, `config/default.yaml` and the documentation derive from these rows (a test proves that they agree).
"""
from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any, Iterable, Iterator


def param(default: Any, unit: str, help: str, low: float | None = None, high: float | None = None, live: bool = False):
    """One row: `live` parameters may change while the mapper runs."""
    return field(default=default, metadata=dict(unit=unit, help=help, low=low, high=high, live=live))


@dataclass(frozen=True)
class EngineConfig:
    backend: str = param("auto", "", "auto | cpu | cuda; auto takes cuda when its library and a GPU are there")
    device: int = param(0, "", "CUDA device index", 0, 63)
    threads: int = param(0, "", "CPU threads of the engine; 0 = all cores", 0, 1024)
    sh_degree: int = param(2, "", "spherical-harmonics degree of the colours", 0, 3)
    precision: str = param("full", "", "full | compact; compact stores a Gaussian in less than half of the bytes (see max_gaussians), at the same quality")
    antialiased: bool = param(False, "", "draw and train the map with the 2D mip filter (Mip-Splatting): right at other sizes and distances than those trained at, in viewers that have it; a map is shown as it was trained")
    max_gaussians: int = param(1_000_000, "Gaussians", "the map never holds more; bytes each at sh_degree 0, 1, 2, 3: full 176 216 280 368, compact 88 102 120 142; training takes scratch beside (spirula forecast)", 1, 200_000_000)
    vram_budget_mb: int = param(0, "MiB", "bytes that all engine buffers together may take, the map (see max_gaussians) and scratch; 0 = no limit; spirula forecast --vram-mb says how many Gaussians fit", 0, 1_000_000)
    arena_alias: bool = param(True, "", "let buffers that are never alive together share bytes")
    arena_debug: bool = param(False, "", "poison and canaries in the arena (slow)")
    seed: int = param(0, "", "seed of every random choice", 0, 2**31 - 1)


@dataclass(frozen=True)
class GateConfig:
    min_translation_m: float = param(0.02, "m", "a frame that moved this far from each of the last 2000 keyframes becomes one", 0, 100, True)
    min_rotation_deg: float = param(1.0, "deg", ".. or that turned this far", 0, 180, True)
    max_interval_s: float = param(1.0, "s", ".. or that came this long after the last keyframe", 0, 3600, True)
    min_sharpness: float = param(0.3, "", "reject a frame whose Laplacian variance is below this share of the recent median; 0 = off", 0, 1, True)
    inbox_frames: int = param(8, "frames", "frames that may wait for the mapper; the oldest is dropped beyond this", 1, 1000)


@dataclass(frozen=True)
class InsertConfig:
    alpha_below: float = param(0.5, "", "insert where the rendered alpha is below this", 0, 1, True)
    depth_error: float = param(0.05, "", "insert where measured depth is in front of the rendered one by this share", 0, 10, True)
    detail_gain: float = param(0.3, "", "probability of insertion per unit of missing |Laplacian|", 0, 100, True)
    min_depth_m: float = param(0.1, "m", "nearest depth that is used", 0.001, 1000, True)
    max_depth_m: float = param(20.0, "m", "farthest depth that is used", 0.01, 10000, True)
    size: float = param(0.7, "px", "sigma at birth, in units of the sampling distance", 0.01, 10, True)
    opacity: float = param(0.2, "", "opacity at birth", 0.01, 0.99, True)
    hole_spacing_px: float = param(3.0, "px", "where the map is empty or wrong: at least one Gaussian every so many pixels", 1, 64, True)


@dataclass(frozen=True)
class TrainConfig:
    start_map: str = param("", "", "begin with the Gaussians of this file (.ply, .compressed.ply, .splat, .spz) in the map's frame; not when a checkpoint is resumed, and a reset begins empty")
    steps_per_frame: int = param(30, "steps", "steps due for each frame taken in; the mapper does more when idle (not with --lossless)", 0, 10000, True)
    half_behind: float = param(2.0, "frames", "new keyframes are trained at half size, which costs half, while the steps of more than so many frames are due and frames come; 0 = never", 0, 1e6, True)
    max_keyframes: int = param(2000, "keyframes", "keyframes kept for replay; beyond this the most redundant one goes", 2, 1_000_000)
    keyframes_mb: int = param(1024, "MiB", "host memory of their images; beyond this too the most redundant one goes", 16, 1_000_000, True)
    newest_probability: float = param(0.1, "", "share of steps on the newest keyframe", 0, 1, True)
    ssim_weight: float = param(0.2, "", "loss = (1-w) L1 + w (1-SSIM) + depth_weight * relative depth error", 0, 1, True)
    depth_weight: float = param(0.02, "", "see ssim_weight", 0, 100, True)
    lr_mean: float = param(4e-4, "m", "Adam step of positions", 0, 1, True)
    lr_mean_final: float = param(4e-5, "m", ".. which falls to this over a Gaussian's first lr_decay_steps", 1e-9, 1, True)
    lr_decay_steps: int = param(2000, "steps", "see lr_mean_final; 0 = constant", 0, 1_000_000, True)
    lr_quat: float = param(3e-3, "", "Adam step of rotations", 0, 1, True)
    lr_log_scale: float = param(1.5e-2, "", "Adam step of log scales", 0, 1, True)
    lr_logit_opacity: float = param(7e-2, "", "Adam step of opacity logits", 0, 1, True)
    lr_sh0: float = param(7e-3, "", "Adam step of the base colour", 0, 1, True)
    lr_sh_rest: float = param(5e-4, "", "Adam step of the view-dependent colour", 0, 1, True)
    beta1: float = param(0.9, "", "Adam", 0, 0.9999, True)
    beta2: float = param(0.99, "", "Adam", 0, 0.99999, True)
    sh_interval_steps: int = param(300, "steps", "one more SH degree is trained after this many steps", 0, 1_000_000, True)
    opacity_reg: float = param(0.0, "", "weight of the mean opacity of visible Gaussians", 0, 1, True)
    scale_reg: float = param(0.0, "", "weight of the mean size of visible Gaussians, relative to their depth", 0, 1, True)
    sort_growth: float = param(0.1, "", "bring the map into spatial order, which makes steps cheaper, when this share of it came since the last time; 0 = never", 0, 1, True)
    blur_px2: float = param(0.3, "px^2", "added to every screen covariance", 0, 10)


@dataclass(frozen=True)
class PruneConfig:
    interval_steps: int = param(200, "steps", "prune every so many steps; 0 = never", 0, 1_000_000, True)
    min_opacity: float = param(0.005, "", "Gaussians below this opacity go", 0, 1, True)
    max_scale_m: float = param(2.0, "m", "Gaussians with a larger axis go", 0, 10000, True)
    growth: float = param(0.04, "", "each time, the map grows by at most this share: Gaussians that fit badly are divided; 0 = only insertion makes new ones", 0, 1, True)
    growth_error: float = param(0.5, "px", "how badly: pixels covered times mean |render - image| there (colours in 0..1), which halves with each division", 0, 1000, True)
    relocate: bool = param(True, "", "at max_gaussians or the budget, move weak Gaussians onto poorly fitted ones instead of growing", live=True)


@dataclass(frozen=True)
class RefineConfig:
    exposure: bool = param(True, "", "estimate a gain per channel of each keyframe, so that the map keeps one exposure", live=True)
    pose: bool = param(True, "", "align each keyframe with the map, anchored to the pose that came with it, by as much as tracked corners say that poses are off; frames between keyframes follow", live=True)
    pose_sigma: float = param(0.01, "", "most that given positions may be off along each axis (one sigma), as a share of the median depth of the view", 1e-6, 1, True)
    pose_sigma_deg: float = param(1.0, "deg", "most that given rotations may be off about each axis", 1e-4, 90, True)
    interval_steps: int = param(10, "steps", "the keyframe of every so many-th step is refined again; 0 = only at its arrival", 0, 1_000_000, True)
    lr_final: float = param(0.1, "", "share to which all Adam steps fall exponentially while the map is refined for a given time (~/finish, --refine-seconds, --refine-steps); 1 = constant", 1e-3, 1, True)


@dataclass(frozen=True)
class MeshConfig:
    period_s: float = param(5.0, "s", "time between mesh updates while someone listens; 0 = only on request", 0, 3600, True)
    voxel_m: float = param(0.03, "m", "TSDF voxel", 0.001, 1)
    truncation_voxels: float = param(4.0, "voxels", "TSDF truncation", 1, 20)
    max_depth_m: float = param(6.0, "m", "rendered depth beyond this is not fused", 0.1, 1000)
    chunk_m: float = param(2.0, "m", "edge of a mesh chunk", 0.1, 100)


@dataclass(frozen=True)
class EvalConfig:
    holdout_every: int = param(0, "frames", "every so many-th frame is kept out of the map and used to measure it; 0 = none", 0, 10000)
    period_s: float = param(2.0, "s", "time between held-out measurements (one frame each) while mapping; 0 = only at the end", 0, 3600, True)
    max_held_out: int = param(200, "frames", "held-out frames kept", 1, 100000)


@dataclass(frozen=True)
class CheckpointConfig:
    path: str = param("", "", "everything that training needs is saved here, also when the node stops; training stands still meanwhile; empty = off")
    period_s: float = param(60.0, "s", "time between saves while the map changes, at least 20 times what a save takes; 0 = only at the end", 0, 86400, True)
    resume: bool = param(False, "", "go on from checkpoint.path when the file is there; a damaged one is refused")
    source: str = param("", "", "what the frames come from, kept in the file: `spirula replay` says it, and the node where this is empty")
    any_source: bool = param(False, "", "a replay may go on with the map of another recording, other topics, or from a place far from that map; both must have the same map frame")


@dataclass(frozen=True)
class Config:
    engine: EngineConfig = EngineConfig()
    gate: GateConfig = GateConfig()
    insert: InsertConfig = InsertConfig()
    train: TrainConfig = TrainConfig()
    prune: PruneConfig = PruneConfig()
    refine: RefineConfig = RefineConfig()
    mesh: MeshConfig = MeshConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


def rows(config: Any = None) -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """(dotted name, value, field) of every parameter, in order."""
    config = Config() if config is None else config
    for group in dataclasses.fields(config):
        for f in dataclasses.fields(getattr(config, group.name)):
            yield f"{group.name}.{f.name}", getattr(getattr(config, group.name), f.name), f


def replaced(config: Any, values: dict[str, Any]) -> Any:
    """A new config with dotted names replaced. Raises ValueError with name, value, range and unit on a bad value."""
    known = {name: (value, f) for name, value, f in rows(config)}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name not in known:
            raise unknown(name, known)
        group, leaf = name.split(".")
        groups.setdefault(group, {})[leaf] = checked(name, value, *known[name])
    return dataclasses.replace(config, **{g: dataclasses.replace(getattr(config, g), **v) for g, v in groups.items()})


def unknown(name: str, known: Iterable[str]) -> ValueError:
    """What to raise, with the known name that was meant, if one is near: by the part behind the point first, then by the group."""
    def alike(a: str, b: str) -> float:
        return 1.0 if a == b else 0.9 if min(len(a), len(b)) > 3 and (a.startswith(b) or b.startswith(a)) else difflib.SequenceMatcher(None, a, b).ratio()
    parts = lambda x: ("", *x.rsplit(".", 1))[-2:]
    (group, leaf), known = parts(name), [*known]
    score = {k: (alike(leaf, parts(k)[1]), alike(group, parts(k)[0]) if group else 1.0) for k in known}
    near = max(known, key=lambda k: score[k][0] + score[k][1] / 2)
    return ValueError(f"unknown parameter '{name}'" + (f"; did you mean '{near}'?" if score[near][0] == 1 or min(score[near]) >= 0.7 else ""))


def checked(name: str, value: Any, current: Any, f: dataclasses.Field) -> Any:
    """`value` in the type of the row, or ValueError."""
    kind = type(current)
    if kind is bool and not isinstance(value, bool) or kind is str and not isinstance(value, str):
        raise ValueError(f"{name} = {value!r}: must be {kind.__name__}")
    try:
        out = kind(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} = {value!r}: must be {kind.__name__}") from None
    if kind is int and out != value:
        raise ValueError(f"{name} = {value!r}: must be a whole number")
    low, high = f.metadata["low"], f.metadata["high"]
    if low is not None and not low <= out <= high:  # also refuses NaN
        raise ValueError(f"{name} = {out}{' ' * bool(f.metadata['unit'])}{f.metadata['unit']}: must lie in [{low}, {high}]")
    return out


def load_yaml(path: str, config: Any = None) -> Any:
    """Config from a ROS parameter file (`/**: ros__parameters:`) or plain nested YAML; rows of other tables are ignored."""
    import yaml
    with open(path) as file:
        tree = yaml.safe_load(file) or {}
    for key in list(tree):
        if isinstance(tree[key], dict) and "ros__parameters" in tree[key]:
            tree = tree[key]["ros__parameters"]
            break
    config = Config() if config is None else config
    groups = {f.name for f in dataclasses.fields(config)}
    flat = {f"{g}.{k}": v for g, leaf in tree.items() if g in groups and isinstance(leaf, dict) for k, v in leaf.items()}
    return replaced(config, flat)
