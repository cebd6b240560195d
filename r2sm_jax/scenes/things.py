"""How the household things are drawn: tableware, paper goods, clothes, food and tools."""

import numpy as np

from r2sm_jax.scenes.shapes import Part, Rng, box, curve, ellipse, polygon, stroke, turned, twofold

# Lists of points read best a few to a line.
# fmt: off


def mug(rng: Rng) -> list[Part]:
    h, w, foot = rng.uniform(0.68, 0.95), 0.7, rng.uniform(0.52, 0.68)
    grip, y = rng.uniform(0.36, 0.46), rng.uniform(-0.08, 0.1)
    body = twofold((w, -h), (w, -h), (0.5 * (w + foot), 0), (foot, h - 0.1), (foot * 0.6, h + 0.02))
    parts = [
        ("shade", ellipse(0.62, y, grip + 0.08, grip + 0.12)),
        ("hole", ellipse(0.66, y, grip - 0.15, grip - 0.12)),
        ("main", body),
        ("shade", curve((w, -h), (w, -h), (0.5 * (w + foot), 0), (foot, h - 0.1), (foot * 0.55, h + 0.02),
                        (foot * 0.62, 0))),
        ("glow", box(-0.52, -h * 0.6, -0.38, h * 0.35, 0.07)),
        ("light", ellipse(0, -h, w, 0.2)),
        ("deep", ellipse(0, -h + 0.01, w - 0.1, 0.14)),
        ("wood_shade" if rng.random() < 0.6 else "cream", ellipse(0, -h + 0.045, w - 0.18, 0.09)),
    ]
    if rng.random() < 0.4:
        parts.insert(5, ("detail", twofold((foot + 0.02, h - 0.34), (foot + 0.01, h - 0.16), smooth=False)))
    return parts


def bottle(rng: Rng) -> list[Part]:
    w, neck, shoulder = rng.uniform(0.4, 0.52), rng.uniform(0.18, 0.22), rng.uniform(-0.45, -0.15)
    label = rng.uniform(0.12, 0.22)
    body = twofold((neck, -0.9), (neck, -0.9), (neck, shoulder - 0.3), (w, shoulder + 0.1), (w, 0.4), (w, 0.9),
                   (w * 0.8, 1.0))
    return [
        ("main", body),
        ("shade", curve((neck, -0.85), (neck, shoulder - 0.3), (w, shoulder + 0.1), (w, 0.4), (w, 0.9),
                        (w * 0.6, 1.0), (w * 0.55, 0.4), (neck * 0.4, shoulder - 0.1))),
        ("glow", box(-w * 0.72, shoulder + 0.18, -w * 0.42, 0.8, w * 0.15)),
        ("cream", box(-w, 0.42 - label, w, 0.42 + label)),
        ("detail", ellipse(0, 0.42, label * 0.62, count=16)),
        ("detail", box(-neck - 0.05, -1.08, neck + 0.05, -0.8, 0.06)),
        ("detail_shade", box(neck * 0.2, -1.06, neck + 0.05, -0.8, 0.05)),
    ]


def wine_glass(rng: Rng) -> list[Part]:
    w, belly, foot = rng.uniform(0.42, 0.52), rng.uniform(0.02, 0.1), rng.uniform(0.4, 0.52)
    depth = rng.uniform(0.0, 0.14)
    bowl = twofold((w, -0.95), (w, -0.95), (w + belly, -0.5), (w * 0.72, depth), (0.14, depth + 0.22))
    return [
        ("main", ellipse(0, 0.9, foot, 0.15)),
        ("shade", ellipse(0.03, 0.94, foot * 0.9, 0.1)),
        ("main", twofold((0.1, depth), (0.1, 0.6), (0.17, 0.84), (0.3, 0.92), smooth=False)),
        ("shade", polygon((0.02, depth), (0.1, depth), (0.1, 0.6), (0.17, 0.84), (0.3, 0.92), (0.06, 0.9))),
        ("main", bowl),
        ("shade", curve((w, -0.9), (w, -0.9), (w + belly, -0.5), (w * 0.72, depth), (0.1, depth + 0.2),
                        (w * 0.45, depth - 0.15), (w * 0.72, -0.5))),
        ("glow", turned(ellipse(-w * 0.66, -0.42, 0.07, 0.27, 16), 4)),
        ("light", ellipse(0, -0.95, w, 0.14)),
        ("deep", ellipse(0, -0.935, w - 0.09, 0.085)),
    ]


