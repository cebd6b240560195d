"""Lays pictures of single objects over one another so that about half are partly hidden, and paints them.

The layout works on the final masks, so that occlusion is exact at any size. Every object lies wholly inside
the picture and is either free or hidden by a share between `LEAST` and `MOST`, which is spread evenly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool
from PIL import Image, ImageFilter

from r2sm_jax.data import masks
from r2sm_jax.data.samples import Instance
from r2sm_jax.queries.objects import ObjectFacts
from r2sm_jax.scenes.shapes import Sprite, pick

LEAST, MOST = 0.05, 0.8  # hidden share of an object that is not free
SIDE_EFFECT = 0.3  # share that an object may lose to one that is put over another
SMALLEST_AREA = 0.004  # what stays visible of any object, as a share of the picture
SMALLEST, LARGEST = 0.26, 0.6  # longer side of an object, in sides of the picture
TILT = 25.0  # degrees
FAINT = 16  # alpha from which a pixel belongs to the picture of an object
OPAQUE = 128  # alpha from which a pixel belongs to its mask
SHADOW = (24, 20, 32)


@dataclass(frozen=True)
class Item:
    """An object without a place: what it is, its picture (mode RGBA), its role, and what may be said of it.

    `role`: "hide" it if possible, keep it "free", or "any". `uses` and `ideas`: as of a `ObjectFacts`.
    """

    category: str
    attributes: Mapping[str, str]
    picture: Image.Image
    role: str = "any"
    uses: tuple[str, ...] = ()
    ideas: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placed:
    """An item in its place. `extent` is its nominal size in pixels; `on_top`: it was put there to hide another."""

    item: Item
    sprite: Sprite
    extent: float
    on_top: bool


def fill(picture: Image.Image) -> float:
    """The share of the square around a picture that its mask covers."""
    return np.count_nonzero(opaque(picture)) / max(picture.size) ** 2


def opaque(picture: Image.Image) -> Bool[np.ndarray, "h w"]:
    """The mask of a picture (mode RGBA): alpha above one half."""
    return np.asarray(picture.getchannel("A")) >= OPAQUE


def crop(picture: Image.Image) -> Image.Image:
    """The part of a picture (mode RGBA) that is not (nearly) transparent; all of it where everything is."""
    box = picture.getchannel("A").point([0] * FAINT + [255] * (256 - FAINT)).getbbox()
    return picture.crop(box) if box else picture


def arrange(rng: np.random.Generator, items: Sequence[Item], size: int) -> list[Placed]:
    """Places items in a picture of `size` by `size`, each in front of those before it.

    An item that finds no place is left out.
    """
    layout = Layout(size)
    medium = size * (rng.uniform(0.44, 0.52) - 0.019 * max(0, len(items) - 4))
    for item in items:
        victim = layout.pick_victim(rng) if rng.random() < 0.92 else None
        target = rng.uniform(LEAST + 0.01, MOST)
        extent = medium * rng.uniform(0.78, 1.22)
        if victim is not None:
            extent = layout.placed[victim].extent * rng.uniform(0.75, 1.1) * (0.85 + 0.35 * target)
        sprite = make_sprite(rng, item.picture, extent, size)
        if victim is None or not layout.put_over(rng, Placed(item, sprite, extent, True), victim, target):
            layout.put_free(rng, Placed(item, sprite, extent, False))
    return layout.placed


def make_sprite(rng: np.random.Generator, picture: Image.Image, extent: float, size: int) -> Sprite:
    """The picture turned a little, perhaps mirrored, and scaled; slender ones are made longer than `extent`."""
    longer = extent * float(np.clip((0.45 / max(fill(picture), 1e-3)) ** 0.25, 0.85, 1.35))
    longer = float(np.clip(longer, SMALLEST * size, LARGEST * size))
    if rng.random() < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    picture = crop(picture.rotate(rng.uniform(-TILT, TILT), Image.Resampling.BICUBIC, expand=True))
    scale = longer / max(picture.size)
    width, height = (max(1, round(side * scale)) for side in picture.size)
    picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    return Sprite(picture, opaque(picture), 0, 0)


class Layout:
    """The objects so far: which one is seen where, and how much of each is left."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.placed: list[Placed] = []
        self.owner = np.zeros((size, size), np.int64)  # 0 nothing, k + 1 object k
        self.area: list[int] = []
        self.seen: list[int] = []

    def hidden(self, k: int, lost: int = 0) -> float:
        """The hidden share of object k, once `lost` more of its pixels are covered."""
        return 1 - (self.seen[k] - lost) / self.area[k]

    def pick_victim(self, rng: np.random.Generator) -> int | None:
        """An object that is free and may be hidden: one meant to be, else one that hides none, else any."""
        free = [k for k, p in enumerate(self.placed) if p.item.role != "free" and self.seen[k] == self.area[k]]
        wanted = [k for k in free if self.placed[k].item.role == "hide"]
        alone = [k for k in free if not self.placed[k].on_top]
        choice = wanted or alone or (free if rng.random() < 0.2 else [])
        return pick(rng, choice) if choice else None

    def under(self, sprite: Sprite) -> np.ndarray:
        """What the sprite lies on, pixel by pixel: 0 nothing, k + 1 object k."""
        return self.owner[window(sprite)][sprite.mask]

    def put_free(self, rng: np.random.Generator, placed: Placed) -> bool:
        """Places an object where it covers nothing, if one of 16 tries finds such a place."""
        sprite = placed.sprite
        if np.count_nonzero(sprite.mask) < SMALLEST_AREA * self.size**2:
            return False
        height, width = sprite.mask.shape
        spots = rng.integers(0, (self.size - width + 1, self.size - height + 1), (16, 2))
        corners = np.array([(p.sprite.x, p.sprite.y) for p in self.placed]).reshape(-1, 1, 2)
        far = np.abs(spots - corners).sum(2).min(0, initial=2 * self.size)
        for x, y in spots[np.argsort(-far, kind="stable")].tolist():
            there = replace(sprite, x=x, y=y)
            if not self.under(there).any():
                self.put(replace(placed, sprite=there))
                return True
        return False

    def put_over(self, rng: np.random.Generator, placed: Placed, victim: int, target: float) -> bool:
        """Places an object over the victim so that about the share `target` of it is hidden."""
        sprite, below = placed.sprite, self.placed[victim].sprite
        if np.count_nonzero(sprite.mask) < SMALLEST_AREA * self.size**2:
            return False
        (height, width), (tall, wide) = sprite.mask.shape, below.mask.shape
        centre_x, centre_y = below.x + (wide - width) / 2, below.y + (tall - height) / 2
        best, error = None, 0.12
        for _ in range(6):
            angle = rng.uniform(0, 2 * np.pi)
            near, far = 0.0, (max(height, width) + max(tall, wide)) * 0.62
            for _ in range(6):
                distance = (near + far) / 2
                x = min(max(round(centre_x + np.cos(angle) * distance), 0), self.size - width)
                y = min(max(round(centre_y + np.sin(angle) * distance), 0), self.size - height)
                there = replace(sprite, x=x, y=y)
                covered = np.bincount(self.under(there), minlength=len(self.placed) + 1)[1:].tolist()
                share = self.hidden(victim, covered[victim])
                if abs(share - target) < error and self.allows(covered, victim):
                    best, error = there, abs(share - target)
                    if error < 0.04:
                        break
                near, far = (distance, far) if share > target else (near, distance)
            if error < 0.04:
                break
        if best is None:
            return False
        self.put(replace(placed, sprite=best))
        return True

    def allows(self, covered: Sequence[int], victim: int) -> bool:
        """Whether every object stays recognisable, and those other than the victim much as they were."""
        for k, lost in enumerate(covered):
            if not lost:
                continue
            if self.placed[k].item.role == "free" or not LEAST <= self.hidden(k, lost) <= MOST:
                return False
            if self.seen[k] - lost < SMALLEST_AREA * self.size**2 or (
                k != victim and lost > SIDE_EFFECT * self.area[k]
            ):
                return False
        return True

    def put(self, placed: Placed) -> None:
        sprite = placed.sprite
        for k, lost in enumerate(np.bincount(self.under(sprite), minlength=len(self.placed) + 1)[1:].tolist()):
            self.seen[k] -= lost
        self.placed.append(placed)
        self.owner[window(sprite)][sprite.mask] = len(self.placed)
        self.area.append(int(np.count_nonzero(sprite.mask)))
        self.seen.append(self.area[-1])


