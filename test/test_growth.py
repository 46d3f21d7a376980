"""How the live trainer divides what fits badly: who, how many, where to, and what happens at the limits."""
import numpy as np
import pytest

from spirula_gpu import Engine
from spirula_gpu.config import Config, replaced
from spirula_gpu.native import NativeError, view
from spirula_gpu.trainer import Trainer
from spirula_gpu.camera import Camera
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
