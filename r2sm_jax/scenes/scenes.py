"""Procedural pictures of everyday objects that hide one another, with exact modal and amodal masks.

`draw_scene(seed, index)` is a pure function: the same arguments give the same bytes in every process. The
layout is decided at 96 pixels, in units of 1/96 of the picture's side, and is the same at every size.
"""

from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageFilter

from r2sm_jax.data import masks
from r2sm_jax.data.samples import Instance, Sample
from r2sm_jax.queries.objects import ObjectFacts
from r2sm_jax.queries.write import QUERY_STRIDE, SPLIT_STRIDE, SPLITS, write_queries
from r2sm_jax.query import Query
from r2sm_jax.scenes import creatures as drawings_creatures, things as drawings_things
from r2sm_jax.scenes.backdrop import Backdrop
from r2sm_jax.scenes.shapes import COLOURS, PATTERNS, Figure, Sprite, make_figure, paint, pick

__all__ = ["CATEGORIES", "COLOURS", "PATTERNS", "Scene", "SceneObject", "SceneSource", "draw_scene", "things"]

DRAWINGS = drawings_things.DRAWINGS | drawings_creatures.DRAWINGS
CATEGORIES: tuple[str, ...] = tuple(DRAWINGS)
UNIT = 96  # layout units along a side
TILT = dict.fromkeys(("pencil", "key", "scissors", "hammer", "banana", "book", "envelope", "ball"), 180) | {
    "butterfly": 45,
    "kite": 40,
    "rocket": 50,
    "fish": 25,
    "apple": 25,
    "ice cream": 30,
    "shirt": 25,
}
LONG = {"bottle": 1.15, "wine glass": 1.15, "pencil": 1.25} | dict.fromkeys(("key", "hammer", "banana"), 1.1)
FEWEST = 3
COUNT_SHARES = np.cumsum((0.12, 0.22, 0.26, 0.19, 0.13, 0.08))  # of 3, 4, .. 8 objects
PATTERN_SHARES = np.cumsum((0.46, 0.2, 0.18, 0.16))
SMALLEST_SHARE, SMALLEST_AREA = 0.17, 40  # of an object that stay visible; the area in square units


@dataclass(frozen=True)
class SceneObject:
    """One object; its masks are `bool [H W]`. `order` 1 is frontmost.

    `hidden_by` are the ids of the objects in front of it that cover at least 1 % (and 4 pixels) of `amodal`.
    """

    id: int
    category: str
    colour: str
    pattern: str
    order: int
    modal: np.ndarray
    amodal: np.ndarray
    hidden_by: tuple[int, ...]

    @property
    def occlusion(self) -> float:
        """The hidden share of the object, 0..1."""
        return 1 - np.count_nonzero(self.modal) / np.count_nonzero(self.amodal)


@dataclass(frozen=True)
class Scene:
    """A picture `uint8 [H W 3]` and its objects in the order of their ids."""

    image: np.ndarray
    objects: tuple[SceneObject, ...]


@dataclass(frozen=True)
class Kind:
    """What an object is to be before it has a place. `role`: hide it, keep it free, or as it comes."""

    category: str
    colour: str
    pattern: str
    role: str = "any"


@dataclass(frozen=True)
class Thing:
    """An object that has no place yet: its longer side in units, and its picture at 1 pixel per unit."""

    kind: Kind
    figure: Figure
    extent: float
    sprite: Sprite


@dataclass(frozen=True)
class Placed:
    """A thing and where its centre is, in layout units. `on_top`: it was put there to hide another."""

    thing: Thing
    x: int
    y: int
    on_top: bool


def draw_scene(seed: int, index: int, size: int = UNIT) -> Scene:
    """Scene number `index` of the endless series `seed`, painted at `size` by `size` pixels."""
    rng = np.random.default_rng((seed, index))
    backdrop = Backdrop.sample(rng)
    placed = arrange(rng)
    scale = size / UNIT
    if size == UNIT:
        sprites = [replace(p.thing.sprite, x=p.thing.sprite.x + p.x, y=p.thing.sprite.y + p.y) for p in placed]
    else:
        sprites = [paint(p.thing.figure, scale, p.x * scale, p.y * scale) for p in placed]
    canvas = backdrop.paint(size)
    for sprite in sprites:
        compose(canvas, sprite, scale)
    return Scene(np.array(canvas), annotate(placed, sprites, size))


