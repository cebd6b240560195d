"""Drawings of food and tools, from apple to scissors."""

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
    shift,
    stroke,
    symmetric,
)


def draw_apple(rng: Generator, paint: Paint) -> None:
    w = rng.uniform(0.86, 0.98)
    h = rng.uniform(0.72, 0.86)
    dip = rng.uniform(0.1, 0.18)
    lean = rng.uniform(-0.05, 0.12)
    y = 0.15
    droop = rng.uniform(-40, -10)
    right = [(w, y - h * 0.42), (w * 0.86, y + h * 0.4), (w * 0.42, y + h)]

    # The stalk, once behind the apple and once in front of the dent.
    paint(
        "wood_shade",
        stroke((0, y - h * 0.7), (lean, y - h - 0.05), (lean + 0.12, y - h - 0.3), width=0.16),
    )
    # The fruit with its dent.
    paint("main", symmetric((0.12, y - h + dip), (w * 0.5, y - h), *right, (0.1, y + h - 0.07)))
    paint(
        "shade",
        curve(
            (w * 0.55, y - h * 0.9),
            *right,
            (0.05, y + h - 0.07),
            (w * 0.5, y + h * 0.45),
            (w * 0.72, y - h * 0.2),
        ),
    )
    paint("deep", ellipse((0.02, y - h + dip + 0.04), (0.22, 0.08), count=16))
    paint(
        "wood_shade",
        stroke((0, y - h + dip + 0.06), (lean * 0.6, y - h), (lean, y - h - 0.1), width=0.13),
    )
    leaf = curve((0, 0), (0, 0), (0.22, -0.17), (0.58, -0.06), (0.58, -0.06), (0.28, 0.12))
    paint("leaf", shift(rotate(leaf, droop), lean + 0.02, -(h + 0.06 - y)))
    paint(
        "glow",
        rotate(
            ellipse((-w * 0.52, y - h * 0.38), (0.1, 0.23), count=16), 25, -w * 0.52, y - h * 0.38
        ),
    )


def draw_banana(rng: Generator, paint: Paint) -> None:
    fat = rng.uniform(0.44, 0.56)
    bend = rng.uniform(0.42, 0.55)
    under = [
        (-1.0, -0.42),
        (-0.86, -0.02),
        (-0.45, bend * 0.85),
        (0.1, bend + 0.05),
        (0.62, bend * 0.62),
        (0.98, -0.12),
    ]
    over = [
        (0.84, -0.2),
        (0.55, bend * 0.42 - fat * 0.42),
        (0.08, bend - fat),
        (-0.4, bend * 0.75 - fat * 0.92),
        (-0.7, -0.3),
        (-0.8, -0.5),
    ]
    middle = [
        (0.9, -0.16),
        (0.6, bend * 0.55 - fat * 0.14),
        (0.1, bend - fat * 0.4),
        (-0.44, bend * 0.8 - fat * 0.4),
        (-0.76, -0.12),
        (-0.92, -0.44),
    ]

    # Stalk, fruit, and the dark ends.
    paint("wood_shade", stroke((-0.86, -0.3), (-0.9, -0.46), (-0.98, -0.72), width=0.24, taper=0.9))
    paint("main", curve(*under, *over))
    paint("shade", curve(*under, *middle))
    paint(
        "light",
        curve(
            (0.5, bend * 0.5 - fat * 0.38),
            (0.08, bend - fat * 0.86),
            (-0.4, bend * 0.78 - fat * 0.78),
            (0.06, bend - fat * 0.66),
        ),
    )
    paint("ink", curve((0.84, -0.19), (0.94, -0.26), (1.03, -0.16), (0.96, -0.06), (0.87, -0.06)))
    paint("ink", box((-1.1, -0.78), (-0.88, -0.64), 0.05))


