"""Places sprites in a picture so that some hide others by a chosen share.

Only their masks count, so hidden shares are exact at the resolution of the layout. Coordinates are pixels of the
layout; the place of an object is that of its centre.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from r2sm_jax.synthetic.random_choice import pick
from r2sm_jax.synthetic.scenes.paint import Sprite, paint_figure

Wanted = Literal["hidden", "free", "any"]
"""Whether an object is to be partly hidden (if possible), to stay free, or either."""
Slices = tuple[slice, slice]


@dataclass(frozen=True)
class Rules:
    """What every layout has to keep to. Shares are of an object's own area."""

    hidden: tuple[
        float, float
    ]  # range of the share that is to be hidden of an object, evenly spread
    tolerance: (
        float  # the search for a place ends where the hidden share is this close to the wanted one
    )
    directions: int  # sides from which a sprite is moved over another, at most
    whole: bool  # whether every object lies inside the picture; otherwise 7 % of it may lie outside
    smallest_area: float  # pixels that stay visible of every object
    smallest_share: float  # share that stays visible of every object
    least_hidden: float = 0.0  # an object that is covered at all is hidden by this share
    loss_of_free: float = (
        0.0  # share that an object that is wanted free may lose to a sprite over another one
    )


@dataclass(frozen=True)
class Item:
    """An object for a picture: what queries may say of it (see `ObjectFacts`), and whether it is to be hidden."""

    category: str
    attributes: Mapping[str, str]
    wanted: Wanted = "any"
    uses: tuple[str, ...] = ()
    ideas: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placed:
    """An item with its centre at (x, y). `on_top`: it was put there to hide another."""

    item: Item
    sprite: Sprite
    x: int
    y: int
    on_top: bool = False

    def in_place(self, scale: float = 1.0) -> Sprite:
        """The sprite, its corner relative to the picture's, at `scale` pixels per pixel of the layout."""
        sprite = self.sprite
        if scale == 1 or sprite.figure is None:
            return replace(sprite, x=sprite.x + self.x, y=sprite.y + self.y)
        return paint_figure(sprite.figure, sprite.extent, scale, self.x * scale, self.y * scale)


def overlap(
    sprite: Sprite, shape: tuple[int, int], x: int = 0, y: int = 0
) -> tuple[Slices, Slices]:
    """Where the sprite, moved by (x, y), lies in a picture of a shape (H, W): slices into the picture and into it."""
    height, width = sprite.mask.shape
    x, y = x + sprite.x, y + sprite.y
    x0, y0 = max(x, 0), max(y, 0)
    x1, y1 = max(x0, min(x + width, shape[1])), max(y0, min(y + height, shape[0]))
    return (slice(y0, y1), slice(x0, x1)), (slice(y0 - y, y1 - y), slice(x0 - x, x1 - x))


def whole_mask(sprite: Sprite, shape: tuple[int, int]) -> np.ndarray:
    """The mask of a sprite in a picture of a shape, `bool [H W]`."""
    there, here = overlap(sprite, shape)
    whole = np.zeros(shape, bool)
    whole[there] = sprite.mask[here]
    return whole