class SceneSource:
    """Procedural scenes: any sample is rebuilt from (seed, split, index)."""

    def __init__(self, split: str, count: int, *, seed: int = 0, size: int = 96, queries: int = 8):
        self.vocabulary = {"category": CATEGORIES, "colour": tuple(COLOURS), "pattern": PATTERNS}
        self.split, self.count, self.seed, self.size, self.queries = split, count, seed, size, queries

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.count:
            raise IndexError(index)
        number = list(SPLITS).index(self.split) * SPLIT_STRIDE + index
        scene = draw_scene(self.seed, number, self.size)
        rng = np.random.default_rng((self.seed, number, 1))
        queries = write_queries(
            things(scene), rng=rng, count=self.queries, split=SPLITS[self.split], first_id=QUERY_STRIDE * number
        )
        instances = tuple(
            Instance(o.id, o.category, o.modal, o.amodal, {"colour": o.colour, "pattern": o.pattern})
            for o in scene.objects
        )
        return Sample(number, f"{self.split}_{index:06d}.png", scene.image, instances, queries)

    def queries_at(self, index: int) -> tuple[Query, ...]:
        return self[index].queries


def things(scene: Scene) -> list[ObjectFacts]:
    """What the query grammar is told about a scene. Coordinates are pixels."""
    return [
        ObjectFacts(o.id, o.category, masks.box(o.amodal), float(o.amodal.sum()), o.occlusion, o.hidden_by,
              o.colour, o.pattern, masks.box(o.modal))
        for o in scene.objects
    ]  # fmt: skip


def annotate(placed: list[Placed], sprites: list[Sprite], size: int) -> tuple[SceneObject, ...]:
    """The objects with their masks. Both lists run from the back to the front; ids run from left to right."""
    count = len(placed)
    amodal = np.zeros((count, size, size), bool)
    for k, sprite in enumerate(sprites):
        there, here = overlap(sprite, size)
        amodal[k][there] = sprite.mask[here]
    covered = np.zeros((size, size), bool)
    modal = np.empty_like(amodal)
    for k in reversed(range(count)):
        modal[k] = amodal[k] & ~covered
        covered |= amodal[k]
    ranked = sorted(range(count), key=lambda k: (placed[k].x, placed[k].y, k))
    ids = {k: rank + 1 for rank, k in enumerate(ranked)}
    objects = []
    for k in ranked:
        whole = amodal[k]
        least = max(4, 0.01 * np.count_nonzero(whole))
        fronts = [j for j in range(k + 1, count) if np.count_nonzero(amodal[j] & whole) >= least]
        hidden_by = tuple(sorted(ids[j] for j in fronts))
        kind = placed[k].thing.kind
        what = kind.category, kind.colour, kind.pattern
        objects.append(SceneObject(ids[k], *what, count - k, modal[k], whole, hidden_by))
    return tuple(objects)


# ---------------------------------------------------------------------------------------------- layout


def draw(rng: np.random.Generator, cumulative: np.ndarray) -> int:
    """A random position, given the cumulative shares of all of them."""
    return min(int(np.searchsorted(cumulative, rng.random(), "right")), len(cumulative) - 1)


def choose_kinds(rng: np.random.Generator) -> list[Kind]:
    """What is to be in the scene, in the order of placing, the back first; often several of one class."""
    count = FEWEST + draw(rng, COUNT_SHARES)
    names = [CATEGORIES[k] for k in rng.permutation(len(CATEGORIES))[:count]]
    copies = 0 if rng.random() < 0.36 else 2 if count < 4 or rng.random() < 0.65 else 3
    slots = [0, *sorted((1 + rng.permutation(count - 1)[: copies - 1]).tolist())] if copies else []
    colours = list(COLOURS)
    twin = pick(rng, colours) if rng.random() < 0.2 else None
    mixed = rng.random() < 0.75
    kinds: list[Kind] = []
    taken: set[tuple[str, str, str]] = set()
    for k in range(count):
        copied = k in slots
        category = names[0 if copied else k]
        while True:
            colour = pick(rng, colours)
            if copied and twin:
                colour = twin
            elif copied and any(kind.category == category and kind.colour == colour for kind in kinds):
                continue
            pattern = PATTERNS[draw(rng, PATTERN_SHARES)]
            if (category, colour, pattern) not in taken:
                break
        taken.add((category, colour, pattern))
        role = {0: "hide", 1: "free"}.get(slots.index(k), "any") if copied and mixed else "any"
        kinds.append(Kind(category, colour, pattern, role))
    return kinds


