"""What the surfaces of the synthetic room look like: albedo as a function of the surface's size. Linear light, [0, 1]."""
from __future__ import annotations

import cv2
import numpy as np

TEXEL_M = 0.004


def linear(*srgb255: float) -> np.ndarray:
    """[3] float32 in linear light from sRGB 0..255."""
    return ((np.array(srgb255, np.float32) / 255) ** 2.2).astype(np.float32)


def canvas(width_m: float, height_m: float, color: np.ndarray) -> np.ndarray:
    """[h,w,3] float32 of one colour, TEXEL_M a texel, row 0 on top."""
    h, w = max(4, round(height_m / TEXEL_M)), max(4, round(width_m / TEXEL_M))
    return np.broadcast_to(color, (h, w, 3)).copy()


def noise(shape: tuple[int, int], cell_m: tuple[float, float], rng: np.random.Generator, octaves: int = 3) -> np.ndarray:
    """Value noise [h,w] in about [-1, 1]; cell_m (vertical, horizontal) is the size of its coarsest feature."""
    out = np.zeros(shape, np.float32)
    for o in range(octaves):
        cells = [max(2, round(n * TEXEL_M / c * 2**o)) for n, c in zip(shape, cell_m)]
        cells = [min(c, n) for c, n in zip(cells, shape)]
        coarse = rng.uniform(-1, 1, cells).astype(np.float32)
        out += 0.55**o * cv2.resize(coarse, shape[::-1], interpolation=cv2.INTER_CUBIC)
    return out / 1.4


def mottled(image: np.ndarray, amount: float, rng: np.random.Generator, cell_m=(0.15, 0.15), octaves: int = 3) -> np.ndarray:
    return np.clip(image * (1 + amount * noise(image.shape[:2], cell_m, rng, octaves))[..., None], 0, 1)


def plain(srgb: tuple, amount: float = 0.03):
    """A painted surface: one colour, hardly mottled."""
    return lambda w, h, rng: mottled(canvas(w, h, linear(*srgb)), amount, rng, (0.4, 0.4))


def plaster(srgb: tuple):
    """A wall with a skirting board."""
    def draw(w, h, rng):
        image = mottled(canvas(w, h, linear(*srgb)), 0.035, rng, (0.25, 0.25), 4)
        board = round(0.09 / TEXEL_M)
        image[-board:] = linear(236, 232, 224)
        image[-board - 2:-board] = linear(150, 145, 138)
        return image
    return draw


def planks(srgb: tuple, plank_m: float = 0.14, grain: float = 0.28):
    """Boards along the horizontal axis, each with its own tone, grain and ends."""
    def draw(w, h, rng):
        image = canvas(w, h, linear(*srgb))
        rows = max(1, round(h / plank_m))
        edges = np.linspace(0, image.shape[0], rows + 1).astype(int)
        for top, bottom in zip(edges[:-1], edges[1:]):
            x = -rng.uniform(0, 1.2)
            while x < w:
                length = rng.uniform(0.7, 1.5)
                a, b = (int(np.clip(v / TEXEL_M, 0, image.shape[1])) for v in (x, x + length))
                if b > a:
                    image[top:bottom, a:b] *= rng.uniform(0.72, 1.18) * (1 + rng.uniform(-0.05, 0.05, 3))
                    image[top:bottom, max(a - 1, 0):a + 1] *= 0.45
                x += length
            if top:
                image[top - 1:top + 1] *= 0.5
        return mottled(image, grain, rng, (0.02, 0.5), 3)
    return draw


def bricks(srgb: tuple):
    """A wall of bricks 21 x 6.5 cm in mortar, with a skirting board."""
    def draw(w, h, rng):
        image = mottled(canvas(w, h, linear(190, 183, 172)), 0.1, rng, (0.03, 0.03))
        for row, y in enumerate(np.arange(0, h, 0.075)):
            for x in np.arange(-0.11 * (row % 2), w, 0.22):
                a, b, c, d = (int(max(v, 0) / TEXEL_M) for v in (x + 0.006, x + 0.214, y + 0.005, y + 0.07))
                image[c:d, a:b] = linear(*srgb) * rng.uniform(0.6, 1.25) * (1 + rng.uniform(-0.08, 0.08, 3))
        image = mottled(image, 0.22, rng, (0.04, 0.06))
        image[-round(0.09 / TEXEL_M):] = linear(236, 232, 224)
        return image
    return draw


def fabric(srgb: tuple):
    """A coarse weave: threads of 1.6 cm, over and under."""
    def draw(w, h, rng):
        image = canvas(w, h, linear(*srgb))
        y, x = np.mgrid[:image.shape[0], :image.shape[1]] * (TEXEL_M * 2 * np.pi / 0.032)
        weave = 0.5 + 0.5 * np.sin(x) * np.sin(y)
        return mottled(image * (0.72 + 0.4 * weave[..., None]).astype(np.float32), 0.12, rng, (0.1, 0.1))
    return draw


