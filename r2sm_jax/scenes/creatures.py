"""How the animals, vehicles and toys are drawn."""

import numpy as np

from r2sm_jax.scenes.shapes import Part, Rng, both, box, curve, ellipse, flipped, polygon, stroke, turned, twofold

# Lists of points read best a few to a line.
# fmt: off


def fish(rng: Rng) -> list[Part]:
    h, fin = rng.uniform(0.44, 0.58), rng.uniform(0.24, 0.36)
    tail = rng.uniform(0.4, 0.52)
    fins = "detail" if rng.random() < 0.5 else "shade"
    body = curve((-0.95, 0.04), (-0.6, -h * 0.78), (-0.1, -h), (0.4, -h * 0.55), (0.66, -0.12), (0.66, 0.12),
                 (0.4, h * 0.55), (-0.1, h), (-0.6, h * 0.78))
    belly = curve((-0.92, 0.12), (-0.5, 0.26), (0.1, 0.28), (0.64, 0.1), (0.4, h * 0.55), (-0.1, h), (-0.6, h * 0.78))
    return [
        (fins, curve((-0.35, -h * 0.8), (-0.1, -h - fin), (0.3, -h - fin * 0.6), (0.42, -h * 0.3))),
        (fins, curve((-0.1, h * 0.8), (0.08, h + fin * 0.8), (0.32, h + fin * 0.3), (0.3, h * 0.5))),
        (fins, curve((0.5, 0), (0.5, 0), (1.0, -tail), (1.08, -tail * 0.8), (0.9, 0), (1.08, tail * 0.8),
                     (1.0, tail))),
        ("main", body),
        ("shade", belly),
        ("deep", stroke((-0.38, -h * 0.6), (-0.26, -0.05), (-0.36, h * 0.55), width=0.07)),
        (fins, curve((-0.14, 0.0), (0.3, 0.04), (0.26, 0.26), (-0.02, 0.2))),
        ("cream", ellipse(-0.62, -h * 0.25, 0.13, count=16)),
        ("ink", ellipse(-0.64, -h * 0.25, 0.075, count=12)),
        ("glow", turned(ellipse(-0.1, -h * 0.72, 0.24, 0.05, 14), 2)),
    ]


def cat(rng: Rng) -> list[Part]:
    w, head = rng.uniform(0.46, 0.56), rng.uniform(0.42, 0.48)
    y, tail = -0.5, rng.uniform(0.86, 1.0)
    ear = polygon((0.08, y - head * 0.7), (head * 0.86, y - head * 1.42), (head * 0.98, y - head * 0.1))
    inner = polygon((0.2, y - head * 0.75), (head * 0.76, y - head * 1.14), (head * 0.82, y - head * 0.35))
    return [
        ("shade", curve((0.2, 0.98), (0.6, 0.95), (tail - 0.14, 0.6), (tail - 0.26, 0.2), (tail - 0.06, 0.08),
                        (tail + 0.05, 0.5), (tail - 0.1, 0.92), (0.6, 1.08))),
        ("main", twofold((0.2, -0.35), (0.36, 0), (w + 0.04, 0.6), (w, 1.0), (0.2, 1.05))),
        *both("main", ear),
        *both("rose", inner),
        ("shade", ellipse(0, y + head * 0.52, head * 0.74, head * 0.56)),
        ("cream", ellipse(0, 0.28, 0.2, 0.36, 20)),
        *both("shade", ellipse(w - 0.08, 0.85, 0.14, 0.24, 16)),
        *both("light", ellipse(0.19, 0.97, 0.17, 0.11, 16)),
        ("main", ellipse(0, y, head * 1.08, head * 0.92)),
        ("cream", ellipse(0, y + head * 0.42, head * 0.42, head * 0.3, 18)),
        *both("cream", ellipse(head * 0.44, y - head * 0.06, 0.12, 0.13, 14)),
        *both("ink", ellipse(head * 0.44, y - head * 0.06, 0.07, 0.11, 12)),
        ("ink", polygon((-0.07, y + head * 0.26), (0.07, y + head * 0.26), (0, y + head * 0.42))),
    ]


def butterfly(rng: Rng) -> list[Part]:
    up, out, low = rng.uniform(0.72, 0.9), rng.uniform(0.9, 1.02), rng.uniform(0.62, 0.78)
    upper = curve((0.05, 0.0), (0.2, -up * 0.6), (out * 0.72, -up), (out, -up * 0.7), (out * 0.86, -0.12), (0.4, 0.12))
    lower = curve((0.05, 0.02), (0.4, 0.02), (out * 0.8, 0.2), (out * 0.74, low * 0.82), (0.36, low),
                  (0.12, low * 0.5))
    centre = np.array((out * 0.58, -up * 0.5))
    spot = "detail" if rng.random() < 0.6 else "cream"
    parts = [
        *both("shade", lower),
        *both("light", 0.6 * (lower - (0.4, 0.35)) + (0.4, 0.35)),
        *both("deep", upper),
        *both("main", 0.88 * (upper - centre) + centre),
    ]
    parts += both(spot, ellipse(out * 0.68, -up * 0.58, 0.13, 0.15, 16))
    parts += both(spot, ellipse(out * 0.52, low * 0.55, 0.1, count=14))
    parts += both("ink", stroke((0.02, -0.4), (0.1, -0.62), (0.22, -0.8), width=0.11))
    return [*parts, ("ink", ellipse(0, 0.08, 0.12, 0.5, 22)), ("ink", ellipse(0, -0.4, 0.14, count=18))]


