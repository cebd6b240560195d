"""Drawings of animals, vehicles and toys, from fish to kite."""

import numpy as np
from numpy import cos, pi
from numpy.random import Generator

from r2sm_jax.synthetic.scenes.drawings.shapes import (
    Paint,
    box,
    curve,
    ellipse,
    mirror,
    polygon,
    rotate,
    scale,
    shift,
    stroke,
    symmetric,
)


def draw_fish(rng: Generator, paint: Paint) -> None:
    h = rng.uniform(0.44, 0.58)
    fin = rng.uniform(0.24, 0.36)
    tail = rng.uniform(0.4, 0.52)
    fin_role = "detail" if rng.random() < 0.5 else "shade"
    body = curve(
        (-0.95, 0.04),
        (-0.6, -h * 0.78),
        (-0.1, -h),
        (0.4, -h * 0.55),
        (0.66, -0.12),
        (0.66, 0.12),
        (0.4, h * 0.55),
        (-0.1, h),
        (-0.6, h * 0.78),
    )
    belly = curve(
        (-0.92, 0.12),
        (-0.5, 0.26),
        (0.1, 0.28),
        (0.64, 0.1),
        (0.4, h * 0.55),
        (-0.1, h),
        (-0.6, h * 0.78),
    )

    paint(
        fin_role,
        curve((-0.35, -h * 0.8), (-0.1, -h - fin), (0.3, -h - fin * 0.6), (0.42, -h * 0.3)),
    )
    paint(
        fin_role,
        curve((-0.1, h * 0.8), (0.08, h + fin * 0.8), (0.32, h + fin * 0.3), (0.3, h * 0.5)),
    )
    # The tail.
    paint(
        fin_role,
        curve(
            (0.5, 0),
            (0.5, 0),
            (1.0, -tail),
            (1.08, -tail * 0.8),
            (0.9, 0),
            (1.08, tail * 0.8),
            (1.0, tail),
        ),
    )
    paint("main", body)
    paint("shade", belly)
    paint("deep", stroke((-0.38, -h * 0.6), (-0.26, -0.05), (-0.36, h * 0.55), width=0.07))
    paint(fin_role, curve((-0.14, 0.0), (0.3, 0.04), (0.26, 0.26), (-0.02, 0.2)))
    # The eye.
    paint("cream", ellipse((-0.62, -h * 0.25), 0.13, count=16))
    paint("ink", ellipse((-0.64, -h * 0.25), 0.075, count=12))
    paint("glow", rotate(ellipse((-0.1, -h * 0.72), (0.24, 0.05), count=14), 2))


def draw_cat(rng: Generator, paint: Paint) -> None:
    w = rng.uniform(0.46, 0.56)
    head = rng.uniform(0.42, 0.48)
    y = -0.5
    tail = rng.uniform(0.86, 1.0)
    ear = polygon(
        (0.08, y - head * 0.7), (head * 0.86, y - head * 1.42), (head * 0.98, y - head * 0.1)
    )
    inner = polygon(
        (0.2, y - head * 0.75), (head * 0.76, y - head * 1.14), (head * 0.82, y - head * 0.35)
    )

    # The tail.
    paint(
        "shade",
        curve(
            (0.2, 0.98),
            (0.6, 0.95),
            (tail - 0.14, 0.6),
            (tail - 0.26, 0.2),
            (tail - 0.06, 0.08),
            (tail + 0.05, 0.5),
            (tail - 0.1, 0.92),
            (0.6, 1.08),
        ),
    )
    # The body; the head comes in front.
    paint("main", symmetric((0.2, -0.35), (0.36, 0), (w + 0.04, 0.6), (w, 1.0), (0.2, 1.05)))
    paint("main", ear, both_sides=True)
    paint("rose", inner, both_sides=True)
    paint("shade", ellipse((0, y + head * 0.52), (head * 0.74, head * 0.56)))
    # Chest, haunches and paws.
    paint("cream", ellipse((0, 0.28), (0.2, 0.36), count=20))
    paint("shade", ellipse((w - 0.08, 0.85), (0.14, 0.24), count=16), both_sides=True)
    paint("light", ellipse((0.19, 0.97), (0.17, 0.11), count=16), both_sides=True)
    # The face.
    paint("main", ellipse((0, y), (head * 1.08, head * 0.92)))
    paint("cream", ellipse((0, y + head * 0.42), (head * 0.42, head * 0.3), count=18))
    paint("cream", ellipse((head * 0.44, y - head * 0.06), (0.12, 0.13), count=14), both_sides=True)
    paint("ink", ellipse((head * 0.44, y - head * 0.06), (0.07, 0.11), count=12), both_sides=True)
    paint("ink", polygon((-0.07, y + head * 0.26), (0.07, y + head * 0.26), (0, y + head * 0.42)))


