"""Drawings of household things and clothes, from mug to boot."""

from numpy.random import Generator

from r2sm_jax.synthetic.scenes.drawings.shapes import (
    Paint,
    box,
    curve,
    ellipse,
    mirror,
    polygon,
    rotate,
    stroke,
    symmetric,
)


def draw_mug(rng: Generator, paint: Paint) -> None:
    h = rng.uniform(0.68, 0.95)
    w = 0.7
    foot = rng.uniform(0.52, 0.68)
    grip = rng.uniform(0.36, 0.46)
    y = rng.uniform(-0.08, 0.1)
    drink_role = "wood_shade" if rng.random() < 0.6 else "cream"
    has_band = rng.random() < 0.4
    right = [(w, -h), (w, -h), (0.5 * (w + foot), 0), (foot, h - 0.1)]

    # The handle is a ring beside the body.
    paint("shade", ellipse((0.62, y), (grip + 0.08, grip + 0.12)))
    paint("hole", ellipse((0.66, y), (grip - 0.15, grip - 0.12)))
    # The body.
    paint("main", symmetric(*right, (foot * 0.6, h + 0.02)))
    paint("shade", curve(*right, (foot * 0.55, h + 0.02), (foot * 0.62, 0)))
    paint("glow", box((-0.52, -h * 0.6), (-0.38, h * 0.35), 0.07))
    if has_band:
        paint("detail", symmetric((foot + 0.02, h - 0.34), (foot + 0.01, h - 0.16), smooth=False))
    # Rim and drink.
    paint("light", ellipse((0, -h), (w, 0.2)))
    paint("deep", ellipse((0, -h + 0.01), (w - 0.1, 0.14)))
    paint(drink_role, ellipse((0, -h + 0.045), (w - 0.18, 0.09)))


def draw_bottle(rng: Generator, paint: Paint) -> None:
    w = rng.uniform(0.4, 0.52)
    neck = rng.uniform(0.18, 0.22)
    shoulder = rng.uniform(-0.45, -0.15)
    label = rng.uniform(0.12, 0.22)
    right = [(neck, shoulder - 0.3), (w, shoulder + 0.1), (w, 0.4), (w, 0.9)]

    # The body, then label and cork.
    paint("main", symmetric((neck, -0.9), (neck, -0.9), *right, (w * 0.8, 1.0)))
    paint(
        "shade",
        curve((neck, -0.85), *right, (w * 0.6, 1.0), (w * 0.55, 0.4), (neck * 0.4, shoulder - 0.1)),
    )
    paint("glow", box((-w * 0.72, shoulder + 0.18), (-w * 0.42, 0.8), w * 0.15))
    paint("cream", box((-w, 0.42 - label), (w, 0.42 + label)))
    paint("detail", ellipse((0, 0.42), label * 0.62, count=16))
    paint("detail", box((-neck - 0.05, -1.08), (neck + 0.05, -0.8), 0.06))
    paint("detail_shade", box((neck * 0.2, -1.06), (neck + 0.05, -0.8), 0.05))


def draw_wine_glass(rng: Generator, paint: Paint) -> None:
    w = rng.uniform(0.42, 0.52)
    belly = rng.uniform(0.02, 0.1)
    foot = rng.uniform(0.4, 0.52)
    depth = rng.uniform(0.0, 0.14)
    stem = [(0.1, depth), (0.1, 0.6), (0.17, 0.84), (0.3, 0.92)]
    bowl = [(w + belly, -0.5), (w * 0.72, depth)]

    # Foot, stem, bowl and rim.
    paint("main", ellipse((0, 0.9), (foot, 0.15)))
    paint("shade", ellipse((0.03, 0.94), (foot * 0.9, 0.1)))
    paint("main", symmetric(*stem, smooth=False))
    paint("shade", polygon((0.02, depth), *stem, (0.06, 0.9)))
    paint("main", symmetric((w, -0.95), (w, -0.95), *bowl, (0.14, depth + 0.22)))
    paint(
        "shade",
        curve(
            (w, -0.9),
            (w, -0.9),
            *bowl,
            (0.1, depth + 0.2),
            (w * 0.45, depth - 0.15),
            (w * 0.72, -0.5),
        ),
    )
    paint("glow", rotate(ellipse((-w * 0.66, -0.42), (0.07, 0.27), count=16), 4))
    paint("light", ellipse((0, -0.95), (w, 0.14)))
    paint("deep", ellipse((0, -0.935), (w - 0.09, 0.085)))


