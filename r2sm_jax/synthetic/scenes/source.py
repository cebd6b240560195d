"""Drawn scenes: everyday objects that hide one another, with exact modal and amodal masks.

`draw_scene` gives the same bytes for the same arguments in every process. The layout is made for 96
by 96 pixels and then scaled, so that it is the same at every size.
"""

import numpy as np

from r2sm_jax.synthetic.procedural import ProceduralSource
from r2sm_jax.synthetic.queries.write import TEST_SPLIT
from r2sm_jax.synthetic.random_choice import choose, pick
from r2sm_jax.synthetic.scenes.backdrop import draw_backdrop
from r2sm_jax.synthetic.scenes.drawings import CATEGORIES, draw_category
from r2sm_jax.synthetic.scenes.layout import Item, Layout, LayoutRules, Occlusion, PlacedItem
from r2sm_jax.synthetic.scenes.paint import (
    COLOURS,
    PATTERNS,
    Sprite,
    arrange_drawing,
    paint_drawing,
    paste_with_light,
)
from r2sm_jax.synthetic.scenes.scene import Scene, make_scene

LAYOUT_SIDE = 96  # units of the layout along a side
# Range of the longer side of an object in units.
MIN_EXTENT = 27
MAX_EXTENT = 56
DEFAULT_TILT = 16  # degrees to either side
MAX_TILT = {
    "butterfly": 45,
    "kite": 40,
    "rocket": 50,
    "fish": 25,
    "apple": 25,
    "ice cream": 30,
    "shirt": 25,
    # These may lie in any direction.
    "pencil": 180,
    "key": 180,
    "scissors": 180,
    "hammer": 180,
    "banana": 180,
    "book": 180,
    "envelope": 180,
    "ball": 180,
}
# Slender objects are drawn longer, so that they have as many pixels as others.
LENGTH_FACTOR = {
    "bottle": 1.15,
    "wine glass": 1.15,
    "pencil": 1.25,
    "key": 1.1,
    "hammer": 1.1,
    "banana": 1.1,
}
VOCABULARY = {"category": CATEGORIES, "colour": tuple(COLOURS), "pattern": PATTERNS}

MIN_OBJECTS = 3
COUNT_SHARES = np.cumsum((0.12, 0.22, 0.26, 0.19, 0.13, 0.08))  # of 3, 4, .. 8 objects
PATTERN_SHARES = np.cumsum((0.46, 0.2, 0.18, 0.16))
NO_COPIES_SHARE = 0.36  # of the scenes in which all objects are of different classes
SHARED_COLOUR_SHARE = 0.2  # of the scenes in which all copies have one colour
HIDDEN_AND_FREE_SHARE = 0.75  # of the scenes in which one copy should be hidden and another free
LAYOUT_RULES = LayoutRules(
    hidden_range=(0.05, 0.8),
    tolerance=0.05,
    num_directions=5,
    keep_inside=False,
    min_visible_pixels=40,
    min_visible_share=0.17,
    max_loss_of_free=0.03,
)


class SceneSource(ProceduralSource):
    """Drawn scenes."""

    splits = (*ProceduralSource.splits, TEST_SPLIT)

    @property
    def vocabulary(self) -> dict[str, tuple[str, ...]]:
        return VOCABULARY

    def make_scene(self, number: int) -> Scene:
        return draw_scene(self.seed, number, self.size)


def draw_scene(seed: int, index: int, size: int = LAYOUT_SIDE) -> Scene:
    """Scene number `index` of the endless series `seed`, painted at `size` by `size` pixels."""
    rng = np.random.default_rng((seed, index))
    canvas = draw_backdrop(rng, size)
    placed = place_drawings(rng)

    scale = size / LAYOUT_SIDE
    sprites = [p.sprite_in_picture(scale) for p in placed]
    for sprite in sprites:
        paste_with_light(canvas, sprite, scale)
    return make_scene(canvas, placed, sprites)


def place_drawings(rng: np.random.Generator) -> list[PlacedItem]:
    """Places random objects so that about half of them are partly hidden."""
    # A layout with too few objects is drawn anew as a whole.
    while True:
        items = choose_items(rng)
        layout = Layout((LAYOUT_SIDE, LAYOUT_SIDE), LAYOUT_RULES)
        # Many objects are smaller, so that they find a place.
        extent = rng.uniform(42, 50) - 1.8 * max(0, len(items) - 4)
        for item in items:
            layout.try_to_place(
                rng, item, extent, lambda extent, item=item: draw_object(rng, item, extent)
            )
        if len(layout.placed) >= MIN_OBJECTS:
            return layout.placed


def draw_object(rng: np.random.Generator, item: Item, extent: float) -> Sprite:
    """An item of a drawn category, its longer side about `extent` units, at 1 pixel per unit."""
    extent *= LENGTH_FACTOR.get(item.category, 1)
    extent = float(np.clip(extent, MIN_EXTENT, MAX_EXTENT))
    parts = draw_category(item.category, rng)
    max_tilt = MAX_TILT.get(item.category, DEFAULT_TILT)
    degrees = float(rng.uniform(-max_tilt, max_tilt))
    mirrored = bool(rng.random() < 0.5)
    drawing = arrange_drawing(
        rng,
        parts,
        item.attributes["colour"],
        item.attributes["pattern"],
        extent,
        degrees,
        mirrored,
    )
    return paint_drawing(drawing, extent)


def choose_items(rng: np.random.Generator) -> list[Item]:
    """Objects for a scene, the rearmost first; often several of one class."""
    count = MIN_OBJECTS + choose(rng, COUNT_SHARES)
    categories = [CATEGORIES[k] for k in rng.permutation(len(CATEGORIES))[:count]]
    copies = choose_copies(rng, count, NO_COPIES_SHARE)
    shared_colour = pick(rng, list(COLOURS)) if rng.random() < SHARED_COLOUR_SHARE else None
    occlusion: dict[int, Occlusion] = {}
    if rng.random() < HIDDEN_AND_FREE_SHARE:
        occlusion = dict(zip(copies, ("hidden", "free"), strict=False))

    items: list[Item] = []
    for k in range(count):
        category = categories[0] if k in copies else categories[k]
        attributes = _choose_attributes(rng, category, items, k in copies, shared_colour)
        items.append(Item(category, attributes, occlusion.get(k, "any")))
    return items


def _choose_attributes(
    rng: np.random.Generator,
    category: str,
    items: list[Item],
    is_copy: bool,
    shared_colour: str | None,
) -> dict[str, str]:
    """A colour and a pattern that no item of the category has in common.

    Copies also differ in colour alone, unless they share one.
    """
    while True:
        colour = pick(rng, list(COLOURS))
        if is_copy and shared_colour:
            colour = shared_colour
        elif is_copy and (category, colour) in [
            (item.category, item.attributes["colour"]) for item in items
        ]:
            continue

        attributes = {"colour": colour, "pattern": PATTERNS[choose(rng, PATTERN_SHARES)]}
        if (category, attributes) not in [(item.category, item.attributes) for item in items]:
            return attributes


def choose_copies(rng: np.random.Generator, count: int, no_copies_share: float) -> list[int]:
    """Which of `count` objects are of one class, 0 among them; none in a share of the scenes."""
    if rng.random() < no_copies_share:
        return []
    num_copies = 2 if count < 4 or rng.random() < 0.65 else 3
    others = 1 + rng.permutation(count - 1)[: num_copies - 1]
    return [0, *sorted(others.tolist())]