def book(rng: Rng) -> list[Part]:
    w, h, d = rng.uniform(0.56, 0.74), rng.uniform(0.85, 0.98), rng.uniform(0.14, 0.24)
    parts = [
        ("deep", polygon((-w, -h), (w, -h), (w + d, -h + d), (w + d, h + d), (-w + d, h + d), (-w, h))),
        ("cream", polygon((-w + 0.05, h - 0.05), (w - 0.02, h - 0.02), (w - 0.02, -h), (w + d - 0.06, -h + d),
                          (w + d - 0.06, h + d - 0.08), (-w + d, h + d - 0.08))),
        ("cream_shade", stroke((-w + d * 0.6, h + d * 0.45), (w + d * 0.5, h + d * 0.45), (w + d * 0.5, -h + d * 0.6),
                               width=0.05)),
        ("main", box(-w, -h, w, h, 0.05)),
        ("shade", box(-w, -h, -w + 0.22, h, 0.05)),
        ("light", box(-w + 0.22, -h, -w + 0.28, h)),
    ]
    if rng.random() < 0.6:
        parts += [
            ("cream", box(-w + 0.5, -h * 0.68, w - 0.2, -h * 0.25, 0.05)),
            ("detail", box(-w + 0.6, -h * 0.55, w - 0.3, -h * 0.4)),
        ]
    else:
        parts += [("detail", ellipse(0.14, -h * 0.4, 0.24)), ("cream", ellipse(0.14, -h * 0.4, 0.13, count=16))]
    if rng.random() < 0.5:
        parts += [("detail", box(-w + 0.48, h * 0.6, w - 0.2, h * 0.72, 0.03))]
    return parts


def envelope(rng: Rng) -> list[Part]:
    h, tip = rng.uniform(0.6, 0.74), rng.uniform(0.05, 0.25)
    seal = "detail" if rng.random() < 0.5 else "rose"
    return [
        ("main", box(-1, -h, 1, h, 0.06)),
        ("shade", polygon((-0.98, h), (0, -0.05), (0.98, h))),
        ("light", polygon((-0.9, h), (0, 0.06), (0.9, h))),
        ("deep", polygon((-0.99, -h + 0.02), (0, tip + 0.1), (0.99, -h + 0.02))),
        ("main", polygon((-0.98, -h + 0.01), (-0.06, tip - 0.05), (0, tip - 0.01), (0.06, tip - 0.05),
                         (0.98, -h + 0.01))),
        ("detail_shade", ellipse(0.02, tip - 0.06, 0.19, 0.2, 18)),
        (seal, ellipse(0, tip - 0.09, 0.18, 0.19, 18)),
    ]