def draw_book(rng: Generator, paint: Paint) -> None:
    w = rng.uniform(0.56, 0.74)
    h = rng.uniform(0.85, 0.98)
    d = rng.uniform(0.14, 0.24)

    # The back cover and the pages, seen from the lower right; then the front cover with its spine.
    paint(
        "deep",
        polygon((-w, -h), (w, -h), (w + d, -h + d), (w + d, h + d), (-w + d, h + d), (-w, h)),
    )
    paint(
        "cream",
        polygon(
            (-w + 0.05, h - 0.05),
            (w - 0.02, h - 0.02),
            (w - 0.02, -h),
            (w + d - 0.06, -h + d),
            (w + d - 0.06, h + d - 0.08),
            (-w + d, h + d - 0.08),
        ),
    )
    paint(
        "cream_shade",
        stroke(
            (-w + d * 0.6, h + d * 0.45),
            (w + d * 0.5, h + d * 0.45),
            (w + d * 0.5, -h + d * 0.6),
            width=0.05,
        ),
    )
    paint("main", box((-w, -h), (w, h), 0.05))
    paint("shade", box((-w, -h), (-w + 0.22, h), 0.05))
    paint("light", box((-w + 0.22, -h), (-w + 0.28, h)))

    # The cover has a title or an emblem, and perhaps the name of the author.
    has_title = rng.random() < 0.6
    if has_title:
        paint("cream", box((-w + 0.5, -h * 0.68), (w - 0.2, -h * 0.25), 0.05))
        paint("detail", box((-w + 0.6, -h * 0.55), (w - 0.3, -h * 0.4)))
    else:
        paint("detail", ellipse((0.14, -h * 0.4), 0.24))
        paint("cream", ellipse((0.14, -h * 0.4), 0.13, count=16))

    has_author = rng.random() < 0.5
    if has_author:
        paint("detail", box((-w + 0.48, h * 0.6), (w - 0.2, h * 0.72), 0.03))


def draw_envelope(rng: Generator, paint: Paint) -> None:
    h = rng.uniform(0.6, 0.74)
    tip = rng.uniform(0.05, 0.25)
    seal_role = "detail" if rng.random() < 0.5 else "rose"

    paint("main", box((-1, -h), (1, h), 0.06))
    paint("shade", polygon((-0.98, h), (0, -0.05), (0.98, h)))
    paint("light", polygon((-0.9, h), (0, 0.06), (0.9, h)))
    # The flap with its shadow, then the seal.
    paint("deep", polygon((-0.99, -h + 0.02), (0, tip + 0.1), (0.99, -h + 0.02)))
    paint(
        "main",
        polygon(
            (-0.98, -h + 0.01),
            (-0.06, tip - 0.05),
            (0, tip - 0.01),
            (0.06, tip - 0.05),
            (0.98, -h + 0.01),
        ),
    )
    paint("detail_shade", ellipse((0.02, tip - 0.06), (0.19, 0.2), count=18))
    paint(seal_role, ellipse((0, tip - 0.09), (0.18, 0.19), count=18))


def draw_pencil(rng: Generator, paint: Paint) -> None:
    w = rng.uniform(0.23, 0.29)
    tip = rng.uniform(0.42, 0.54)
    end = -0.72

    # The sharpened end.
    paint("wood", polygon((-w, 1 - tip), (w, 1 - tip), (0.05, 1), (-0.05, 1)))
    paint("wood_shade", polygon((w * 0.3, 1 - tip), (w, 1 - tip), (0.05, 1), (0.02, 1)))
    paint(
        "ink",
        polygon(
            (-w * 0.4, 1 - tip * 0.4),
            (w * 0.4, 1 - tip * 0.4),
            (0.06, 0.99),
            (0, 1.03),
            (-0.06, 0.99),
        ),
    )
    # The painted shaft ends in three waves where it was sharpened.
    paint(
        "main",
        polygon(
            (-w, end),
            (w, end),
            (w, 1 - tip),
            (w * 0.66, 1.05 - tip),
            (w * 0.33, 1 - tip),
            (0, 1.05 - tip),
            (-w * 0.33, 1 - tip),
            (-w * 0.66, 1.05 - tip),
            (-w, 1 - tip),
        ),
    )
    paint(
        "shade",
        polygon(
            (w * 0.36, end), (w, end), (w, 1 - tip), (w * 0.68, 1.05 - tip), (w * 0.36, 1 - tip)
        ),
    )
    paint("light", polygon((-w, end), (-w * 0.5, end), (-w * 0.5, 1.03 - tip), (-w, 1 - tip)))
    # The eraser in its metal ring.
    paint("rose", box((-w, -1), (w, end), 0.09))
    paint("metal", box((-w - 0.01, end - 0.1), (w + 0.01, end + 0.08)))
    paint("metal_shade", box((-w - 0.01, end - 0.03), (w + 0.01, end + 0.01)))