def draw_butterfly(rng: Generator, paint: Paint) -> None:
    up = rng.uniform(0.72, 0.9)
    out = rng.uniform(0.9, 1.02)
    low = rng.uniform(0.62, 0.78)
    upper = curve(
        (0.05, 0.0),
        (0.2, -up * 0.6),
        (out * 0.72, -up),
        (out, -up * 0.7),
        (out * 0.86, -0.12),
        (0.4, 0.12),
    )
    lower = curve(
        (0.05, 0.02),
        (0.4, 0.02),
        (out * 0.8, 0.2),
        (out * 0.74, low * 0.82),
        (0.36, low),
        (0.12, low * 0.5),
    )
    spot_role = "detail" if rng.random() < 0.6 else "cream"

    # Wings with darker edges and spots.
    paint("shade", lower, both_sides=True)
    paint("light", scale(lower, 0.6, 0.4, 0.35), both_sides=True)
    paint("deep", upper, both_sides=True)
    paint("main", scale(upper, 0.88, out * 0.58, -up * 0.5), both_sides=True)
    paint(spot_role, ellipse((out * 0.68, -up * 0.58), (0.13, 0.15), count=16), both_sides=True)
    paint(spot_role, ellipse((out * 0.52, low * 0.55), 0.1, count=14), both_sides=True)
    # Feelers, body and head.
    paint("ink", stroke((0.02, -0.4), (0.1, -0.62), (0.22, -0.8), width=0.11), both_sides=True)
    paint("ink", ellipse((0, 0.08), (0.12, 0.5), count=22))
    paint("ink", ellipse((0, -0.4), 0.14, count=18))


def draw_car(rng: Generator, paint: Paint) -> None:
    roof = rng.uniform(-0.62, -0.48)
    front = rng.uniform(0.3, 0.46)
    wheel = rng.uniform(0.23, 0.27)
    back = rng.uniform(-0.72, -0.6)
    body = curve(
        (-1, 0.36),
        (-1, 0.36),
        (-1, -0.02),
        (back - 0.1, -0.12),
        (back + 0.2, roof),
        (0.1, roof - 0.02),
        (front + 0.12, -0.1),
        (0.88, 0.0),
        (1.0, 0.2),
        (1.0, 0.36),
        (1.0, 0.36),
    )
    y = roof + 0.12

    paint("main", body)
    paint("shade", polygon((-1, 0.16), (0.99, 0.16), (1, 0.38), (-1, 0.38)))
    # Windows.
    paint("glass", polygon((back + 0.12, -0.08), (back + 0.26, y), (-0.16, y), (-0.16, -0.08)))
    paint("glass", polygon((-0.06, -0.08), (-0.06, y), (0.1, y), (front - 0.04, -0.08)))
    paint(
        "glass_light",
        polygon((back + 0.3, -0.08), (back + 0.42, y), (back + 0.52, y), (back + 0.4, -0.08)),
    )
    # Lamps, door handle and sill.
    paint("cream", ellipse((0.93, 0.12), (0.08, 0.1), count=14))
    paint("detail", box((-1.02, 0.02), (-0.92, 0.16), 0.03))
    paint("deep", box((-0.14, 0.02), (0.02, 0.07)))
    paint("metal_shade", box((-1.05, 0.3), (1.05, 0.42), 0.05))
    for x in (-0.56, 0.56):
        paint("ink", ellipse((x, 0.4), wheel))
        paint("metal", ellipse((x, 0.4), wheel * 0.52, count=18))
        paint("metal_shade", ellipse((x, 0.4), wheel * 0.22, count=12))