def draw_ice_cream(rng: Generator, paint: Paint) -> None:
    r = rng.uniform(0.56, 0.64)
    y = rng.uniform(-0.34, -0.2)
    cone = rng.uniform(0.36, 0.44)

    # The lower edge of the scoop: every other point hangs down.
    drip = []
    for k in range(7):
        x = r * cos(k * (pi / 6))
        if k % 2:
            drip.append((x * 1.06, y + r * 0.55 + 0.12))
        else:
            drip.append((x * 0.98, y + r * 0.55 - 0.02))

    # The cone with its lines.
    paint("wood", polygon((-cone, y + r * 0.4), (cone, y + r * 0.4), (0.09, 1), (-0.09, 1)))
    paint(
        "wood_shade", polygon((cone * 0.35, y + r * 0.4), (cone, y + r * 0.4), (0.09, 1), (0.02, 1))
    )
    paint(
        "wood_shade",
        stroke((-cone * 0.75, y + r * 0.8), (cone * 0.35, y + r * 1.25 + 0.1), width=0.06),
    )
    paint("wood_shade", stroke((cone * 0.4, y + r * 0.6), (-cone * 0.5, y + r * 1.3), width=0.06))
    # The scoop.
    paint("main", ellipse((0, y), r))
    paint(
        "shade",
        curve(
            (r * 0.6, y - r * 0.78),
            (r, y),
            (r * 0.6, y + r * 0.8),
            (r * 0.1, y + r * 0.85),
            (r * 0.62, y + r * 0.2),
        ),
    )
    paint("main", curve((r * 1.02, y + r * 0.3), *drip, (-r * 1.02, y + r * 0.3), (0, y + r * 0.1)))
    paint(
        "glow",
        rotate(
            ellipse((-r * 0.48, y - r * 0.42), (0.08, 0.18), count=16), 38, -r * 0.48, y - r * 0.42
        ),
    )

    has_cherry = rng.random() < 0.6
    if has_cherry:
        paint("rose", ellipse((0.06, y - r - 0.05), 0.17, count=16))
        paint("cream", ellipse((0.01, y - r - 0.1), 0.05, count=8))


def draw_hammer(rng: Generator, paint: Paint) -> None:
    w = rng.uniform(0.19, 0.23)
    y = -0.66
    h = rng.uniform(0.2, 0.25)

    # The handle with two rings.
    paint(
        "main",
        symmetric(
            (w * 0.85, y),
            (w * 0.85, y),
            (w * 0.8, 0),
            (w * 1.15, 0.5),
            (w * 1.15, 0.95),
            (w * 0.7, 1.02),
        ),
    )
    paint(
        "shade",
        polygon(
            (w * 0.25, y),
            (w * 0.85, y),
            (w * 0.8, 0),
            (w * 1.15, 0.5),
            (w * 1.15, 0.94),
            (w * 0.4, 1),
        ),
    )
    paint("detail", box((-w * 1.15, 0.55), (w * 1.15, 0.68), 0.03))
    paint("detail", box((-w * 1.15, 0.78), (w * 1.15, 0.91), 0.03))
    # The claw, then the face of the head and what holds it.
    paint(
        "metal",
        polygon(
            (0.1, y - h * 0.9),
            (0.55, y - h * 0.9),
            (0.92, y + 0.14),
            (0.8, y + h + 0.08),
            (0.5, y + h * 0.75),
            (0.1, y + h * 0.8),
        ),
    )
    paint("metal", box((-0.78, y - h * 1.25), (-0.42, y + h * 1.25), 0.06))
    paint("metal_shade", box((-0.78, y + h * 0.4), (-0.42, y + h * 1.25), 0.06))
    paint("metal", box((-0.5, y - h * 0.8), (0.3, y + h * 0.8)))
    paint(
        "metal_shade",
        polygon(
            (-0.45, y + h * 0.3),
            (0.66, y + h * 0.3),
            (0.84, y + h),
            (0.8, y + h + 0.08),
            (0.5, y + h * 0.75),
            (-0.45, y + h * 0.8),
        ),
    )
    paint("main", box((-w - 0.14, y - h * 1.12), (w + 0.14, y + h * 1.12), 0.05))
    paint("light", box((-w - 0.14, y - h * 1.12), (w + 0.14, y - h * 0.6), 0.05))


