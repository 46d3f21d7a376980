"""The gain between an image and a render is found in spite of clipping, outliers and a pose that is off; a map from changing exposure is as good."""
from dataclasses import replace

import numpy as np
import pytest

from spirula_gpu import keyframes as keyframes_module, refine
from spirula_gpu.camera import Camera
from spirula_gpu.config import Config, TrainConfig, replaced
from spirula_gpu.exposure import corrected, log_gain
from spirula_gpu.keyframes import Keyframe, Keyframes
from spirula_gpu.mapper import Mapper
from spirula_gpu.refine import EXPOSURE_PIXELS, MOST_SHARE, Refinement
from test_align import CONFIG, mapped, stream, wall

FULL = np.ones((60, 80), np.float32)


def exposed(rgb: np.ndarray, gain) -> np.ndarray:
    return np.clip(np.rint(rgb * gain), 0, 255).astype(np.uint8)


@pytest.mark.parametrize("gain", [(1, 1, 1), (0.5, 0.5, 0.5), (1.1, 0.9, 1.0), (1.7, 1.7, 1.7)])
def test_a_known_gain_is_found_though_pixels_are_clipped(gain):
    rgb, _ = wall(np.eye(4))
    image = exposed(rgb, gain)
    assert max(gain) < 1.5 or (image == 255).mean() > 0.15
    assert np.exp(log_gain(image, rgb / 255, FULL)) == pytest.approx(gain, rel=0.02)


def test_outliers_masks_and_a_wrong_pose():
    rgb, _ = wall(np.eye(4))
    image = exposed(rgb, 0.8)
    image[:25, :30] = 200
    assert np.exp(log_gain(image, rgb / 255, FULL)) == pytest.approx([0.8] * 3, rel=0.04)
    image[:, :50] = 200
    mask = np.ones((60, 80), np.uint8)
    mask[:, :50] = 0
    assert np.exp(log_gain(image, rgb / 255, FULL, mask)) == pytest.approx([0.8] * 3, rel=0.02)
    off = np.eye(4)
    off[0, 3] = 0.06   # 2 px
    assert np.exp(log_gain(exposed(wall(off)[0], 0.8), rgb / 255, FULL)) == pytest.approx([0.8] * 3, rel=0.03)


@pytest.mark.parametrize("height, width", [(1, 1), (4, 1), (1, 4), (3, 3)])
def test_images_of_a_few_pixels_are_no_answer_and_no_error(height, width):
    assert log_gain(np.full((height, width, 3), 100, np.uint8), np.full((height, width, 3), 0.4, np.float32), np.ones((height, width), np.float32)) is None


def test_too_little_to_compare_is_no_answer():
    rgb, _ = wall(np.eye(4))
    alpha = FULL.copy()
    alpha[:, 5:] = 0.5
    assert log_gain(exposed(rgb, 1), rgb / 255, alpha) is None
    assert log_gain(np.full((60, 80, 3), 255, np.uint8), rgb / 255, FULL) is None


def test_a_gain_that_cannot_be_meant_is_no_answer():
    rgb, _ = wall(np.eye(4))
    assert log_gain(exposed(rgb, 1), np.full_like(rgb, 0.001), FULL) is None   # a render that is black
    assert log_gain(exposed(rgb, 0.06), rgb / 255, FULL) is None               # a covered lens
    assert np.exp(log_gain(exposed(rgb, 0.16), rgb / 255, FULL)) == pytest.approx([0.16] * 3, rel=0.05)


def test_an_image_is_brought_to_the_exposure_of_the_map():
    image = np.arange(256, dtype=np.uint8)[:, None, None].repeat(3, 2)
    assert corrected(image, np.zeros(3)) is image
    out = corrected(image, np.log([2.0, 1.0, 0.5])).astype(int)[:, 0]
    assert out[200].tolist() == [100, 200, 255] and out[255].tolist() == [128, 255, 255]


def ramp(n: int):
    return lambda i: 0.6 * 3 ** (i / (n - 1))


def cc(mapper) -> float:
    return float(np.mean([h.cc_psnr for h in mapper.evaluate()]))