def arrange(rng: np.random.Generator) -> list[Placed]:
    """Places objects, each in front of those before it, so that about half of them end up occluded."""
    while True:
        kinds = choose_kinds(rng)
        table = Table()
        medium = rng.uniform(42, 50) - 1.8 * max(0, len(kinds) - 4)
        for k, kind in enumerate(kinds):
            victim = table.pick_victim(rng) if k and rng.random() < 0.92 else None
            target = rng.uniform(0.05, 0.8)
            extent = medium * rng.uniform(0.78, 1.22)
            if victim is not None:
                extent = table.placed[victim].thing.extent * rng.uniform(0.75, 1.1) * (0.85 + 0.35 * target)
            extent = float(np.clip(extent * LONG.get(kind.category, 1), 27, 56))
            tilt = TILT.get(kind.category, 16)
            drawing = DRAWINGS[kind.category](rng)
            degrees, mirror = float(rng.uniform(-tilt, tilt)), bool(rng.random() < 0.5)
            figure = make_figure(rng, drawing, kind.colour, kind.pattern, extent, degrees, mirror)
            thing = Thing(kind, figure, extent, paint(figure, 1.0, 0.0, 0.0))
            if victim is None or not table.put_over(rng, thing, victim, target):
                table.put_free(rng, thing)
        if len(table.placed) >= FEWEST:
            return table.placed


class Table:
    """The layout so far: which object is seen where, and how much of each is left."""

    def __init__(self) -> None:
        self.placed: list[Placed] = []
        self.owner = np.zeros((UNIT, UNIT), np.int64)  # 0 nothing, k + 1 object k
        self.area: list[int] = []
        self.seen: list[int] = []

    def occlusion(self, k: int) -> float:
        return 1 - self.seen[k] / self.area[k]

    def pick_victim(self, rng: np.random.Generator) -> int | None:
        """An object that is free and may be hidden: one meant to be, else one that hides none, else any."""
        free = [k for k, p in enumerate(self.placed) if p.thing.kind.role != "free" and self.occlusion(k) < 0.04]
        wanted = [k for k in free if self.placed[k].thing.kind.role == "hide"]
        alone = [k for k in free if not self.placed[k].on_top]
        choice = wanted or alone or (free if rng.random() < 0.2 else [])
        return pick(rng, choice) if choice else None

    def covered(self, sprite: Sprite, x: int, y: int) -> tuple[np.ndarray, int]:
        """How many visible pixels of each object the sprite would cover, `[n]`, and how many it has."""
        there, here = overlap(sprite, UNIT, x, y)
        under = self.owner[there][sprite.mask[here]]
        return np.bincount(under, minlength=len(self.placed) + 1)[1:], under.size

    def put_free(self, rng: np.random.Generator, thing: Thing) -> bool:
        """Places the sprite where it covers nothing, if a dozen tries find such a place."""
        sprite = thing.sprite
        area = np.count_nonzero(sprite.mask)
        reach_y, reach_x = sprite.mask.shape[0] / 2 - 1, sprite.mask.shape[1] / 2 - 1
        low, high = (reach_x, reach_y), (UNIT - reach_x, UNIT - reach_y)
        spots = rng.uniform(low, high, (16, 2)).astype(int).tolist()
        far = [min((abs(x - p.x) + abs(y - p.y) for p in self.placed), default=0) for x, y in spots]
        for k in sorted(range(16), key=far.__getitem__, reverse=True):
            there, here = overlap(sprite, UNIT, *spots[k])
            under = self.owner[there][sprite.mask[here]]
            if under.size > 0.95 * area and not under.any():
                self.put(Placed(thing, *spots[k], on_top=False))
                return True
        return False

    def put_over(self, rng: np.random.Generator, thing: Thing, victim: int, target: float) -> bool:
        """Places the sprite over the victim so that about the share `target` of it is hidden."""
        area = np.count_nonzero(thing.sprite.mask)
        below = self.placed[victim]
        best, error = None, 0.12
        for _ in range(5):
            angle = rng.uniform(0, 2 * np.pi)
            dx, dy = np.cos(angle), np.sin(angle)
            near, far = 0.0, (thing.extent + below.thing.extent) * 0.62
            for _ in range(6):
                distance = (near + far) / 2
                x, y = int(below.x + dx * distance), int(below.y + dy * distance)
                covered, inside = self.covered(thing.sprite, x, y)
                share = 1 - (self.seen[victim] - covered[victim]) / self.area[victim]
                better = abs(share - target) < error and inside > 0.93 * area
                if better and self.leaves_enough(covered, victim):
                    best, error = (x, y), abs(share - target)
                    if error < 0.05:
                        break
                near, far = (distance, far) if share > target else (near, distance)
            if error < 0.05:
                break
        if best is None:
            return False
        self.put(Placed(thing, *best, on_top=True))
        return True

    def leaves_enough(self, covered: np.ndarray, victim: int) -> bool:
        """Whether every object stays recognisable, and those other than the victim much as they were."""
        for k, lost in enumerate(covered.tolist()):
            if not lost:
                continue
            left = self.seen[k] - lost
            if left < max(SMALLEST_AREA, SMALLEST_SHARE * self.area[k]):
                return False
            limit = 0.03 if self.placed[k].thing.kind.role == "free" else 0.3
            if k != victim and lost > limit * self.area[k]:
                return False
        return True

    def put(self, placed: Placed) -> None:
        there, here = overlap(placed.thing.sprite, UNIT, placed.x, placed.y)
        mask = placed.thing.sprite.mask[here]
        seen = self.owner[there]
        for k, lost in enumerate(np.bincount(seen[mask], minlength=len(self.placed) + 1)[1:].tolist()):
            self.seen[k] -= lost
        seen[mask] = len(self.placed) + 1
        self.area.append(int(np.count_nonzero(mask)))
        self.seen.append(self.area[-1])
        self.placed.append(placed)


