"""report.html: whole in one file, readable as XML, its charts true to the numbers; looked at in a browser when asked for."""
import base64
import os
import re
from xml.etree import ElementTree

import cv2
import numpy as np
import pytest

import browser
from spirula_ros import report_page
from spirula_ros.report_page import bars, chart, page, ticks

BASE = {"heldout_psnr": 25.5, "heldout_ssim": 0.9, "heldout_cc_psnr": None, "gaussians": 1200, "steps": 60, "steps_due": 60, "vram": {"splat": 3 << 20, "image": 1 << 20, "viewer": 0},
        "vram_total": 4 << 20, "backend": "cpu", "version": "1", "timing": {"train_s": 1.5, "process_bytes": 1}}
TRAINED = {**BASE, "data": "desk", "images": 21, "width": 48, "height": 36, "curve": [{"step": s, "psnr": p} for s, p in ((0, 12.0), (30, 20.0), (60, 25.5))],
           "heldout": [{"index": i, "psnr": p} for i, p in ((4, 25.0), (12, 26.0))], "settings": {"init.source": "<points>"}}
REPLAYED = {**BASE, "bag": "room & <b>", "frames": {"in": 9, "used": 7, "dropped": {"blurred": 2}}, "hint": "slow <disk>",
            "heldout": [{"stamp_ns": 10**18 + i * 10**9, "psnr": p} for i, p in enumerate((25.0, None, 26.0))]}


@pytest.mark.parametrize("report", [TRAINED, REPLAYED, {**REPLAYED, "heldout": [], "heldout_psnr": None}])
def test_a_page_is_one_file_and_escapes_what_it_is_told(report, tmp_path):
    cv2.imwrite(str(tmp_path / "compare.png"), np.full((30, 40, 3), 77, np.uint8))
    text = page(report, "it <ended>", tmp_path / "compare.png")
    body = re.sub(r"<meta[^>]*>", "", text.removeprefix("<!DOCTYPE html>"))
    tree = ElementTree.fromstring(re.sub(r"(<img[^>]*)>", r"\1/>", body))   # every tag closed, every text escaped
    said = "".join(tree.itertext())
    assert "it <ended>" in said and all(word in said for word in (["desk", "<points>"] if "data" in report else ["room & <b>", "slow <disk>", "2 blurred"]))
    assert not re.search(r"<script|http:|https:|url\(", text) and text.count("src=") == 1
    picture = base64.b64decode(re.search(r'base64,([^"]+)"', text)[1])
    assert cv2.imdecode(np.frombuffer(picture, np.uint8), cv2.IMREAD_COLOR).shape == (30, 40, 3)
    assert text.count("<polyline") == (2 if "curve" in report else 1 if report["heldout"] else 0)


def test_held_out_frames_are_drawn_in_the_order_of_their_stamps_and_steps_beside_what_was_due(tmp_path):
    frames = [{"stamp_ns": 10**18 + s * 10**9, "psnr": p} for s, p in ((2, 26.0), (0, 20.0), (1, 23.0))]   # a second recording that began earlier
    text = page({**REPLAYED, "steps": 205, "steps_due": 145, "heldout": frames}, "it ended", tmp_path / "none.png")
    across = [float(point.split(",")[0]) for point in re.search(r'<polyline points="([^"]+)"', text)[1].split()]
    assert across == sorted(across) and across[0] == report_page.LEFT and "205, 145 due for the frames and the rest" in text


def test_a_chart_puts_points_where_its_numbers_say():
    points = [(0, 12.0), (100, None), (300, 25.5), (700, 21.0)]
    tree = ElementTree.fromstring(chart(points, "step"))
    dots = [(float(c.get("cx")), float(c.get("cy"))) for c in tree.iter("circle")]
    across, along = ([(float(t.text), float(t.get("x" if anchor == "middle" else "y"))) for t in tree.iter("text") if t.get("text-anchor") == anchor and not t.get("class")]
                     for anchor in ("middle", "end"))
    at = lambda value, labels: np.interp(value, *zip(*sorted((v, place) for v, place in labels)))
    assert len(dots) == 3
    for (x, y), (value_x, value_y) in zip(dots, [p for p in points if p[1] is not None]):
        assert x == pytest.approx(at(value_x, across), abs=0.2) and y + 4 == pytest.approx(at(value_y, along), abs=0.2)


@pytest.mark.parametrize("low, high", [(0, 7000), (12.34, 12.35), (25.0, 25.0), (0, 0), (-3.2, 41.7), (9.999, 1e6), (4, 28)])
def test_ticks_are_round_and_reach_around(low, high):
    found = ticks(low, high)
    steps = np.diff(found)
    assert 2 <= len(found) <= 7 and found[0] <= low + 1e-9 and found[-1] >= high - 1e-9 and np.allclose(steps, steps[0])
    assert re.fullmatch(r"[125]e[+-]\d+", f"{steps[0]:.0e}")


def test_bars_are_as_long_as_bytes_say():
    widths = [float(r.get("width")) for r in ElementTree.fromstring(bars(TRAINED["vram"])).iter("rect")]
    assert widths == [report_page.BAR, pytest.approx(report_page.BAR / 3, abs=0.1)]


@pytest.mark.skipif(os.environ.get("SPIRULA_BROWSER") != "1" or bool(browser.missing()), reason=f"SPIRULA_BROWSER=1, and chromium and chromedriver ({browser.missing() or 'there'})")
def test_a_browser_shows_it(tmp_path):
    cv2.imwrite(str(tmp_path / "compare.png"), np.full((300, 400, 3), 77, np.uint8))
    report_page.write_page(tmp_path / "report.html", TRAINED, "it ended")
    with browser.Browser(tmp_path, (390, 800), phone=True) as page:
        page.open((tmp_path / "report.html").as_uri())
        assert page.run("return document.querySelector('img').naturalWidth") == 400 and not page.log()
        assert page.run("return document.documentElement.scrollWidth") <= 390
