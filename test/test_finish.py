"""finish.py on a real mapper with its own thread: every wait ends when the mapper does not work, and training ends with it."""
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from spirula_gpu.camera import Camera, Frame
from spirula_gpu.config import Config, replaced
from spirula_gpu.mapper import Mapper
from spirula_ros.finish import refine, wait_until_idle

CAMERA = Camera(40, 30, 36.0, 36.0, 20.0, 15.0)
FOREVER = 10**9


@pytest.fixture
def mapper():
    """With one frame in its map."""
    mapper = Mapper(replaced(Config(), {"engine.backend": "cpu", "engine.threads": 1}))
    mapper.start()
    submit(mapper)
    wait_until_idle(mapper)
    yield mapper
    mapper.close()


def submit(mapper):
    rgb = np.random.default_rng(0).integers(0, 256, (30, 40, 3)).astype(np.uint8)
    mapper.ledger.arrived()
    mapper.submit(Frame(1, CAMERA, np.eye(4), rgb, np.full((30, 40), 2, np.float32)))


def until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_refine_makes_the_steps(mapper):
    before = mapper.status().steps
    refine(mapper, mapper.command, 0, 20)
    assert mapper.status().steps >= before + 20
    refine(mapper, None, 0, 0)  # asks for nothing


def test_the_rates_fall_once_over_all_pieces(mapper):
    shares, step = [], mapper._trainer.step
    mapper._trainer.step = lambda *args: (shares.append(mapper._trainer.refined), step(*args))
    refine(mapper, mapper.command, 2.0, 0)
    assert len(shares) > 20 and (np.diff(shares) >= 0).all() and 0.7 < shares[-1] < 1, shares
    assert mapper._trainer.refined == shares[-1], "what is measured next is not trained at whole rates before"


@pytest.mark.parametrize("state", ["paused", "stopped", "error"])
def test_every_wait_ends_when_the_mapper_does_not_work(mapper, state):
    with ThreadPoolExecutor() as pool:
        refining = pool.submit(refine, mapper, mapper.command, 0, FOREVER)
        until(lambda: mapper.status().steps > 20)
        if state == "paused":
            mapper.command("pause", True).result()
        elif state == "stopped":
            mapper.stop()
        else:
            mapper._trainer.step = lambda *_: 1 / 0
        with pytest.raises(RuntimeError, match={"error": "division by zero", "stopped": "stopped", "paused": "paused.*~/pause"}[state]):
            refining.result(timeout=10)
        mapper.ledger.arrived()  # a frame that nobody will take
        with pytest.raises(RuntimeError, match=state):
            pool.submit(wait_until_idle, mapper).result(timeout=10)


def test_a_reset_ends_the_refinement(mapper):
    with ThreadPoolExecutor() as pool:
        refining = pool.submit(refine, mapper, mapper.command, 0, FOREVER)
        until(lambda: mapper.status().steps > 20)
        mapper.command("reset").result()
        assert refining.exception(timeout=10) is None or "reset" in str(refining.exception())


def test_a_pause_that_a_viewer_may_end_is_waited_for(mapper):
    mapper.command("pause", True).result()
    mapper.ledger.arrived()  # a frame that nobody takes while it is paused

    class Stop:
        looks = 0

        @property
        def reason(self):
            Stop.looks += 1
            return "interrupted" if Stop.looks == 3 else ""
    wait_until_idle(mapper, Stop())
    assert Stop.looks == 3