def test_a_ramp_of_exposure_costs_little_with_it_and_much_without():
    on = dict(refine__pose=False, refine__exposure=True)
    off = dict(refine__pose=False)
    clean, bright = stream(24, False), stream(24, False, gain=ramp(24))
    best, with_it, without = cc(mapped(clean, **off)), cc(mapped(bright, **on)), cc(mapped(bright, **off))
    assert best - without > 1.5 and best - with_it < 0.5 * (best - without), (best, with_it, without)


def test_constant_exposure_stays_as_it_is_and_costs_nothing():
    on, off = mapped(stream(24, False), refine__pose=False, refine__exposure=True), mapped(stream(24, False), refine__pose=False)
    gains = gains_of(on)
    assert gains.any() and np.abs(gains).max() < 0.05 and np.abs(gains.mean(0)).max() < 0.02
    assert on.evaluate()[0].psnr > off.evaluate()[0].psnr - 0.5


def gains_of(mapper: Mapper) -> np.ndarray:
    return np.array([k.log_gain for k in mapper._keyframes])


# ---- keyframes with gains ------------------------------------------------------------------------------------------------

def known(gains, frames=None) -> Keyframes:
    """Keyframes with these log gains [n], the same in each channel."""
    out = Keyframes(0)
    for i, (gain, frame) in enumerate(zip(gains, frames or stream(1, False) * len(gains))):
        out.add(Keyframe(i, replace(frame, stamp_ns=10**18 + i), 0.3), TrainConfig())
        out.newest.expose(np.full(3, float(gain)))
    return out


def refinement(**changes) -> Refinement:
    return Refinement(None, replaced(Config(), {"refine.exposure": True} | {k.replace("__", "."): v for k, v in changes.items()}))


def test_one_wrong_gain_does_not_shift_the_others_and_a_common_one_goes():
    r = refinement()
    r._exposed = 10
    keyframes = known([0.0] * 9 + [2.0])
    r.centre(keyframes)
    assert [k.log_gain[0] for k in keyframes] == [0.0] * 9 + [2.0]
    r._exposed = 10
    keyframes = known([0.5] * 9 + [2.0])
    r.centre(keyframes)
    assert [k.log_gain[0] for k in keyframes] == [0.0] * 9 + [1.5]


@pytest.mark.parametrize("exposed, on, looks", [(100, True, 1), (99, True, 0), (2000, False, 0)])
def test_the_mean_is_looked_at_when_a_part_of_many_gains_has_changed(exposed, on, looks):
    class Counted:
        def __init__(self): self.looks = 0
        def __len__(self): return 2000
        def __iter__(self):
            self.looks += 1
            return iter(known([0.0]))
    r, keyframes = refinement(refine__exposure=on), Counted()
    r._exposed = exposed
    for _ in range(3):
        r.centre(keyframes)
    assert keyframes.looks == looks


def test_gains_are_interpolated_for_many_frames_at_once():
    keyframes = known([0.0, 1.0, 3.0])
    keyframes._all[1:] = keyframes._all[:0:-1]   # late ones are not last
    at = keyframes.log_gain_at(np.array([10**18 - 5, 10**18 + 1, 10**18 + 2, 10**18 + 9]))
    assert at[:, 0].tolist() == [0, 1, 3, 3] and at.shape == (4, 3) and keyframes.log_gain_at(10**18 + 1).tolist() == [1] * 3
    assert Keyframes(0).log_gain_at([1, 2]).tolist() == [[0] * 3] * 2


def test_few_images_at_the_exposure_of_the_map_are_kept(monkeypatch):
    monkeypatch.setattr(keyframes_module, "MOST_TARGETS", 4)
    keyframes = known([0.5] * 10)
    first = keyframes._all[0]
    images = [k.target for k in keyframes]
    assert len(keyframes._targets._images) == 4 and keyframes.newest.target is images[-1] and first.target is not images[0]
    assert np.array_equal(first.target, images[0]) and first.target is first.target
    first.expose(np.full(3, 0.1))
    assert np.array_equal(first.target, corrected(first.frame.rgb, np.full(3, 0.1)))
    keyframes.add(Keyframe(10, first.frame, 0.3), TrainConfig(max_keyframes=3))
    assert set(keyframes._targets._images) <= {k.id for k in keyframes} and keyframes.bytes == sum(k.bytes for k in keyframes)


# ---- in the mapper -------------------------------------------------------------------------------------------------------