def draw_sailboat(rng: Generator, paint: Paint) -> None:
    top = rng.uniform(-1.05, -0.92)
    w = rng.uniform(0.6, 0.72)
    y = 0.52
    hull_role = "wood" if rng.random() < 0.5 else "detail"

    # The mast, two sails, the hull with its stripe, and a pennant.
    paint("wood_shade", box((-0.13, top - 0.04), (0.03, y + 0.1), 0.03))
    paint(
        "main",
        curve(
            (0.0, top),
            (0.0, top),
            (w * 0.62, -0.3),
            (w + 0.12, y - 0.04),
            (w + 0.12, y - 0.04),
            (0.4, y + 0.03),
            (0.0, y),
            (0.0, y),
            (0.0, -0.2),
        ),
    )
    paint(
        "shade",
        curve(
            (0.0, top),
            (w * 0.62, -0.3),
            (w + 0.12, y - 0.04),
            (w + 0.12, y - 0.04),
            (w * 0.66, y),
            (w * 0.34, -0.1),
        ),
    )
    paint(
        "light",
        curve(
            (-0.12, top + 0.28),
            (-0.12, top + 0.28),
            (-0.5, 0.05),
            (-w, y - 0.02),
            (-w, y - 0.02),
            (-0.3, y + 0.03),
            (-0.12, y),
            (-0.12, y),
        ),
    )
    paint(
        hull_role,
        curve(
            (-0.92, y),
            (-0.92, y),
            (0.0, y + 0.07),
            (1.0, y - 0.04),
            (1.0, y - 0.04),
            (0.72, 0.92),
            (0.2, 1.0),
            (-0.5, 0.97),
            (-0.78, 0.84),
        ),
    )
    paint(
        "cream",
        curve(
            (-0.86, y + 0.13),
            (0.0, y + 0.2),
            (0.9, y + 0.11),
            (0.86, y + 0.2),
            (0.0, y + 0.29),
            (-0.82, y + 0.22),
        ),
    )
    paint("detail_shade", polygon((-0.06, top - 0.08), (-0.42, top + 0.05), (-0.06, top + 0.16)))


def draw_rocket(rng: Generator, paint: Paint) -> None:
    w = rng.uniform(0.36, 0.44)
    fin = rng.uniform(0.72, 0.86)
    nose = rng.uniform(-0.6, -0.5)
    wing = curve(
        (w * 0.7, 0.1),
        (w * 0.7, 0.1),
        (fin, 0.42),
        (fin + 0.02, 0.9),
        (fin + 0.02, 0.9),
        (w * 0.6, 0.62),
    )
    y = rng.uniform(-0.28, -0.16)

    # The flame comes out behind the fins and the nozzle.
    paint(
        "flame",
        curve((-0.2, 0.6), (0.2, 0.6), (0.17, 0.86), (0.0, 1.08), (0.0, 1.08), (-0.17, 0.86)),
    )
    paint("cream", ellipse((0, 0.76), (0.09, 0.15), count=12))
    paint("detail", wing)
    paint("detail_shade", mirror(wing))
    paint("metal_shade", symmetric((w * 0.5, 0.6), (w * 0.66, 0.76), smooth=False))
    # The body with its nose.
    paint(
        "main",
        symmetric((0.03, -1.08), (w * 0.7, -0.62), (w, -0.05), (w * 0.62, 0.66), (w * 0.5, 0.68)),
    )
    paint(
        "shade",
        curve(
            (0.03, -1.08),
            (w * 0.7, -0.62),
            (w, -0.05),
            (w * 0.62, 0.66),
            (w * 0.25, 0.68),
            (w * 0.52, 0),
        ),
    )
    paint(
        "detail",
        curve(
            (0, -1.1),
            (0, -1.1),
            (w * 0.5, -0.82),
            (w * 0.76, nose),
            (w * 0.76, nose),
            (0, nose + 0.08),
            (-w * 0.76, nose),
            (-w * 0.76, nose),
            (-w * 0.5, -0.82),
        ),
    )
    # The window and the middle fin.
    paint("cream", ellipse((0, y), w * 0.56))
    paint("glass", ellipse((0, y), w * 0.38, count=20))
    paint("glass_light", ellipse((-w * 0.12, y - w * 0.12), w * 0.16, count=12))
    paint("detail", box((-0.07, 0.34), (0.07, 0.86), 0.06))


