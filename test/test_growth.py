"""How the live trainer divides what fits badly: who, how many, where to, and what happens at the limits."""
import numpy as np
import pytest

from spirula_gpu import Engine
from spirula_gpu.config import Config, replaced
from spirula_gpu.native import NativeError, view
from spirula_gpu.keyframes import Keyframe, Keyframes
from spirula_gpu.trainer import SHORT_STEPS, Trainer
from spirula_gpu.camera import Camera, Frame
from scenes import gaussians, look

N, CAMERA = 200, Camera(48, 36, 40.0, 41.0, 23.0, 18.5)


def trainer(error: dict[int, float] = {}, dead=(), limit: int = 1000, **settings) -> Trainer:
    """Of 200 Gaussians with these errors; the dead ones are below prune.min_opacity."""
    g, engine = gaussians(N, 2, 3, size=(0.05, 0.2)), Engine("cpu", sh_degree=2, max_gaussians=limit, threads=1)
    opacities = np.full(N, 0.5)
    opacities[list(dead)] = 0.001
    engine.append(g.means, g.quats, np.log(g.scales), np.log(opacities / (1 - opacities)), g.sh)
    engine.write("stat.error", np.array([error.get(i, 0.0) for i in range(N)], np.float32))
    return Trainer(engine, replaced(Config(), {"engine.sh_degree": 2, "engine.max_gaussians": limit, "prune.growth": 0.1, "prune.growth_error": 1.0,
                                               **{k.replace("__", "."): v for k, v in settings.items()}}))


def picture(engine: Engine) -> np.ndarray:
    return engine.render(view(CAMERA, look(0.0, 0.0, (0.0, 0.0, 0.0)), 2))[0][0]


def test_what_fits_badly_is_divided_and_the_picture_stays():
    t = trainer({7: 50.0, 20: 50.0, 21: 0.9})
    means, before = t.engine.read("map.mean"), picture(t.engine)
    t.prune()
    assert len(t.engine) == N + 2, "10 % would be 20, but two fit badly enough"
    assert {tuple(p) for p in t.engine.read("map.mean")[N:]} == {tuple(means[i]) for i in (7, 20)}
    assert np.array_equal(t.engine.read("map.mean")[:N], means) and not t.engine.read("adam.steps")[N:].any()
    assert np.ptp(before) > 0.3 and np.abs(picture(t.engine) - before).max() < 0.05


def test_growth_is_a_share_of_the_map_and_ends_at_the_limit():
    t = trainer({i: 5.0 for i in range(N)}, limit=250)
    t.prune()
    assert len(t.engine) == 220
    t.engine.write("stat.error", np.full(220, 5.0, np.float32))
    t.prune()
    assert len(t.engine) == 242, "from 95 % of the limit on it takes the place of what goes, no more"
    t.prune()
    assert len(t.engine) == 242


def test_the_transparent_go_and_the_map_grows_all_the_same():
    t = trainer({7: 5.0, 8: 5.0}, dead=(1, 2, 3, 4))
    means = t.engine.read("map.mean")
    t.prune()
    left = t.engine.read("map.mean")
    assert len(left) == N - 4 + 2 and not any((left == means[i]).all(1).any() for i in (1, 2, 3, 4))


@pytest.mark.parametrize("settings", [dict(prune__growth=0.0), dict(prune__growth_error=6.0)], ids=str)
def test_without_growth_the_transparent_only_go(settings):
    t = trainer({7: 5.0}, dead=(1, 2), **settings)
    t.prune()
    assert len(t.engine) == N - 2


@pytest.mark.parametrize("relocate, left", [(True, N), (False, N - 3)])
def test_at_the_limit_as_many_are_divided_as_went(relocate, left):
    t = trainer({i: 0.5 for i in range(10, 20)}, dead=(1, 2, 3), limit=N, prune__relocate=relocate)
    t.prune()
    assert len(t.engine) == left


def test_a_map_that_has_no_error_yet_does_not_grow():
    t = trainer(dead=(1,), limit=N)
    t.prune()
    assert len(t.engine) == N - 1


def test_no_memory_for_growth_is_a_hint_and_leaves_no_blanks(monkeypatch):
    """The division is refused after the map has grown: what was appended is not seen, and goes with the next prune."""
    t, relocate = trainer({i: 5.0 for i in range(N)}), Engine.relocate

    def refuse(*_):
        raise NativeError("memory", "no memory for the scratch")
    before = picture(t.engine)
    monkeypatch.setattr(Engine, "relocate", refuse)
    t.prune()
    assert t.hint == "no memory for the scratch" and np.array_equal(picture(t.engine), before)
    monkeypatch.setattr(Engine, "relocate", relocate)
    t.config = replaced(t.config, {"prune.growth": 0.0, "prune.relocate": False})
    t.prune()
    assert len(t.engine) == N


def test_the_same_seed_grows_the_same_map():
    a, b = (trainer({i: float(i) for i in range(N)}) for _ in range(2))
    for t in (a, b):
        t.prune()
    assert np.array_equal(a.engine.read("map.mean"), b.engine.read("map.mean")) and len(a.engine) == 220


def test_a_refusal_stops_growth_for_a_while_and_what_a_hint_says_does_not():
    t = trainer({i: 5.0 for i in range(N)})
    t.hint = "keyframes came without depth"
    t.prune()
    assert len(t.engine) == 220
    t._refused(NativeError("memory", "no memory for the scratch of a step"))
    t.engine.write("stat.error", np.full(220, 5.0, np.float32))
    t.prune()
    assert len(t.engine) == 220
    t.steps += SHORT_STEPS
    t.prune()
    assert len(t.engine) == 242
    t._refused(NativeError("capacity", "engine.vram_budget_mb"))
    t.new_limits()
    t.engine.write("stat.error", np.full(242, 5.0, np.float32))
    t.prune()
    assert len(t.engine) == 266 and t.hint == ""


def test_gaussians_are_drawn_by_opacity_times_error():
    """Of 100 that fit badly, ten of weight 9 and ninety of weight 1: the first draw is one of the ten every other time."""
    t = trainer()
    which, weight = np.arange(100), np.r_[np.full(10, 9.0), np.full(90, 1.0)].astype(np.float32)
    t.engine.relocate, chosen = lambda dst, src, _: chosen.append(src), []
    for _ in range(400):
        t._divide(which, weight, 1)
        t.engine.keep(np.arange(len(t.engine)) < N)
    share = np.mean([src[0] < 10 for src in chosen])
    assert 0.42 < share < 0.58
    t._divide(which, weight, 100)
    assert np.array_equal(chosen[-1], which), "each at most once"


def test_a_large_map_is_pruned_as_much_more_rarely(monkeypatch):
    monkeypatch.setattr("spirula_gpu.trainer.LARGE_MAP", 50)   # the map has 200
    keyframes, pruned = Keyframes(0), []
    t = trainer(prune__interval_steps=10, refine__exposure=False)
    monkeypatch.setattr(t, "_prune", lambda: pruned.append(t.steps))
    T = np.linalg.inv(look(0.0, 0.0, (0.0, 0.0, 0.0)).astype(float))
    keyframes.add(Keyframe(0, Frame(1, CAMERA, T, np.full((36, 48, 3), 128, np.uint8)), 0.3), t.config.train)
    for _ in range(85):
        t.step(keyframes)
    assert pruned == [40, 80]