def draw_hat(rng: Generator, paint: Paint) -> None:
    w = rng.uniform(0.5, 0.6)
    h = rng.uniform(0.72, 1.0)
    brim = rng.uniform(0.2, 0.28)
    narrow = rng.uniform(0.68, 0.95)
    top = narrow * w
    y = 0.35
    dent = rng.uniform(0.0, 0.12)
    crown = symmetric(
        (0.12, y - h + dent),
        (top * 0.8, y - h - 0.02),
        (top, y - h * 0.8),
        (w, y),
        (w * 0.6, y + 0.15),
    )

    # The brim lies behind the crown.
    paint("shade", ellipse((0, y + 0.05), (1, brim + 0.03)))
    paint("main", ellipse((0, y), (1, brim)))
    paint("shade", ellipse((0.04, y + 0.02), (w + 0.12, brim * 0.72)))
    paint("main", crown)
    paint("light", ellipse((-top * 0.45, y - h * 0.62), (0.1, 0.2), count=18))
    # The ribbon.
    paint(
        "detail",
        symmetric(
            (w * 0.97, y - 0.3),
            (w * 1.01, y - 0.02),
            (w * 0.6, y + 0.15),
            (w * 0.3, y + 0.18),
            smooth=False,
        ),
    )
    paint(
        "detail_shade",
        polygon(
            (w * 0.55, y - 0.3), (w * 0.97, y - 0.3), (w * 1.01, y - 0.02), (w * 0.6, y + 0.15)
        ),
    )


def draw_shirt(rng: Generator, paint: Paint) -> None:
    w = rng.uniform(0.5, 0.58)
    arm = rng.uniform(0.9, 1.02)
    hem = rng.uniform(0.86, 1.0)
    cuff = rng.uniform(-0.12, 0.08)
    sleeve = polygon(
        (0.45, -0.82), (0.62, -0.74), (arm + 0.02, cuff), (arm - 0.3, cuff + 0.2), (0.45, -0.2)
    )
    band = polygon(
        (arm + 0.02, cuff),
        (arm - 0.3, cuff + 0.2),
        (arm - 0.37, cuff + 0.07),
        (arm - 0.05, cuff - 0.12),
    )
    trim_role = "detail" if rng.random() < 0.6 else "shade"

    # Sleeves with their cuffs.
    paint("shade", sleeve)
    paint("main", mirror(sleeve))
    paint(trim_role, band, both_sides=True)
    # The body.
    paint(
        "main",
        polygon(
            (-0.58, -0.78),
            (-0.26, -0.9),
            (0.26, -0.9),
            (0.58, -0.78),
            (w, 0),
            (w + 0.02, hem),
            (-w - 0.02, hem),
            (-w, 0),
        ),
    )
    paint("shade", polygon((w, -0.3), (w + 0.02, hem), (w - 0.16, hem), (w - 0.04, 0.2)))
    paint("shade", polygon((-w, -0.3), (-w + 0.05, 0.3), (-w - 0.02, 0.1)))
    # The collar.
    paint(trim_role, ellipse((0, -0.92), (0.33, 0.27), count=22))
    paint("deep", ellipse((0, -0.93), (0.23, 0.17), count=22))
    paint("hole", box((-0.37, -1.3), (0.37, -0.92)))  # cuts off the collar above the shoulders

    has_pocket = rng.random() < 0.5
    if has_pocket:
        paint("detail", box((0.12, -0.38), (0.38, -0.1), 0.05))


def draw_boot(rng: Generator, paint: Paint) -> None:
    w = rng.uniform(0.32, 0.4)
    toe = rng.uniform(0.85, 1.02)

    # The sole with its heel.
    paint(
        "ink",
        curve(
            (-0.52, 0.8),
            (-0.52, 0.8),
            (toe, 0.78),
            (toe, 0.78),
            (toe, 0.98),
            (toe, 0.98),
            (0.1, 1.0),
            (0.0, 0.92),
            (-0.1, 0.92),
            (-0.15, 1.02),
            (-0.5, 1.02),
            (-0.5, 1.02),
        ),
    )
    # The shaft and the foot.
    paint(
        "main",
        curve(
            (-0.46, -0.95),
            (-0.46, -0.95),
            (w - 0.06, -0.95),
            (w - 0.06, -0.95),
            (w - 0.08, -0.2),
            (w + 0.05, 0.12),
            (toe - 0.16, 0.28),
            (toe + 0.02, 0.6),
            (toe, 0.84),
            (toe, 0.84),
            (-0.52, 0.86),
            (-0.52, 0.86),
            (-0.5, 0.4),
            (-0.44, 0),
        ),
    )
    paint(
        "shade",
        curve(
            (-0.52, 0.86),
            (-0.5, 0.45),
            (-0.44, 0.2),
            (-0.2, 0.55),
            (0.4, 0.66),
            (toe, 0.68),
            (toe, 0.86),
            (toe, 0.86),
        ),
    )
    paint("glow", rotate(ellipse((toe - 0.28, 0.42), (0.16, 0.07), count=14), 18, toe - 0.28, 0.42))
    paint("light", box((-0.34, -0.6), (-0.22, 0.2), 0.06))
    # The cuff.
    paint("detail", box((-0.52, -1.02), (w, -0.76), 0.06))
    paint("detail_shade", box((w - 0.24, -1.02), (w, -0.76), 0.06))