def pencil(rng: Rng) -> list[Part]:
    w, tip = rng.uniform(0.23, 0.29), rng.uniform(0.42, 0.54)
    end = -0.72
    return [
        ("wood", polygon((-w, 1 - tip), (w, 1 - tip), (0.05, 1), (-0.05, 1))),
        ("wood_shade", polygon((w * 0.3, 1 - tip), (w, 1 - tip), (0.05, 1), (0.02, 1))),
        ("ink", polygon((-w * 0.4, 1 - tip * 0.4), (w * 0.4, 1 - tip * 0.4), (0.06, 0.99), (0, 1.03), (-0.06, 0.99))),
        ("main", polygon((-w, end), (w, end), (w, 1 - tip), (w * 0.66, 1.05 - tip), (w * 0.33, 1 - tip),
                         (0, 1.05 - tip), (-w * 0.33, 1 - tip), (-w * 0.66, 1.05 - tip), (-w, 1 - tip))),
        ("shade", polygon((w * 0.36, end), (w, end), (w, 1 - tip), (w * 0.68, 1.05 - tip), (w * 0.36, 1 - tip))),
        ("light", polygon((-w, end), (-w * 0.5, end), (-w * 0.5, 1.03 - tip), (-w, 1 - tip))),
        ("rose", box(-w, -1, w, end, 0.09)),
        ("metal", box(-w - 0.01, end - 0.1, w + 0.01, end + 0.08)),
        ("metal_shade", box(-w - 0.01, end - 0.03, w + 0.01, end + 0.01)),
    ]


def hat(rng: Rng) -> list[Part]:
    w, h, brim = rng.uniform(0.5, 0.6), rng.uniform(0.72, 1.0), rng.uniform(0.2, 0.28)
    top = rng.uniform(0.68, 0.95) * w
    y = 0.35
    crown = twofold((0.12, y - h + rng.uniform(0.0, 0.12)), (top * 0.8, y - h - 0.02), (top, y - h * 0.8), (w, y),
                    (w * 0.6, y + 0.15))
    return [
        ("shade", ellipse(0, y + 0.05, 1, brim + 0.03)),
        ("main", ellipse(0, y, 1, brim)),
        ("shade", ellipse(0.04, y + 0.02, w + 0.12, brim * 0.72)),
        ("main", crown),
        ("light", ellipse(-top * 0.45, y - h * 0.62, 0.1, 0.2, 18)),
        ("detail", twofold((w * 0.97, y - 0.3), (w * 1.01, y - 0.02), (w * 0.6, y + 0.15), (w * 0.3, y + 0.18),
                           smooth=False)),
        ("detail_shade", polygon((w * 0.55, y - 0.3), (w * 0.97, y - 0.3), (w * 1.01, y - 0.02), (w * 0.6, y + 0.15))),
    ]


def shirt(rng: Rng) -> list[Part]:
    w, arm, hem = rng.uniform(0.5, 0.58), rng.uniform(0.9, 1.02), rng.uniform(0.86, 1.0)
    cuff = rng.uniform(-0.12, 0.08)
    sleeve = polygon((0.45, -0.82), (0.62, -0.74), (arm + 0.02, cuff), (arm - 0.3, cuff + 0.2), (0.45, -0.2))
    band = polygon((arm + 0.02, cuff), (arm - 0.3, cuff + 0.2), (arm - 0.37, cuff + 0.07), (arm - 0.05, cuff - 0.12))
    trim = "detail" if rng.random() < 0.6 else "shade"
    parts = [
        ("shade", sleeve),
        ("main", sleeve * (-1, 1)),
        (trim, band),
        (trim, band * (-1, 1)),
        ("main", polygon((-0.58, -0.78), (-0.26, -0.9), (0.26, -0.9), (0.58, -0.78), (w, 0), (w + 0.02, hem),
                         (-w - 0.02, hem), (-w, 0))),
        ("shade", polygon((w, -0.3), (w + 0.02, hem), (w - 0.16, hem), (w - 0.04, 0.2))),
        ("shade", polygon((-w, -0.3), (-w + 0.05, 0.3), (-w - 0.02, 0.1))),
        (trim, ellipse(0, -0.92, 0.33, 0.27, 22)),
        ("deep", ellipse(0, -0.93, 0.23, 0.17, 22)),
        ("hole", box(-0.37, -1.3, 0.37, -0.92)),
    ]
    if rng.random() < 0.5:
        parts.append(("detail", box(0.12, -0.38, 0.38, -0.1, 0.05)))
    return parts