def car(rng: Rng) -> list[Part]:
    roof, front, wheel = rng.uniform(-0.62, -0.48), rng.uniform(0.3, 0.46), rng.uniform(0.23, 0.27)
    back = rng.uniform(-0.72, -0.6)
    body = curve((-1, 0.36), (-1, 0.36), (-1, -0.02), (back - 0.1, -0.12), (back + 0.2, roof), (0.1, roof - 0.02),
                 (front + 0.12, -0.1), (0.88, 0.0), (1.0, 0.2), (1.0, 0.36), (1.0, 0.36))
    y = roof + 0.12
    parts = [
        ("main", body),
        ("shade", polygon((-1, 0.16), (0.99, 0.16), (1, 0.38), (-1, 0.38))),
        ("glass", polygon((back + 0.12, -0.08), (back + 0.26, y), (-0.16, y), (-0.16, -0.08))),
        ("glass", polygon((-0.06, -0.08), (-0.06, y), (0.1, y), (front - 0.04, -0.08))),
        ("glass_light", polygon((back + 0.3, -0.08), (back + 0.42, y), (back + 0.52, y), (back + 0.4, -0.08))),
        ("cream", ellipse(0.93, 0.12, 0.08, 0.1, 14)),
        ("detail", box(-1.02, 0.02, -0.92, 0.16, 0.03)),
        ("deep", box(-0.14, 0.02, 0.02, 0.07)),
        ("metal_shade", box(-1.05, 0.3, 1.05, 0.42, 0.05)),
    ]
    for x in (-0.56, 0.56):
        parts += [
            ("ink", ellipse(x, 0.4, wheel)),
            ("metal", ellipse(x, 0.4, wheel * 0.52, count=18)),
            ("metal_shade", ellipse(x, 0.4, wheel * 0.22, count=12)),
        ]
    return parts


def sailboat(rng: Rng) -> list[Part]:
    top, w = rng.uniform(-1.05, -0.92), rng.uniform(0.6, 0.72)
    y = 0.52
    hull = "wood" if rng.random() < 0.5 else "detail"
    return [
        ("wood_shade", box(-0.13, top - 0.04, 0.03, y + 0.1, 0.03)),
        ("main", curve((0.0, top), (0.0, top), (w * 0.62, -0.3), (w + 0.12, y - 0.04), (w + 0.12, y - 0.04),
                       (0.4, y + 0.03), (0.0, y), (0.0, y), (0.0, -0.2))),
        ("shade", curve((0.0, top), (w * 0.62, -0.3), (w + 0.12, y - 0.04), (w + 0.12, y - 0.04), (w * 0.66, y),
                        (w * 0.34, -0.1))),
        ("light", curve((-0.12, top + 0.28), (-0.12, top + 0.28), (-0.5, 0.05), (-w, y - 0.02), (-w, y - 0.02),
                        (-0.3, y + 0.03), (-0.12, y), (-0.12, y))),
        (hull, curve((-0.92, y), (-0.92, y), (0.0, y + 0.07), (1.0, y - 0.04), (1.0, y - 0.04), (0.72, 0.92),
                     (0.2, 1.0), (-0.5, 0.97), (-0.78, 0.84))),
        ("cream", curve((-0.86, y + 0.13), (0.0, y + 0.2), (0.9, y + 0.11), (0.86, y + 0.2), (0.0, y + 0.29),
                        (-0.82, y + 0.22))),
        ("detail_shade", polygon((-0.06, top - 0.08), (-0.42, top + 0.05), (-0.06, top + 0.16))),
    ]


def rocket(rng: Rng) -> list[Part]:
    w, fin, nose = rng.uniform(0.36, 0.44), rng.uniform(0.72, 0.86), rng.uniform(-0.6, -0.5)
    wing = curve((w * 0.7, 0.1), (w * 0.7, 0.1), (fin, 0.42), (fin + 0.02, 0.9), (fin + 0.02, 0.9), (w * 0.6, 0.62))
    y = rng.uniform(-0.28, -0.16)
    return [
        ("flame", curve((-0.2, 0.6), (0.2, 0.6), (0.17, 0.86), (0.0, 1.08), (0.0, 1.08), (-0.17, 0.86))),
        ("cream", ellipse(0, 0.76, 0.09, 0.15, 12)),
        ("detail", wing),
        ("detail_shade", flipped(wing)),
        ("metal_shade", twofold((w * 0.5, 0.6), (w * 0.66, 0.76), smooth=False)),
        ("main", twofold((0.03, -1.08), (w * 0.7, -0.62), (w, -0.05), (w * 0.62, 0.66), (w * 0.5, 0.68))),
        ("shade", curve((0.03, -1.08), (w * 0.7, -0.62), (w, -0.05), (w * 0.62, 0.66), (w * 0.25, 0.68),
                        (w * 0.52, 0))),
        ("detail", curve((0, -1.1), (0, -1.1), (w * 0.5, -0.82), (w * 0.76, nose), (w * 0.76, nose), (0, nose + 0.08),
                         (-w * 0.76, nose), (-w * 0.76, nose), (-w * 0.5, -0.82))),
        ("cream", ellipse(0, y, w * 0.56)),
        ("glass", ellipse(0, y, w * 0.38, count=20)),
        ("glass_light", ellipse(-w * 0.12, y - w * 0.12, w * 0.16, count=12)),
        ("detail", box(-0.07, 0.34, 0.07, 0.86, 0.06)),
    ]