# ---------------------------------------------------------------------------------------------- painting


Slices = tuple[slice, slice]
SHADOW = (30, 22, 44)
SHADOW_DEPTH = [int(0.46 * k) for k in range(256)]


def overlap(sprite: Sprite, size: int, x: int = 0, y: int = 0) -> tuple[Slices, Slices]:
    """Where the sprite, moved by (x, y), lies in a picture: slices into the picture and into the sprite."""
    height, width = sprite.mask.shape
    x, y = x + sprite.x, y + sprite.y
    x0, y0 = max(x, 0), max(y, 0)
    x1, y1 = max(x0, min(x + width, size)), max(y0, min(y + height, size))
    return (slice(y0, y1), slice(x0, x1)), (slice(y0 - y, y1 - y), slice(x0 - x, x1 - x))


def compose(canvas: Image.Image, sprite: Sprite, scale: float) -> None:
    """Paints the sprite, lit from the upper left and with its shadow, on the canvas (mode RGB)."""
    shift, pad = max(1, round(1.3 * scale)), round(6 * scale)
    height, width = sprite.mask.shape
    alpha = Image.new("L", (width + 2 * pad, height + 2 * pad))
    cover = sprite.image.getchannel("A")
    alpha.paste(cover, (pad, pad))
    soft = alpha.filter(ImageFilter.GaussianBlur(1.7 * scale))
    canvas.paste(SHADOW, (sprite.x - pad + shift, sprite.y - pad + 2 * shift), soft.point(SHADOW_DEPTH))
    corner = sprite.x, sprite.y
    canvas.paste(sprite.image, corner, sprite.image)

    near = np.asarray(soft, np.float32)
    edge = near[pad : pad + height, pad : pad + width]
    lower = near[pad + shift : pad + shift + height, pad + shift : pad + shift + width]
    upper = near[pad - shift : pad - shift + height, pad - shift : pad - shift + width]
    light = (0.22 * edge + 0.26 * (lower - upper) - 50) * (np.asarray(cover, np.float32) * (1 / 255))
    canvas.paste(SHADOW, corner, Image.fromarray(np.maximum(-light, 0).astype(np.uint8)))
    canvas.paste((255, 255, 255), corner, Image.fromarray(np.maximum(light, 0).astype(np.uint8)))
