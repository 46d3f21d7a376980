"""What stands in the synthetic room: one row per solid. The room is |x| < 2.6, |y| < 2.1, 0 < z < 2.7."""
from __future__ import annotations

import numpy as np

from . import room_textures as tex
from .room import HALF, Solid

OAK, WALNUT, WHITE, CREAM = (176, 128, 80), (120, 78, 48), (232, 228, 220), (226, 216, 196)


def furniture() -> list[Solid]:
    return [*shell(), *on_the_walls(), *bookcase(), *sofa(), *coffee_table(), *corner_things()]


def box(x, y, z, dx, dy, dz, draw, yaw_deg=0.0, faces=None, **kw) -> Solid:
    """A box of size dx, dy, dz standing on height z at (x, y)."""
    return Solid((x, y, z + dz / 2), (dx / 2, dy / 2, dz / 2), {-1: draw, **(faces or {})}, np.radians(yaw_deg), **kw)


def ball(x, y, z, r, draw, **kw) -> Solid:
    """A sphere of radius r that touches height z."""
    return Solid((x, y, z + r), (r, r, r), {-1: draw}, sphere=True, **kw)


def shell() -> list[Solid]:
    """Walls (-x green, +x plaster, -y brick, +y plaster), floor and ceiling, and a rug of 8 mm."""
    walls = {0: tex.plaster((142, 164, 140)), 1: tex.plaster((224, 214, 194)), 2: tex.bricks((164, 84, 62)),
             3: tex.plaster((230, 222, 206)), 4: tex.planks((182, 134, 86)), 5: tex.plain((240, 238, 232), 0.015)}
    return [Solid((0, 0, HALF[2]), HALF, walls, inside=True),
            box(0.1, 0, 0, 2.5, 1.7, 0.008, tex.rug)]


def on_the_walls() -> list[Solid]:
    lamp = tex.emissive((255, 246, 226), 2.2)
    return [box(-1.1, 0, 2.67, 0.9, 0.6, 0.03, lamp, emissive=True), box(1.1, 0, 2.67, 0.9, 0.6, 0.03, lamp, emissive=True),
            box(0.35, 2.08, 1.0, 1.5, 0.04, 1.1, tex.window, emissive=True),
            box(-2.585, 0.55, 1.15, 0.03, 1.25, 0.85, tex.painting(0)),
            box(-2.585, -1.15, 1.3, 0.03, 0.62, 0.62, tex.painting(1)),
            box(2.585, -1.35, 1.2, 0.03, 0.8, 0.6, tex.painting(2)),
            box(-1.45, 2.085, 1.25, 0.7, 0.03, 0.9, tex.painting(1)),
            box(0.9, -2.085, 1.35, 1.2, 0.03, 0.75, tex.painting(0))]


def bookcase() -> list[Solid]:
    wood = tex.planks(WALNUT, 0.3, 0.2)
    return [box(2.42, 0.45, 0, 0.34, 1.5, 1.9, wood, faces={0: tex.books}),
            ball(2.40, 0.15, 1.9, 0.17, tex.globe), box(2.42, 0.85, 1.9, 0.2, 0.32, 0.2, tex.checks(CREAM, (40, 66, 92), 0.04))]


def sofa() -> list[Solid]:
    cloth, dark = tex.fabric((66, 98, 128)), tex.fabric((56, 84, 112))
    return [box(-0.75, -1.62, 0.08, 1.9, 0.82, 0.34, cloth), box(-0.75, -1.94, 0.42, 1.9, 0.24, 0.42, dark),
            box(-1.61, -1.62, 0.42, 0.18, 0.82, 0.2, dark), box(0.11, -1.62, 0.42, 0.18, 0.82, 0.2, dark),
            box(-1.22, -1.72, 0.42, 0.42, 0.14, 0.38, tex.stripes([(232, 190, 92), (240, 232, 214)], 0.045), 8),
            box(-0.28, -1.72, 0.42, 0.42, 0.14, 0.38, tex.checks((190, 72, 56), (236, 220, 196), 0.06), -10)]


def coffee_table() -> list[Solid]:
    legs = [box(0.1 + sx * 0.5, sy * 0.26, 0, 0.06, 0.06, 0.4, tex.planks(WALNUT, 0.06)) for sx in (-1, 1) for sy in (-1, 1)]
    return [*legs, box(0.1, 0, 0.4, 1.2, 0.68, 0.045, tex.planks(OAK, 0.17, 0.3)),
            box(-0.2, 0.08, 0.445, 0.3, 0.22, 0.05, tex.stripes([(30, 92, 96), (24, 72, 78)], 0.012), 25, {5: tex.painting(2)}),
            box(-0.19, 0.07, 0.495, 0.26, 0.19, 0.035, tex.plain((196, 74, 52)), 8, {5: tex.painting(1)}),
            ball(0.42, -0.1, 0.445, 0.11, tex.stripes([(226, 88, 46), (246, 238, 220)], 0.05)),
            box(0.3, 0.2, 0.445, 0.1, 0.1, 0.14, tex.plain(WHITE), 30)]


def corner_things() -> list[Solid]:
    crate = tex.planks((190, 150, 100), 0.11, 0.25)
    return [  # plant
            box(-2.15, 1.62, 0, 0.4, 0.4, 0.4, tex.plain((196, 120, 84), 0.08), 12), ball(-2.15, 1.62, 0.42, 0.34, tex.leaves),
            ball(-2.28, 1.5, 0.85, 0.22, tex.leaves), ball(-2.02, 1.74, 0.8, 0.2, tex.leaves),
            # sideboard with a lamp and a box under the window
            box(0.35, 1.84, 0, 1.7, 0.46, 0.62, tex.planks(OAK, 0.31, 0.22), faces={2: tex.planks((150, 104, 64), 0.2, 0.3)}),
            box(-0.2, 1.84, 0.62, 0.28, 0.22, 0.26, tex.checks((238, 234, 226), (60, 60, 66), 0.045), 20),
            box(0.85, 1.86, 0.62, 0.05, 0.05, 0.26, tex.plain((60, 58, 56))), ball(0.85, 1.86, 0.86, 0.13, tex.emissive((255, 226, 170), 1.5), emissive=True),
            # crates and a ball beside the bookcase
            box(2.2, -1.62, 0, 0.55, 0.55, 0.55, crate, -14), box(2.24, -1.64, 0.55, 0.36, 0.36, 0.36, tex.checks((204, 66, 60), CREAM, 0.09), 22),
            ball(1.55, -1.75, 0, 0.24, tex.stripes([(46, 110, 168), (240, 236, 226), (228, 178, 60)], 0.09)),
            # stool by the green wall
            box(-2.2, -0.35, 0, 0.36, 0.36, 0.44, tex.plain((222, 176, 66)), 30), ball(-2.2, -0.35, 0.44, 0.14, tex.plain((232, 230, 224)))]