class Layout:
    """The objects so far, the rearmost first: which one is visible at each pixel, and how much of each is left."""

    def __init__(self, shape: tuple[int, int], rules: Rules) -> None:
        self.shape, self.rules = shape, rules
        self.placed: list[Placed] = []
        self.owner = np.zeros(shape, np.int64)  # 0 nothing, k + 1 object k
        self.area: list[int] = []
        self.visible: list[int] = []

    def put(self, placed: Placed) -> None:
        """Adds an object in front of all others, wherever it is."""
        there, here = overlap(placed.sprite, self.shape, placed.x, placed.y)
        mask, owner = placed.sprite.mask[here], self.owner[there]
        for k, lost in enumerate(self._covered(owner[mask])):
            self.visible[k] -= lost
        self.placed.append(placed)
        owner[mask] = len(self.placed)
        self.area.append(int(np.count_nonzero(mask)))
        self.visible.append(self.area[-1])

    def add(
        self,
        rng: np.random.Generator,
        item: Item,
        extent: float,
        make_sprite: Callable[[float], Sprite],
    ) -> None:
        """Places an item over an object that may be hidden, else where it covers nothing, if there is such a place.

        Its longer side is about `extent`, or fits the object that it hides.
        """
        below = self.choose_below(rng) if self.placed and rng.random() < 0.92 else None
        share = rng.uniform(*self.rules.hidden)
        extent *= rng.uniform(0.78, 1.22)
        if below is not None:
            extent = (
                self.placed[below].sprite.extent * rng.uniform(0.75, 1.1) * (0.85 + 0.35 * share)
            )
        sprite = make_sprite(extent)
        if np.count_nonzero(sprite.mask) < self.rules.smallest_area:
            return
        over = None if below is None else self.find_over(rng, sprite, below, share)
        place = over or self.find_free(rng, sprite)
        if place:
            self.put(Placed(item, sprite, *place, on_top=over is not None))

    def hidden(self, k: int, lost: int = 0) -> float:
        """The hidden share of object k, once `lost` more of its pixels are covered."""
        return 1 - (self.visible[k] - lost) / self.area[k]

    def choose_below(self, rng: np.random.Generator) -> int | None:
        """A free object that may be hidden: one that is wanted hidden, else one that hides no other, else any."""
        free = [
            k
            for k, p in enumerate(self.placed)
            if p.item.wanted != "free" and self.hidden(k) < 0.04
        ]
        wanted = [k for k in free if self.placed[k].item.wanted == "hidden"]
        alone = [k for k in free if not self.placed[k].on_top]
        choice = wanted or alone or (free if rng.random() < 0.2 else [])
        return pick(rng, choice) if choice else None

    def find_free(self, rng: np.random.Generator, sprite: Sprite) -> tuple[int, int] | None:
        """Of 16 random places, the one farthest from all objects at which the sprite covers nothing."""
        height, width = sprite.mask.shape
        reach_x, reach_y = width / 2 - 1, height / 2 - 1
        low, high = (reach_x, reach_y), (self.shape[1] - reach_x, self.shape[0] - reach_y)
        places = [
            self._inside(sprite, x, y)
            for x, y in rng.uniform(low, high, (16, 2)).astype(int).tolist()
        ]
        distance = [
            min((abs(x - p.x) + abs(y - p.y) for p in self.placed), default=0) for x, y in places
        ]
        area = np.count_nonzero(sprite.mask)
        for k in sorted(range(len(places)), key=distance.__getitem__, reverse=True):
            under = self._under(sprite, *places[k])
            if under.size > 0.95 * area and not under.any():
                return places[k]
        return None

    def find_over(
        self, rng: np.random.Generator, sprite: Sprite, below: int, share: float
    ) -> tuple[int, int] | None:
        """A place where the sprite hides about `share` of object number `below`, by bisecting their distance."""
        area = np.count_nonzero(sprite.mask)
        other = self.placed[below]
        best, error = None, 0.12
        for _ in range(self.rules.directions):
            angle = rng.uniform(0, 2 * np.pi)
            dx, dy = np.cos(angle), np.sin(angle)
            near, far = 0.0, (sprite.extent + other.sprite.extent) * 0.62
            for _ in range(6):
                distance = (near + far) / 2
                place = self._inside(
                    sprite, int(other.x + dx * distance), int(other.y + dy * distance)
                )
                under = self._under(sprite, *place)
                covered = self._covered(under)
                hidden = self.hidden(below, covered[below])
                if (
                    abs(hidden - share) < error
                    and under.size > 0.93 * area
                    and self._allows(covered, below)
                ):
                    best, error = place, abs(hidden - share)
                    if error < self.rules.tolerance:
                        return best
                near, far = (distance, far) if hidden > share else (near, distance)
        return best

    def _inside(self, sprite: Sprite, x: int, y: int) -> tuple[int, int]:
        """The place, moved so that the sprite lies inside the picture if the rules want that."""
        if not self.rules.whole:
            return x, y
        height, width = sprite.mask.shape
        x = min(max(x, -sprite.x), self.shape[1] - width - sprite.x)
        return x, min(max(y, -sprite.y), self.shape[0] - height - sprite.y)

    def _under(self, sprite: Sprite, x: int, y: int) -> np.ndarray:
        """What a sprite would lie on, pixel by pixel of its mask inside the picture: 0 nothing, k + 1 object k."""
        there, here = overlap(sprite, self.shape, x, y)
        return self.owner[there][sprite.mask[here]]

    def _covered(self, under: np.ndarray) -> list[int]:
        """How many visible pixels of each object that is."""
        return np.bincount(under, minlength=len(self.placed) + 1)[1:].tolist()

    def _allows(self, covered: Sequence[int], below: int) -> bool:
        """Whether every object stays recognisable, and all but object number `below` much as they were."""
        rules = self.rules
        for k, lost in enumerate(covered):
            if not lost:
                continue
            least_visible = max(rules.smallest_area, rules.smallest_share * self.area[k])
            if self.visible[k] - lost < least_visible or self.hidden(k, lost) < rules.least_hidden:
                return False
            limit = rules.loss_of_free if self.placed[k].item.wanted == "free" else 0.3
            if k != below and lost > limit * self.area[k]:
                return False
        return True