def draw_ball(rng: Generator, paint: Paint) -> None:
    style = ("star", "band", "seams")[rng.integers(3)]

    paint("main", ellipse((0, 0), 1, count=40))
    # The side away from the light.
    paint(
        "shade",
        curve(
            (0.5, -0.86),
            (0.92, -0.38),
            (0.92, 0.38),
            (0.5, 0.86),
            (-0.3, 0.95),
            (0.3, 0.62),
            (0.62, 0),
        ),
    )

    tip = 0.52
    notch = 0.24
    star = symmetric(
        (0, -tip),
        (notch * cos(0.3 * pi), -notch * cos(0.2 * pi)),
        (tip * cos(0.1 * pi), -tip * cos(0.4 * pi)),
        (notch * cos(0.1 * pi), notch * cos(0.4 * pi)),
        (tip * cos(0.3 * pi), tip * cos(0.2 * pi)),
        (0, notch),
        smooth=False,
    )

    if style == "star":
        paint("deep", shift(scale(star, 1.16, 0, 0), -0.08, 0))
        paint("cream", shift(star, -0.08, 0))

    if style == "band":
        paint("cream", _ball_band(0.3))
        paint("detail", _ball_band(0.19))
    if style == "seams":
        paint(
            "cream",
            stroke(
                (0.64, -0.74),
                (0.47375, -0.555),
                (0.355, -0.37),
                (0.28375, -0.185),
                (0.26, 0),
                (0.28375, 0.185),
                (0.355, 0.37),
                (0.47375, 0.555),
                (0.64, 0.74),
                width=0.13,
            ),
            both_sides=True,
        )
    paint("glow", rotate(ellipse((-0.5, -0.5), (0.1, 0.24), count=16), 45, -0.5, -0.5))


def _ball_band(h: float) -> np.ndarray:
    """A band around a ball, of height 2h. It sags by 0.22 in the middle, as seen from above."""
    return symmetric(
        (0, 0.22 - h),
        (0.235, 0.20625 - h),
        (0.47, 0.165 - h),
        (0.705, 0.09625 - h),
        (0.94, -h),
        (0.94, h),
        (0.705, 0.09625 + h),
        (0.47, 0.165 + h),
        (0.235, 0.20625 + h),
        (0, 0.22 + h),
        smooth=False,
    )


def draw_teddy_bear(rng: Generator, paint: Paint) -> None:
    head = rng.uniform(0.43, 0.5)
    w = rng.uniform(0.44, 0.54)
    y = -0.46

    # Ears and arms lie behind the body.
    paint("main", ellipse((head * 0.82, y - head * 0.72), 0.2, count=20), both_sides=True)
    paint("cream", ellipse((head * 0.82, y - head * 0.72), 0.11, count=14), both_sides=True)
    paint(
        "shade",
        rotate(ellipse((w + 0.12, 0.22), (0.17, 0.36), count=20), -32, w + 0.12, 0.22),
        both_sides=True,
    )
    # Body and feet.
    paint("main", ellipse((0, 0.42), (w, 0.55)))
    paint("light", ellipse((0, 0.42), (w * 0.58, 0.36), count=22))
    paint("main", ellipse((w + 0.02, 0.8), (0.26, 0.25), count=22), both_sides=True)
    paint("cream", ellipse((w + 0.03, 0.82), (0.15, 0.15), count=16), both_sides=True)
    # The head with its snout, eyes and nose.
    paint("shade", ellipse((0, y + 0.12), (head * 0.98, head * 0.82)))
    paint("main", ellipse((0, y), (head * 1.06, head * 0.92)))
    paint("cream", ellipse((0, y + head * 0.36), (head * 0.46, head * 0.36), count=20))
    paint("ink", ellipse((head * 0.42, y - head * 0.06), 0.065, count=12), both_sides=True)
    paint("ink", ellipse((0, y + head * 0.22), (0.1, 0.075), count=12))

    has_bow_tie = rng.random() < 0.6
    if has_bow_tie:
        paint("detail", polygon((0, 0.04), (0.26, -0.1), (0.26, 0.2)), both_sides=True)
        paint("detail_shade", ellipse((0, 0.05), 0.08, count=12))


def draw_kite(rng: Generator, paint: Paint) -> None:
    w = rng.uniform(0.66, 0.8)
    waist = rng.uniform(-0.4, -0.22)
    top = (0.0, -1.0)
    left = (-w, waist)
    bottom = (0.0, 0.78)
    right = (w, waist)
    bow = polygon((0, 0.72), (0.34, 0.62), (0.34, 1.04), (0, 0.94))

    paint("main", polygon(top, right, bottom, left))
    paint("shade", polygon(top, right, (0.0, waist)))
    paint("shade", polygon(left, (0.0, waist), bottom))
    # The two sticks and the bow.
    paint("detail", stroke(left, (0.0, waist), right, width=0.07))
    paint("detail", stroke(top, (0.0, waist), bottom, width=0.07))
    paint("cream", ellipse((0, waist), 0.13, count=14))
    paint("detail", bow, both_sides=True)
    paint("detail_shade", ellipse((0, 0.83), 0.13, count=12))