def boot(rng: Rng) -> list[Part]:
    w, toe = rng.uniform(0.32, 0.4), rng.uniform(0.85, 1.02)
    return [
        ("ink", curve((-0.52, 0.8), (-0.52, 0.8), (toe, 0.78), (toe, 0.78), (toe, 0.98), (toe, 0.98), (0.1, 1.0),
                      (0.0, 0.92), (-0.1, 0.92), (-0.15, 1.02), (-0.5, 1.02), (-0.5, 1.02))),
        ("main", curve((-0.46, -0.95), (-0.46, -0.95), (w - 0.06, -0.95), (w - 0.06, -0.95), (w - 0.08, -0.2),
                       (w + 0.05, 0.12), (toe - 0.16, 0.28), (toe + 0.02, 0.6), (toe, 0.84), (toe, 0.84),
                       (-0.52, 0.86), (-0.52, 0.86), (-0.5, 0.4), (-0.44, 0))),
        ("shade", curve((-0.52, 0.86), (-0.5, 0.45), (-0.44, 0.2), (-0.2, 0.55), (0.4, 0.66), (toe, 0.68),
                        (toe, 0.86), (toe, 0.86))),
        ("glow", turned(ellipse(toe - 0.28, 0.42, 0.16, 0.07, 14), 18, toe - 0.28, 0.42)),
        ("light", box(-0.34, -0.6, -0.22, 0.2, 0.06)),
        ("detail", box(-0.52, -1.02, w, -0.76, 0.06)),
        ("detail_shade", box(w - 0.24, -1.02, w, -0.76, 0.06)),
    ]


def apple(rng: Rng) -> list[Part]:
    w, h, dip = rng.uniform(0.86, 0.98), rng.uniform(0.72, 0.86), rng.uniform(0.1, 0.18)
    y = 0.15
    lean = rng.uniform(-0.05, 0.12)
    return [
        ("wood_shade", stroke((0, y - h * 0.7), (lean, y - h - 0.05), (lean + 0.12, y - h - 0.3), width=0.16)),
        ("main", twofold((0.12, y - h + dip), (w * 0.5, y - h), (w, y - h * 0.42), (w * 0.86, y + h * 0.4),
                         (w * 0.42, y + h), (0.1, y + h - 0.07))),
        ("shade", curve((w * 0.55, y - h * 0.9), (w, y - h * 0.42), (w * 0.86, y + h * 0.4), (w * 0.42, y + h),
                        (0.05, y + h - 0.07), (w * 0.5, y + h * 0.45), (w * 0.72, y - h * 0.2))),
        ("deep", ellipse(0.02, y - h + dip + 0.04, 0.22, 0.08, 16)),
        ("wood_shade", stroke((0, y - h + dip + 0.06), (lean * 0.6, y - h), (lean, y - h - 0.1), width=0.13)),
        ("leaf", turned(curve((0, 0), (0, 0), (0.22, -0.17), (0.58, -0.06), (0.58, -0.06), (0.28, 0.12)),
                        rng.uniform(-40, -10)) - (-lean - 0.02, h + 0.06 - y)),
        ("glow", turned(ellipse(-w * 0.52, y - h * 0.38, 0.1, 0.23, 16), 25, -w * 0.52, y - h * 0.38)),
    ]