ON = dict(refine__pose=False, refine__exposure=True)


def test_refinement_takes_a_small_share_of_the_time_where_a_worker_trains(monkeypatch):
    mapper, now, applied = mapped(stream(2, False), **ON), [0.0], []
    trainer = mapper._trainer
    monkeypatch.setattr(refine.time, "monotonic", lambda: now[0])
    def slow(*_):
        applied.append(now[0])
        now[0] += 1.0   # seconds
    monkeypatch.setattr(trainer.refinement, "_expose", slow)
    step = lambda n: [(trainer.step(mapper._keyframes), now.__setitem__(0, now[0] + 0.1)) for _ in range(n)]
    trainer.steps = 0
    step(100)
    assert len(applied) == 10, "inline: by steps alone"
    applied.clear()
    trainer.refinement.timed = True
    begin = now[0]
    step(1000)
    assert 2 <= len(applied) <= 1 + (now[0] - begin) * MOST_SHARE


def test_the_mapper_says_who_trains():
    mapper = mapped(stream(2, False), **ON)
    assert not mapper._trainer.refinement.timed
    mapper.start()
    mapper.command("refine", 0.2).result()
    assert mapper._trainer.refinement.timed
    mapper.stop()
    mapper.train(steps=1)
    assert not mapper._trainer.refinement.timed


def test_a_render_of_a_smaller_size_is_as_bright():
    camera = Camera(320, 240, 260.0, 260.0, 160.0, 120.0)
    rgb, z = wall(np.eye(4), camera)
    frame = replace(stream(1, False)[0], camera=camera, T_world_cam=np.eye(4), rgb=exposed(rgb, 1), depth_m=z)
    mapper = mapped([frame], refine__pose=False, train__steps_per_frame=40)
    keyframe, gains, sizes = mapper._keyframes.newest, [], []
    for n in (1, 2, 4):
        small = camera.resized(320 // n, 240 // n)
        gains.append(log_gain(keyframe.frame.resized(small.width, small.height).rgb, *mapper._trainer.refinement._render(small, keyframe)[:2]))
    assert np.abs(np.array(gains[1:]) - gains[0]).max() < 0.01, np.exp(gains)
    mapper._engine.render = lambda v, render=mapper._engine.render: (sizes.append(v.width * v.height), render(v))[1]
    mapper._trainer.refinement.config = replaced(mapper.config, {"refine.exposure": True})
    mapper._trainer.refine(keyframe)
    assert sizes == [EXPOSURE_PIXELS]


def test_a_map_of_a_file_keeps_its_brightness(tmp_path):
    path, frames = str(tmp_path / "map.ply"), stream(12, False)
    first = mapped(frames, **ON)
    first.command("save_map", path).result()
    brightness = first._output.render(frames[0].camera, frames[0].T_cam_world)[0].mean()
    dark = stream(12, False, gain=lambda i: 0.5)
    second = mapped(dark, train__start_map=path, **ON)
    assert np.exp(gains_of(second)) == pytest.approx(0.5, rel=0.06)
    assert second._output.render(frames[0].camera, frames[0].T_cam_world)[0].mean() == pytest.approx(brightness, rel=0.04)
    assert np.mean([h.psnr for h in second.evaluate()]) > 25
    second.command("save_checkpoint", str(tmp_path / "map.ckpt")).result()
    resumed = Mapper(replaced(CONFIG, {"refine.exposure": True}))
    resumed.resume(str(tmp_path / "map.ckpt"))
    assert resumed._trainer.refinement.given and not first._trainer.refinement.given


def test_without_exposure_no_gain_stays(tmp_path):
    mapper = mapped(stream(8, False, gain=ramp(8)), **ON)
    assert np.abs(gains_of(mapper)).max() > 0.3
    mapper.command("save_checkpoint", str(tmp_path / "map.ckpt")).result()
    mapper.command("configure", {"refine.exposure": False}).result()
    assert not gains_of(mapper).any() and all(k.target is k.frame.rgb for k in mapper._keyframes)
    resumed = Mapper(replaced(mapper.config, {"refine.exposure": False}))
    resumed.resume(str(tmp_path / "map.ckpt"))
    assert len(resumed._keyframes) and not gains_of(resumed).any()