def window(sprite: Sprite) -> tuple[slice, slice]:
    """Where a sprite lies in the picture: rows and columns."""
    height, width = sprite.mask.shape
    return slice(sprite.y, sprite.y + height), slice(sprite.x, sprite.x + width)


def paint(rng: np.random.Generator, canvas: Image.Image, placed: Sequence[Placed]) -> None:
    """Blends the objects, from the back to the front, into the canvas (mode RGB), with soft shadows or without."""
    depth = rng.uniform(0.15, 0.5) if rng.random() < 0.7 else 0.0
    shade = [int(depth * k) for k in range(256)]
    blur = 0.018 * canvas.width
    shift_x, shift_y, pad = round(rng.uniform(-1, 1) * blur), round(blur), int(3 * blur) + 1
    for sprite in (p.sprite for p in placed):
        if depth:
            soft = Image.new("L", (sprite.image.width + 2 * pad, sprite.image.height + 2 * pad))
            soft.paste(sprite.image.getchannel("A"), (pad, pad))
            soft = soft.filter(ImageFilter.GaussianBlur(blur)).point(shade)
            canvas.paste(SHADOW, (sprite.x - pad + shift_x, sprite.y - pad + shift_y), soft)
        canvas.paste(sprite.image, (sprite.x, sprite.y), sprite.image)


def annotate(placed: Sequence[Placed], size: int) -> list[tuple[Instance, ObjectFacts]]:
    """The objects and what the query grammar is told about them, from left to right; so run their ids.

    An object in front counts as hiding another from 1 % (and 4 pixels) of its amodal mask on.
    """
    count = len(placed)
    amodal = np.zeros((count, size, size), bool)
    for whole, p in zip(amodal, placed, strict=True):
        whole[window(p.sprite)] = p.sprite.mask
    modal = amodal.copy()
    for k in range(count):
        modal[:k] &= ~amodal[k]
    boxes = [masks.box(whole) for whole in amodal]
    ranked = sorted(range(count), key=lambda k: (boxes[k][0] + boxes[k][2], boxes[k][1] + boxes[k][3], k))
    ids = {k: rank for rank, k in enumerate(ranked, start=1)}
    objects = []
    for k in ranked:
        item, area = placed[k].item, masks.area(amodal[k])
        shared = np.count_nonzero(amodal[k + 1 :] & amodal[k], axis=(1, 2))
        fronts = tuple(sorted(ids[k + 1 + int(j)] for j in np.flatnonzero(shared >= max(4, 0.01 * area))))
        hidden = 1 - masks.area(modal[k]) / area
        instance = Instance(ids[k], item.category, modal[k], amodal[k], item.attributes)
        seen = masks.box(modal[k])
        thing = ObjectFacts(
            ids[k], item.category, boxes[k], area, hidden, fronts, visible_box=seen, uses=item.uses, ideas=item.ideas
        )
        objects.append((instance, thing))
    return objects