def banana(rng: Rng) -> list[Part]:
    fat, bend = rng.uniform(0.44, 0.56), rng.uniform(0.42, 0.55)
    under = [(-1.0, -0.42), (-0.86, -0.02), (-0.45, bend * 0.85), (0.1, bend + 0.05), (0.62, bend * 0.62),
             (0.98, -0.12)]
    over = [(0.84, -0.2), (0.55, bend * 0.42 - fat * 0.42), (0.08, bend - fat), (-0.4, bend * 0.75 - fat * 0.92),
            (-0.7, -0.3), (-0.8, -0.5)]
    middle = [(0.9, -0.16), (0.6, bend * 0.55 - fat * 0.14), (0.1, bend - fat * 0.4),
              (-0.44, bend * 0.8 - fat * 0.4), (-0.76, -0.12), (-0.92, -0.44)]
    return [
        ("wood_shade", stroke((-0.86, -0.3), (-0.9, -0.46), (-0.98, -0.72), width=0.24, taper=0.9)),
        ("main", curve(*under, *over)),
        ("shade", curve(*under, *middle)),
        ("light", curve((0.5, bend * 0.5 - fat * 0.38), (0.08, bend - fat * 0.86), (-0.4, bend * 0.78 - fat * 0.78),
                        (0.06, bend - fat * 0.66))),
        ("ink", curve((0.84, -0.19), (0.94, -0.26), (1.03, -0.16), (0.96, -0.06), (0.87, -0.06))),
        ("ink", box(-1.1, -0.78, -0.88, -0.64, 0.05)),
    ]


def ice_cream(rng: Rng) -> list[Part]:
    r, y = rng.uniform(0.56, 0.64), rng.uniform(-0.34, -0.2)
    cone = rng.uniform(0.36, 0.44)
    drip = [
        (r * np.cos(a) * (1.06 if k % 2 else 0.98), y + r * 0.55 + (0.12 if k % 2 else -0.02))
        for k, a in enumerate(np.linspace(0, np.pi, 7))
    ]
    parts = [
        ("wood", polygon((-cone, y + r * 0.4), (cone, y + r * 0.4), (0.09, 1), (-0.09, 1))),
        ("wood_shade", polygon((cone * 0.35, y + r * 0.4), (cone, y + r * 0.4), (0.09, 1), (0.02, 1))),
        ("wood_shade", stroke((-cone * 0.75, y + r * 0.8), (cone * 0.35, y + r * 1.25 + 0.1), width=0.06)),
        ("wood_shade", stroke((cone * 0.4, y + r * 0.6), (-cone * 0.5, y + r * 1.3), width=0.06)),
        ("main", ellipse(0, y, r)),
        ("shade", curve((r * 0.6, y - r * 0.78), (r, y), (r * 0.6, y + r * 0.8), (r * 0.1, y + r * 0.85),
                        (r * 0.62, y + r * 0.2))),
        ("main", curve((r * 1.02, y + r * 0.3), *drip, (-r * 1.02, y + r * 0.3), (0, y + r * 0.1))),
        ("glow", turned(ellipse(-r * 0.48, y - r * 0.42, 0.08, 0.18, 16), 38, -r * 0.48, y - r * 0.42)),
    ]
    if rng.random() < 0.6:
        parts += [
            ("rose", ellipse(0.06, y - r - 0.05, 0.17, count=16)),
            ("cream", ellipse(0.01, y - r - 0.1, 0.05, count=8)),
        ]
    return parts


def hammer(rng: Rng) -> list[Part]:
    w, y, h = rng.uniform(0.19, 0.23), -0.66, rng.uniform(0.2, 0.25)
    return [
        ("main", twofold((w * 0.85, y), (w * 0.85, y), (w * 0.8, 0), (w * 1.15, 0.5), (w * 1.15, 0.95),
                         (w * 0.7, 1.02))),
        ("shade", polygon((w * 0.25, y), (w * 0.85, y), (w * 0.8, 0), (w * 1.15, 0.5), (w * 1.15, 0.94),
                          (w * 0.4, 1))),
        ("detail", box(-w * 1.15, 0.55, w * 1.15, 0.68, 0.03)),
        ("detail", box(-w * 1.15, 0.78, w * 1.15, 0.91, 0.03)),
        ("metal", polygon((0.1, y - h * 0.9), (0.55, y - h * 0.9), (0.92, y + 0.14), (0.8, y + h + 0.08),
                          (0.5, y + h * 0.75), (0.1, y + h * 0.8))),
        ("metal", box(-0.78, y - h * 1.25, -0.42, y + h * 1.25, 0.06)),
        ("metal_shade", box(-0.78, y + h * 0.4, -0.42, y + h * 1.25, 0.06)),
        ("metal", box(-0.5, y - h * 0.8, 0.3, y + h * 0.8)),
        ("metal_shade", polygon((-0.45, y + h * 0.3), (0.66, y + h * 0.3), (0.84, y + h), (0.8, y + h + 0.08),
                                (0.5, y + h * 0.75), (-0.45, y + h * 0.8))),
        ("main", box(-w - 0.14, y - h * 1.12, w + 0.14, y + h * 1.12, 0.05)),
        ("light", box(-w - 0.14, y - h * 1.12, w + 0.14, y - h * 0.6, 0.05)),
    ]