def checks(a: tuple, b: tuple, cell_m: float):
    def draw(w, h, rng):
        image = canvas(w, h, linear(*a))
        y, x = (np.mgrid[:image.shape[0], :image.shape[1]] * TEXEL_M / cell_m).astype(int)
        image[(x + y) % 2 == 1] = linear(*b)
        return image
    return draw


def stripes(colors: list[tuple], stripe_m: float):
    """Horizontal bands, repeated."""
    def draw(w, h, rng):
        image = canvas(w, h, linear(*colors[0]))
        band = (np.arange(image.shape[0]) * TEXEL_M / stripe_m).astype(int) % len(colors)
        image[:] = np.array([linear(*c) for c in colors])[band][:, None]
        return image
    return draw


def books(w: float, h: float, rng: np.random.Generator, shelf_m: float = 0.36) -> np.ndarray:
    """The front of a bookcase: shelves of spines with titles and bands."""
    image = canvas(w, h, linear(60, 40, 26))
    shelves = max(1, round(h / shelf_m))
    for s in range(shelves):
        floor_y = (s + 1) * h / shelves - 0.025
        x = 0.03
        while x < w - 0.06:
            thick, tall = rng.uniform(0.022, 0.06), rng.uniform(0.2, h / shelves - 0.05)
            if rng.random() < 0.08:
                x += rng.uniform(0.05, 0.14)
                continue
            spine = linear(*cv2.cvtColor(np.uint8([[[rng.integers(180), rng.integers(40, 165), rng.integers(80, 225)]]]),
                                         cv2.COLOR_HSV2RGB)[0, 0])
            _fill(image, x, floor_y - tall, thick - 0.003, tall, spine)
            ink = linear(240, 230, 205) if spine.mean() < 0.3 else linear(30, 28, 35)
            for y in np.arange(floor_y - 0.8 * tall, floor_y - 0.3 * tall, 0.016):
                if rng.random() < 0.75:
                    _fill(image, x + 0.3 * thick, y, 0.4 * thick, 0.010, ink)
            _fill(image, x, floor_y - 0.14 * tall, thick - 0.003, 0.014, ink)
            x += thick
        _fill(image, 0, floor_y, w, 0.025, linear(122, 84, 52))
    for x in (0, w - 0.025):
        _fill(image, x, 0, 0.025, h, linear(122, 84, 52))
    return image


def rug(w: float, h: float, rng: np.random.Generator) -> np.ndarray:
    """Bands, a border of diamonds and rosettes."""
    image = canvas(w, h, linear(146, 36, 38))
    for inset, color in ((0.05, (226, 205, 160)), (0.08, (32, 52, 92)), (0.24, (226, 205, 160)), (0.27, (128, 32, 36))):
        _fill(image, inset, inset, w - 2 * inset, h - 2 * inset, linear(*color))
    for x in np.arange(0.16, w - 0.1, 0.12):
        for y in (0.16, h - 0.16):
            _diamond(image, x, y, 0.05, linear(222, 168, 64))
    for y in np.arange(0.28, h - 0.2, 0.12):
        for x in (0.16, w - 0.16):
            _diamond(image, x, y, 0.05, linear(222, 168, 64))
    for i, x in enumerate(np.arange(0.5, w - 0.4, 0.3)):
        for j, y in enumerate(np.arange(0.5, h - 0.4, 0.3)):
            _diamond(image, x, y, 0.12, linear(*((214, 180, 110), (52, 84, 120))[(i + j) % 2]))
            _diamond(image, x, y, 0.05, linear(128, 32, 36))
    return mottled(image, 0.2, rng, (0.016, 0.016), 1)


def painting(kind: int):
    """A framed picture: hills at dusk, an abstract of discs, or a chart."""
    def draw(w, h, rng):
        image = canvas(w, h, linear(28, 24, 22))
        inner = canvas(w - 0.08, h - 0.08, linear(240, 236, 226))
        (hills, discs, chart)[kind](inner, rng)
        m = round(0.04 / TEXEL_M)
        hh, ww = min(inner.shape[0], image.shape[0] - m), min(inner.shape[1], image.shape[1] - m)
        image[m:m + hh, m:m + ww] = inner[:hh, :ww]
        return image
    return draw


def hills(image: np.ndarray, rng: np.random.Generator) -> None:
    h, w = image.shape[:2]
    t = np.linspace(0, 1, h, dtype=np.float32)[:, None, None]
    image[:] = (1 - t) * linear(70, 110, 175) + t * linear(255, 196, 120)
    cv2.circle(image, (int(0.68 * w), int(0.42 * h)), int(0.09 * h), linear(255, 240, 190).tolist(), -1, cv2.LINE_AA)
    x = np.arange(w)
    for k, color in enumerate(((96, 92, 130), (58, 84, 92), (36, 62, 48), (20, 36, 26))):
        ridge = h * (0.5 + 0.12 * k) + h * 0.07 * np.sin(x / w * (5 + 3 * k) + rng.uniform(0, 6)) + h * 0.02 * np.sin(x / w * 31 + k)
        image[np.arange(h)[:, None] > ridge[None]] = linear(*color)