def ball(rng: Rng) -> list[Part]:
    shade = curve((0.5, -0.86), (0.92, -0.38), (0.92, 0.38), (0.5, 0.86), (-0.3, 0.95), (0.3, 0.62), (0.62, 0))
    glow = turned(ellipse(-0.5, -0.5, 0.1, 0.24, 16), 45, -0.5, -0.5)
    style = rng.integers(3)
    if style == 0:  # a star
        angle = np.arange(10) * np.pi / 5 - np.pi / 2
        star = np.stack([np.cos(angle), np.sin(angle)], 1) * np.where(np.arange(10) % 2, 0.24, 0.52)[:, None]
        face = [("deep", star * 1.16 - (0.08, 0)), ("cream", star - (0.08, 0))]
    elif style == 1:  # a belt between two seams
        t = np.linspace(-1, 1, 9)
        edge = np.stack([t * 0.94, 0.22 * (1 - t**2)], 1)
        face = [
            (role, np.concatenate([edge - (0, half), (edge - (0, -half))[::-1]]))
            for role, half in (("cream", 0.3), ("detail", 0.19))
        ]
    else:  # two curved seams
        t = np.linspace(-0.74, 0.74, 9)
        seam = np.stack([0.26 + 0.38 * (t / 0.74) ** 2, t], 1)
        face = both("cream", stroke(*seam, width=0.13))
    return [("main", ellipse(0, 0, 1, count=40)), ("shade", shade), *face, ("glow", glow)]


def teddy_bear(rng: Rng) -> list[Part]:
    head, w = rng.uniform(0.43, 0.5), rng.uniform(0.44, 0.54)
    y = -0.46
    ear = ellipse(head * 0.82, y - head * 0.72, 0.2, count=20)
    parts = [
        *both("main", ear),
        *both("cream", ellipse(head * 0.82, y - head * 0.72, 0.11, count=14)),
        *both("shade", turned(ellipse(w + 0.12, 0.22, 0.17, 0.36, 20), -32, w + 0.12, 0.22)),
        ("main", ellipse(0, 0.42, w, 0.55)),
        ("light", ellipse(0, 0.42, w * 0.58, 0.36, 22)),
        *both("main", ellipse(w + 0.02, 0.8, 0.26, 0.25, 22)),
        *both("cream", ellipse(w + 0.03, 0.82, 0.15, 0.15, 16)),
        ("shade", ellipse(0, y + 0.12, head * 0.98, head * 0.82)),
        ("main", ellipse(0, y, head * 1.06, head * 0.92)),
        ("cream", ellipse(0, y + head * 0.36, head * 0.46, head * 0.36, 20)),
        *both("ink", ellipse(head * 0.42, y - head * 0.06, 0.065, count=12)),
        ("ink", ellipse(0, y + head * 0.22, 0.1, 0.075, 12)),
    ]
    if rng.random() < 0.6:
        parts += both("detail", polygon((0, 0.04), (0.26, -0.1), (0.26, 0.2)))
        parts.append(("detail_shade", ellipse(0, 0.05, 0.08, count=12)))
    return parts


def kite(rng: Rng) -> list[Part]:
    w, waist = rng.uniform(0.66, 0.8), rng.uniform(-0.4, -0.22)
    top, left, bottom, right = (0.0, -1.0), (-w, waist), (0.0, 0.78), (w, waist)
    bow = polygon((0, 0.72), (0.34, 0.62), (0.34, 1.04), (0, 0.94))
    return [
        ("main", polygon(top, right, bottom, left)),
        ("shade", polygon(top, right, (0.0, waist))),
        ("shade", polygon(left, (0.0, waist), bottom)),
        ("detail", stroke(left, (0.0, waist), right, width=0.07)),
        ("detail", stroke(top, (0.0, waist), bottom, width=0.07)),
        ("cream", ellipse(0, waist, 0.13, count=14)),
        *both("detail", bow),
        ("detail_shade", ellipse(0, 0.83, 0.13, count=12)),
    ]


CREATURES = (fish, cat, butterfly, car, sailboat, rocket, ball, teddy_bear, kite)