def key(rng: Rng) -> list[Part]:
    r, hole, w = rng.uniform(0.44, 0.52), rng.uniform(0.16, 0.21), rng.uniform(0.13, 0.16)
    y, tooth = -0.5, rng.uniform(0.3, 0.42)
    if rng.random() < 0.5:
        bow = [("main", ellipse(0, y, r)), ("shade", ellipse(0, y, hole + 0.11))]
    else:
        bow = [
            ("main", ellipse(dx * 0.27, y + 0.02 + dy * 0.25, r * 0.6, count=22))
            for dx, dy in ((-1, 0.25), (1, 0.25), (0, -1))
        ]
        bow += [("main", ellipse(0, y, r * 0.7)), ("shade", ellipse(0, y, hole + 0.09))]
    return [
        ("main", box(-w, y, w, 1.02, 0.06)),
        ("main", box(0, 0.72, tooth + w, 0.98, 0.04)),
        ("main", box(0, 0.3, tooth * 0.75 + w, 0.54, 0.04)),
        ("shade", box(w * 0.3, 0, w, 1.0)),
        ("shade", box(w, 0.88, tooth + w, 0.98, 0.03)),
        *bow,
        ("main", box(-w - 0.1, y + r * 0.86, w + 0.1, y + r * 0.86 + 0.2, 0.06)),
        ("light", box(-w - 0.1, y + r * 0.86, w + 0.1, y + r * 0.86 + 0.08, 0.04)),
        ("hole", ellipse(0, y, hole, count=20)),
        ("glow", turned(ellipse(-r * 0.6, y - r * 0.42, 0.05, 0.15, 12), 45, -r * 0.6, y - r * 0.42)),
    ]


def scissors(rng: Rng) -> list[Part]:
    gape, r = rng.uniform(12, 24), rng.uniform(0.36, 0.42)
    parts: list[Part] = []
    for side, metal in ((-1, "metal_shade"), (1, "metal")):
        blade = curve((-0.13, 0.1), (-0.13, 0.1), (-0.13, -0.6), (0.02, -1.05), (0.02, -1.05), (0.1, -0.5),
                      (0.13, 0.1), (0.13, 0.1))
        arm = polygon((-0.14, -0.22), (0.14, -0.22), (0.16, 0.1), (0.12, 0.5), (-0.2, 0.5), (-0.16, 0.1))
        loop, hole = ellipse(-0.16, 0.66, r * 0.86, r * 1.02), ellipse(-0.16, 0.67, r * 0.42, r * 0.56, 20)
        shape = [
            (metal, blade),
            ("main", arm),
            ("main", loop),
            ("shade", ellipse(-0.16, 0.67, r * 0.56, r * 0.7, 20)),
            ("hole", hole),
        ]
        parts += [(role, turned(p * (side, 1), side * gape)) for role, p in shape]
    return [*parts, ("detail", ellipse(0, 0, 0.1, count=14)), ("cream", ellipse(-0.02, -0.02, 0.045, count=8))]


THINGS = (mug, bottle, wine_glass, book, envelope, pencil, hat, shirt, boot, apple, banana, ice_cream, hammer, key,
          scissors)
