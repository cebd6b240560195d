"""Drawn scenes: pictures of everyday objects that hide one another, with exact modal and amodal masks.

`draw_scene` gives the same bytes for the same arguments in every process. Its layout is made for 96 by 96 pixels and is
then scaled, so that it is the same at every size.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.cache import fingerprint
from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.errors import InputError
from r2sm_jax.query import MaskType, Query
from r2sm_jax.synthetic.queries.nouns import display_name
from r2sm_jax.synthetic.queries.objects import ObjectFacts
from r2sm_jax.synthetic.queries.write import (
    ABSENT_SPLIT,
    QUERY_STRIDE,
    SPLIT_STRIDE,
    SPLITS,
    TEST_SPLIT,
    write_queries,
)
from r2sm_jax.synthetic.random_choice import pick
from r2sm_jax.synthetic.scenes.drawings import CATEGORIES, draw_category
from r2sm_jax.synthetic.scenes.layout import Item, Layout, Placed, Rules, whole_mask
from r2sm_jax.synthetic.scenes.paint import (
    COLOURS,
    PATTERNS,
    Sprite,
    draw_backdrop,
    make_figure,
    paint_figure,
    paint_lit,
)

UNIT = 96  # layout units along a side
TILT = {
    "butterfly": 45,
    "kite": 40,
    "rocket": 50,
    "fish": 25,
    "apple": 25,
    "ice cream": 30,
    "shirt": 25,
}
TILT |= dict.fromkeys(
    ("pencil", "key", "scissors", "hammer", "banana", "book", "envelope", "ball"), 180
)
LONG = {
    "bottle": 1.15,
    "wine glass": 1.15,
    "pencil": 1.25,
    "key": 1.1,
    "hammer": 1.1,
    "banana": 1.1,
}
VOCABULARY = {"category": CATEGORIES, "colour": tuple(COLOURS), "pattern": PATTERNS}
SMALLEST_SIDE = 16  # pixels; at 8 a drawing can vanish
FEWEST = 3
COUNT_SHARES = np.cumsum((0.12, 0.22, 0.26, 0.19, 0.13, 0.08))  # of 3, 4, .. 8 objects
PATTERN_SHARES = np.cumsum((0.46, 0.2, 0.18, 0.16))
HIDING_SHARE = 0.01  # one object hides another from this share of the other's complete mask on
RULES = Rules(
    hidden=(0.05, 0.8),
    tolerance=0.05,
    directions=5,
    whole=False,
    smallest_area=40,
    smallest_share=0.17,
    loss_of_free=0.03,
)


@dataclass(frozen=True)
class Scene:
    """A picture `uint8 [H W 3]`, its objects, and what the query grammar is told about each. Coordinates are pixels."""

    image: np.ndarray
    instances: tuple[Instance, ...]
    facts: tuple[ObjectFacts, ...]


def annotate(canvas: Image.Image, placed: Sequence[Placed], sprites: Sequence[Sprite]) -> Scene:
    """The scene on a canvas (mode RGB), with exact masks; ids run from left to right.

    `placed` and `sprites`, their pictures in place, have the rearmost object first. An object is said to hide another
    where it covers at least 1 % (and 4 pixels) of the other's complete mask.
    """
    count, shape = len(placed), (canvas.height, canvas.width)
    amodal = [whole_mask(sprite, shape) for sprite in sprites]
    ranked = sorted(range(count), key=lambda k: (placed[k].x, placed[k].y, k))
    ids = {k: rank for rank, k in enumerate(ranked, start=1)}
    instances, facts = [], []
    for k in ranked:
        item, whole = placed[k].item, amodal[k]
        least = max(4, 0.01 * masks.area(whole))
        hidden_by = [ids[j] for j in range(k + 1, count) if masks.area(amodal[j] & whole) >= least]
        modal = whole & ~np.any(amodal[k + 1 :], axis=0)
        instances.append(Instance(ids[k], item.category, modal, whole, item.attributes))
        facts.append(_facts(instances[-1], item.category, sorted(hidden_by), item.uses, item.ideas))
    return Scene(np.array(canvas), tuple(instances), tuple(facts))


def _facts(
    instance: Instance,
    name: str,
    hidden_by: Iterable[int],
    uses: tuple[str, ...] = (),
    ideas: tuple[str, ...] = (),
) -> ObjectFacts:
    areas, words = instance.convert(masks.area), instance.attributes
    hidden = float("nan") if areas.amodal is None else 1 - areas.modal / areas.amodal
    return ObjectFacts(
        instance.id,
        name,
        masks.box(instance.complete),
        areas.complete,
        hidden,
        tuple(hidden_by),
        words.get("colour"),
        words.get("pattern"),
        masks.box(instance.modal),
        uses,
        ideas,
    )


def describe_objects(instances: Sequence[Instance]) -> list[ObjectFacts]:
    """What the grammar is told about every instance that is visible.

    The hidden share is not a number where the amodal mask is not known, so that no query relies on it.
    """
    found = []
    for instance in instances:
        if not instance.modal.any():
            continue
        hidden = instance.complete & ~instance.modal
        x0, y0, x1, y1 = masks.box(hidden)
        window, least = np.s_[y0:y1, x0:x1], max(1.0, HIDING_SHARE * masks.area(instance.complete))
        hidden_by = [
            o.id for o in instances if masks.area(hidden[window] & o.modal[window]) >= least
        ]  # never itself
        found.append(_facts(instance, display_name(instance.category), hidden_by))
    return found


def unaskable(
    instances: Sequence[Instance], background: Iterable[int] = ()
) -> dict[MaskType, set[int]]:
    """The objects that no query of a type may mean: `background` and ignored ones, and for amodal queries also those
    whose complete mask is not known. The grammar sees them all the same, so that no phrase fits one of them too."""
    ignored = {*background, *(i.id for i in instances if i.ignore)}
    return {"modal": ignored, "amodal": ignored | {i.id for i in instances if i.amodal is None}}


def draw_scene(seed: int, index: int, size: int = UNIT) -> Scene:
    """Scene number `index` of the endless series `seed`, painted at `size` by `size` pixels."""
    rng = np.random.default_rng((seed, index))
    canvas = draw_backdrop(rng, size)
    placed = arrange_drawings(rng)
    scale = size / UNIT
    sprites = [p.in_place(scale) for p in placed]
    for sprite in sprites:
        paint_lit(canvas, sprite, scale)
    return annotate(canvas, placed, sprites)


def arrange_drawings(rng: np.random.Generator) -> list[Placed]:
    """Objects in their places, so that about half of them end up partly hidden."""
    while True:
        items = choose_items(rng)
        layout = Layout((UNIT, UNIT), RULES)
        medium = rng.uniform(42, 50) - 1.8 * max(0, len(items) - 4)
        for item in items:
            layout.add(rng, item, medium, lambda extent, item=item: draw_object(rng, item, extent))
        if len(layout.placed) >= FEWEST:
            return layout.placed


def draw_object(rng: np.random.Generator, item: Item, extent: float) -> Sprite:
    """A drawing of an item of one of the `CATEGORIES`, its longer side about `extent` units, at 1 pixel per unit."""
    extent = float(np.clip(extent * LONG.get(item.category, 1), 27, 56))
    tilt = TILT.get(item.category, 16)
    drawing = draw_category(item.category, rng)
    degrees, mirror = float(rng.uniform(-tilt, tilt)), bool(rng.random() < 0.5)
    colour, pattern = item.attributes["colour"], item.attributes["pattern"]
    return paint_figure(make_figure(rng, drawing, colour, pattern, extent, degrees, mirror), extent)


def choose_items(rng: np.random.Generator) -> list[Item]:
    """Objects for a scene, the rearmost first; often several of one class."""
    count = FEWEST + choose(rng, COUNT_SHARES)
    names = [CATEGORIES[k] for k in rng.permutation(len(CATEGORIES))[:count]]
    copies = choose_copies(rng, count, none=0.36)
    shared_colour = pick(rng, list(COLOURS)) if rng.random() < 0.2 else None
    wanted = dict(zip(copies, ("hidden", "free"), strict=False)) if rng.random() < 0.75 else {}
    items: list[Item] = []
    for k in range(count):
        category = names[0 if k in copies else k]
        while True:
            colour = pick(rng, list(COLOURS))
            if k in copies and shared_colour:
                colour = shared_colour
            elif k in copies and (category, colour) in [
                (i.category, i.attributes["colour"]) for i in items
            ]:
                continue
            attributes = {"colour": colour, "pattern": PATTERNS[choose(rng, PATTERN_SHARES)]}
            if (category, attributes) not in [(i.category, i.attributes) for i in items]:
                break
        items.append(Item(category, attributes, wanted.get(k, "any")))
    return items


def choose(rng: np.random.Generator, cumulative: np.ndarray) -> int:
    """A random position, given the cumulative shares of all of them."""
    return int(np.searchsorted(cumulative[:-1], rng.random(), "right"))


def choose_copies(rng: np.random.Generator, count: int, none: float) -> list[int]:
    """Which of `count` objects are of one class, 0 among them; none in a share `none` of the scenes."""
    if rng.random() < none:
        return []
    copies = 2 if count < 4 or rng.random() < 0.65 else 3
    return [0, *sorted((1 + rng.permutation(count - 1)[: copies - 1]).tolist())]


class ProceduralSource(ABC):
    """Scenes that are made when they are asked for: any sample is rebuilt from (seed, split, index)."""

    vocabulary: dict[str, tuple[str, ...]]
    files: tuple[Path, ...] = ()
    """Those that the samples are made of."""
    splits: tuple[str, ...] = tuple(
        split for split in SPLITS if split not in (ABSENT_SPLIT, TEST_SPLIT)
    )

    def __init__(self, split: str, count: int, *, seed: int = 0, size: int = 96, queries: int = 8):
        """`count` scenes of `size` by `size` pixels, each with up to `queries` queries.

        Raises InputError for a split that it does not have, and a size below `SMALLEST_SIDE`.
        """
        if size < SMALLEST_SIDE:
            raise InputError(
                f"pictures of {size} pixels are too small to hold objects; give {SMALLEST_SIDE} or more"
            )
        if split not in self.splits:
            raise InputError(
                f"--split {split!r}: these data have the splits {', '.join(self.splits)}"
            )
        self.split, self.count, self.seed, self.size, self.queries = (
            split,
            count,
            seed,
            size,
            queries,
        )

    @abstractmethod
    def scene(self, number: int) -> Scene:
        """The scene of a number that no other scene of any split has."""

    def fingerprint(self) -> str:
        """Changes with all that the samples depend on but their number."""
        options = (
            type(self).__name__,
            self.split,
            self.seed,
            self.size,
            self.queries,
            sorted(self.vocabulary.items()),
        )
        return fingerprint(self.files, *options)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        """Scene `index` with its queries. Raises IndexError from `count` on."""
        if not 0 <= index < self.count:
            raise IndexError(index)
        number = list(SPLITS).index(self.split) * SPLIT_STRIDE + index
        scene = self.scene(number)
        rng = np.random.default_rng((self.seed, number, 1))
        queries = self.write(scene, rng, QUERY_STRIDE * number)
        return Sample(
            number, f"{self.split}_{index:06d}.png", scene.image, scene.instances, queries
        )

    def write(self, scene: Scene, rng: np.random.Generator, first_id: int) -> tuple[Query, ...]:
        """The queries about a scene, numbered from `first_id` + 1."""
        return write_queries(
            scene.facts,
            rng=rng,
            count=self.queries,
            split=SPLITS[self.split],
            first_id=first_id,
            forbidden=unaskable(scene.instances),
        )

    def queries_at(self, index: int) -> tuple[Query, ...]:
        """The queries of scene `index`."""
        return self[index].queries


class SceneSource(ProceduralSource):
    """Drawn scenes."""

    splits = (*ProceduralSource.splits, TEST_SPLIT)
    vocabulary = VOCABULARY

    def scene(self, number: int) -> Scene:
        return draw_scene(self.seed, number, self.size)