def draw_key(rng: Generator, paint: Paint) -> None:
    r = rng.uniform(0.44, 0.52)
    gap = rng.uniform(0.16, 0.21)
    w = rng.uniform(0.13, 0.16)
    y = -0.5
    tooth = rng.uniform(0.3, 0.42)
    is_round = rng.random() < 0.5

    # The shaft and two teeth.
    paint("main", box((-w, y), (w, 1.02), 0.06))
    paint("main", box((0, 0.72), (tooth + w, 0.98), 0.04))
    paint("main", box((0, 0.3), (tooth * 0.75 + w, 0.54), 0.04))
    paint("shade", box((w * 0.3, 0), (w, 1.0)))
    paint("shade", box((w, 0.88), (tooth + w, 0.98), 0.03))
    if is_round:
        paint("main", ellipse((0, y), r))
        paint("shade", ellipse((0, y), gap + 0.11))
    else:  # three circles, like a clover leaf
        paint("main", ellipse((-0.27, y + 0.02 + 0.0625), r * 0.6, count=22))
        paint("main", ellipse((0.27, y + 0.02 + 0.0625), r * 0.6, count=22))
        paint("main", ellipse((0, y + 0.02 - 0.25), r * 0.6, count=22))
        paint("main", ellipse((0, y), r * 0.7))
        paint("shade", ellipse((0, y), gap + 0.09))
    # The collar, then the hole.
    paint("main", box((-w - 0.1, y + r * 0.86), (w + 0.1, y + r * 0.86 + 0.2), 0.06))
    paint("light", box((-w - 0.1, y + r * 0.86), (w + 0.1, y + r * 0.86 + 0.08), 0.04))
    paint("hole", ellipse((0, y), gap, count=20))
    paint(
        "glow",
        rotate(
            ellipse((-r * 0.6, y - r * 0.42), (0.05, 0.15), count=12), 45, -r * 0.6, y - r * 0.42
        ),
    )


def draw_scissors(rng: Generator, paint: Paint) -> None:
    gape = rng.uniform(12, 24)
    r = rng.uniform(0.36, 0.42)
    blade = curve(
        (-0.13, 0.1),
        (-0.13, 0.1),
        (-0.13, -0.6),
        (0.02, -1.05),
        (0.02, -1.05),
        (0.1, -0.5),
        (0.13, 0.1),
        (0.13, 0.1),
    )
    arm = polygon(
        (-0.14, -0.22), (0.14, -0.22), (0.16, 0.1), (0.12, 0.5), (-0.2, 0.5), (-0.16, 0.1)
    )
    loop = ellipse((-0.16, 0.66), (r * 0.86, r * 1.02))
    rim = ellipse((-0.16, 0.67), (r * 0.56, r * 0.7), count=20)
    gap = ellipse((-0.16, 0.67), (r * 0.42, r * 0.56), count=20)

    # The blade and the handle that lie behind, then those in front.
    paint("metal_shade", rotate(mirror(blade), -gape))
    paint("main", rotate(mirror(arm), -gape))
    paint("main", rotate(mirror(loop), -gape))
    paint("shade", rotate(mirror(rim), -gape))
    paint("hole", rotate(mirror(gap), -gape))

    paint("metal", rotate(blade, gape))
    paint("main", rotate(arm, gape))
    paint("main", rotate(loop, gape))
    paint("shade", rotate(rim, gape))
    paint("hole", rotate(gap, gape))

    # The screw.
    paint("detail", ellipse((0, 0), 0.1, count=14))
    paint("cream", ellipse((-0.02, -0.02), 0.045, count=8))