def discs(image: np.ndarray, rng: np.random.Generator) -> None:
    h, w = image.shape[:2]
    palette = [(214, 64, 48), (242, 178, 52), (32, 96, 148), (28, 30, 40), (72, 150, 122)]
    for k in range(16):
        at, r = (int(rng.uniform(0.1, 0.9) * w), int(rng.uniform(0.1, 0.9) * h)), int(rng.uniform(0.05, 0.2) * h)
        cv2.circle(image, at, r, linear(*palette[k % 5]).tolist(), -1 if k % 3 else 4, cv2.LINE_AA)
    for _ in range(7):
        a, b = (tuple(int(v) for v in rng.uniform(0, 1, 2) * (w, h)) for _ in range(2))
        cv2.line(image, a, b, linear(28, 30, 40).tolist(), 2, cv2.LINE_AA)


def chart(image: np.ndarray, rng: np.random.Generator) -> None:
    h, w = image.shape[:2]
    image[:] = linear(24, 40, 66)
    text = np.zeros((h, w), np.uint8)  # OpenCV writes only into 8 bits
    cv2.putText(text, "GAUSSIANS", (int(0.08 * w), int(0.22 * h)), cv2.FONT_HERSHEY_DUPLEX, w / 230, 255, 2, cv2.LINE_AA)
    image += (text[..., None] / np.float32(255)) * (linear(240, 226, 190) - image)
    for k in range(6):
        x, y = int((0.12 + 0.14 * k) * w), int((0.82 - 0.08 * k) * h)
        cv2.rectangle(image, (x, y), (x + int(0.09 * w), int(0.9 * h)), linear(*((236, 116, 60), (240, 190, 84))[k % 2]).tolist(), -1)


def emissive(srgb: tuple, gain: float):
    """A lamp: brighter than paper can be."""
    return lambda w, h, rng: canvas(w, h, linear(*srgb)) * np.float32(gain)


def window(w: float, h: float, rng: np.random.Generator) -> np.ndarray:
    """Sky, trees and a frame with four panes; the sky shines."""
    image = canvas(w, h, linear(240, 238, 232))
    t = np.linspace(0, 1, image.shape[0], dtype=np.float32)[:, None, None]
    sky = 1.5 * ((1 - t) * linear(120, 170, 235) + t * linear(226, 238, 250)) + 0 * image
    clouds = noise(image.shape[:2], (0.25, 0.6), rng, 4)
    sky += (np.clip(clouds - 0.1, 0, 1) * (1 - t[..., 0]))[..., None] * 1.0
    trees = np.arange(image.shape[0])[:, None] > image.shape[0] * (0.72 + 0.1 * noise(image.shape[:2], (9, 0.25), rng, 4)[:1])
    green = linear(92, 130, 60) * (1 + 0.5 * noise(image.shape[:2], (0.06, 0.06), rng, 3))[..., None]
    sky = np.where(trees[..., None], green, sky)
    m, bar = round(0.05 / TEXEL_M), round(0.02 / TEXEL_M)
    glass = np.zeros(image.shape[:2], bool)
    glass[m:-m, m:-m] = True
    cy, cx = (n // 2 for n in glass.shape)
    glass[cy - bar:cy + bar] = False
    glass[:, cx - bar:cx + bar] = False
    return np.where(glass[..., None], sky, 0.8 * image).astype(np.float32)


def globe(w: float, h: float, rng: np.random.Generator) -> np.ndarray:
    land = noise(canvas(w, h, linear(0, 0, 0)).shape[:2], (0.14, 0.2), rng, 5) > 0.08
    return np.where(land[..., None], linear(110, 140, 70), linear(40, 96, 160)).astype(np.float32)


def leaves(w: float, h: float, rng: np.random.Generator) -> np.ndarray:
    return mottled(canvas(w, h, linear(70, 122, 54)), 0.75, rng, (0.05, 0.05), 3)


def _fill(image: np.ndarray, x: float, y: float, w: float, h: float, color: np.ndarray) -> None:
    a, b, c, d = (max(0, round(v / TEXEL_M)) for v in (x, x + w, y, y + h))
    image[c:d, a:b] = color


def _diamond(image: np.ndarray, x: float, y: float, r: float, color: np.ndarray) -> None:
    points = np.array([[x - r, y], [x, y - r], [x + r, y], [x, y + r]]) / TEXEL_M
    cv2.fillConvexPoly(image, np.round(points).astype(np.int32), color.tolist(), cv2.LINE_AA)
