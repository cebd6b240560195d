"""Places sprites in a picture so that some hide others by a random share.

Only masks count, so hidden shares are exact at the resolution of the layout. Coordinates are pixels
of the layout; the position of an object is that of its centre.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from r2sm_jax.synthetic.random_choice import pick
from r2sm_jax.synthetic.scenes.paint import Sprite, paint_drawing

Occlusion = Literal["hidden", "free", "any"]
"""Whether an object should be partly hidden (if possible), stay free, or either."""

OCCLUDER_SHARE = 0.92  # of the objects, those that are placed over another one if there is one
SIZE_RANGE = (0.78, 1.22)  # random factor of the requested extent
MAX_HIDDEN_OF_FREE = 0.04  # hidden share up to which an object counts as free
NUM_FREE_POSITIONS = 16  # random positions that are tried
# Shares of a sprite that must be inside the picture where it covers nothing, and over another one.
MIN_INSIDE_FREE = 0.95
MIN_INSIDE_OCCLUDER = 0.93
MAX_SHARE_ERROR = 0.12  # difference between the hidden share and the requested one
NUM_BISECTIONS = 6
MAX_SIDE_LOSS = 0.3  # share that an object may lose to a sprite that hides another one

Position = tuple[int, int]
Slices = tuple[slice, slice]


@dataclass(frozen=True)
class LayoutRules:
    """Rules that every layout keeps to. Shares are of an object's own area."""

    hidden_range: tuple[float, float]
    """Range of the share that is to be hidden of an object, evenly spread."""
    tolerance: float
    """The search for a position ends when the hidden share is this close to the requested one."""
    num_directions: int
    """How many random sides are tried, from which a sprite is moved over another one."""
    keep_inside: bool
    """Whether every object lies inside the picture; otherwise 7 % of it may lie outside."""
    min_visible_pixels: float
    min_visible_share: float
    min_hidden_share: float = 0.0
    """An object that is covered at all is hidden by at least this share."""
    max_loss_of_free: float = 0.0
    """Share that an object that should stay free may lose to a sprite over another one."""


@dataclass(frozen=True)
class Item:
    """An object for a picture: what queries may say about it, and whether it should be hidden."""

    category: str
    attributes: Mapping[str, str]
    occlusion: Occlusion = "any"
    uses: tuple[str, ...] = ()
    ideas: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlacedItem:
    """An item with its centre at (x, y)."""

    item: Item
    sprite: Sprite
    x: int
    y: int
    is_occluder: bool = False
    """Whether it was placed there to hide another one."""

    def sprite_in_picture(self, scale: float = 1.0) -> Sprite:
        """The sprite in the picture's coordinates, at `scale` pixels per pixel of the layout."""
        sprite = self.sprite
        if scale == 1 or sprite.drawing is None:
            return replace(sprite, x=sprite.x + self.x, y=sprite.y + self.y)
        return paint_drawing(sprite.drawing, sprite.extent, scale, self.x * scale, self.y * scale)


def overlap_slices(
    sprite: Sprite, shape: tuple[int, int], x: int = 0, y: int = 0
) -> tuple[Slices, Slices]:
    """Slices into the picture and into the sprite, moved by (x, y), where the two overlap."""
    height, width = sprite.mask.shape
    x, y = x + sprite.x, y + sprite.y
    x0, y0 = max(x, 0), max(y, 0)
    x1 = max(x0, min(x + width, shape[1]))
    y1 = max(y0, min(y + height, shape[0]))
    in_picture = slice(y0, y1), slice(x0, x1)
    in_sprite = slice(y0 - y, y1 - y), slice(x0 - x, x1 - x)
    return in_picture, in_sprite


def mask_in_picture(sprite: Sprite, shape: tuple[int, int]) -> np.ndarray:
    """The complete mask of a sprite in a picture of this shape, `bool [H W]`."""
    in_picture, in_sprite = overlap_slices(sprite, shape)
    mask = np.zeros(shape, bool)
    mask[in_picture] = sprite.mask[in_sprite]
    return mask


class Layout:
    """The placed objects, the rearmost first, with the visible one at each pixel."""

    def __init__(self, shape: tuple[int, int], rules: LayoutRules) -> None:
        self.shape = shape
        self.rules = rules
        self.placed: list[PlacedItem] = []
        self.owner = np.zeros(shape, np.int64)  # 0 nothing, k + 1 object k
        self.area: list[int] = []
        self.visible_area: list[int] = []

    def place_on_top(self, placed: PlacedItem) -> None:
        """Adds an object in front of all others, without asking the rules."""
        in_picture, in_sprite = overlap_slices(placed.sprite, self.shape, placed.x, placed.y)
        mask = placed.sprite.mask[in_sprite]
        owner = self.owner[in_picture]
        for k, num_covered in enumerate(self._count_covered(owner[mask])):
            self.visible_area[k] -= num_covered

        self.placed.append(placed)
        owner[mask] = len(self.placed)
        self.area.append(int(np.count_nonzero(mask)))
        self.visible_area.append(self.area[-1])

    def try_to_place(
        self,
        rng: np.random.Generator,
        item: Item,
        extent: float,
        make_sprite: Callable[[float], Sprite],
    ) -> None:
        """Places an item over one that may be hidden, else where it covers nothing, if possible.

        Its longer side is about `extent`, or fits the object that it hides.
        """
        target = None
        if self.placed and rng.random() < OCCLUDER_SHARE:
            target = self.choose_object_to_hide(rng)
        share = rng.uniform(*self.rules.hidden_range)
        extent *= rng.uniform(*SIZE_RANGE)
        if target is not None:
            # An object that hides more is larger.
            extent = self.placed[target].sprite.extent * rng.uniform(0.75, 1.1)
            extent *= 0.85 + 0.35 * share

        sprite = make_sprite(extent)
        if np.count_nonzero(sprite.mask) < self.rules.min_visible_pixels:
            return

        position = None
        if target is not None:
            position = self.find_position_over(rng, sprite, target, share)
        is_occluder = position is not None
        if position is None:
            position = self.find_free_position(rng, sprite)
        if position is not None:
            self.place_on_top(PlacedItem(item, sprite, *position, is_occluder=is_occluder))

    def hidden_share(self, k: int, num_covered: int = 0) -> float:
        """The hidden share of object k, once `num_covered` more of its pixels are covered."""
        return 1 - (self.visible_area[k] - num_covered) / self.area[k]

    def choose_object_to_hide(self, rng: np.random.Generator) -> int | None:
        """A free object that should be hidden, else one that hides no other, else sometimes any."""
        free = [
            k
            for k, placed in enumerate(self.placed)
            if placed.item.occlusion != "free" and self.hidden_share(k) < MAX_HIDDEN_OF_FREE
        ]
        to_hide = [k for k in free if self.placed[k].item.occlusion == "hidden"]
        if to_hide:
            return pick(rng, to_hide)

        no_occluders = [k for k in free if not self.placed[k].is_occluder]
        if no_occluders:
            return pick(rng, no_occluders)
        if rng.random() < 0.2 and free:
            return pick(rng, free)
        return None

    def find_free_position(self, rng: np.random.Generator, sprite: Sprite) -> Position | None:
        """Looks for a position where the sprite covers nothing, far from all objects."""
        height, width = sprite.mask.shape
        margin_x, margin_y = width / 2 - 1, height / 2 - 1
        low = (margin_x, margin_y)
        high = (self.shape[1] - margin_x, self.shape[0] - margin_y)
        centres = rng.uniform(low, high, (NUM_FREE_POSITIONS, 2)).astype(int).tolist()
        positions = [self._keep_inside(sprite, x, y) for x, y in centres]

        def distance(position: Position) -> int:
            """City-block distance to the nearest object."""
            x, y = position
            return min((abs(x - p.x) + abs(y - p.y) for p in self.placed), default=0)

        area = np.count_nonzero(sprite.mask)
        for position in sorted(positions, key=distance, reverse=True):
            owners = self._owners_below(sprite, *position)
            if owners.size > MIN_INSIDE_FREE * area and not owners.any():
                return position
        return None

    def find_position_over(
        self, rng: np.random.Generator, sprite: Sprite, target: int, share: float
    ) -> Position | None:
        """A position where the sprite hides about `share` of the target, found by bisection."""
        area = np.count_nonzero(sprite.mask)
        below = self.placed[target]
        best = None
        best_error = MAX_SHARE_ERROR

        for _ in range(self.rules.num_directions):
            angle = rng.uniform(0, 2 * np.pi)
            dx, dy = np.cos(angle), np.sin(angle)
            near = 0.0
            # Beyond this distance the two hardly touch.
            far = (sprite.extent + below.sprite.extent) * 0.62
            # The nearer the two centres, the more is hidden.
            for _ in range(NUM_BISECTIONS):
                distance = (near + far) / 2
                x, y = int(below.x + dx * distance), int(below.y + dy * distance)
                position = self._keep_inside(sprite, x, y)
                owners = self._owners_below(sprite, *position)
                covered = self._count_covered(owners)
                hidden = self.hidden_share(target, covered[target])
                error = abs(hidden - share)

                is_inside = owners.size > MIN_INSIDE_OCCLUDER * area
                if error < best_error and is_inside and self._rules_allow(covered, target):
                    best, best_error = position, error
                    if error < self.rules.tolerance:
                        return best

                if hidden > share:
                    near = distance
                else:
                    far = distance
        return best

    def _keep_inside(self, sprite: Sprite, x: int, y: int) -> Position:
        """The position, moved so that the sprite is inside the picture if the rules require it."""
        if not self.rules.keep_inside:
            return x, y
        height, width = sprite.mask.shape
        x = min(max(x, -sprite.x), self.shape[1] - width - sprite.x)
        y = min(max(y, -sprite.y), self.shape[0] - height - sprite.y)
        return x, y

    def _owners_below(self, sprite: Sprite, x: int, y: int) -> np.ndarray:
        """The object below each pixel of a sprite's mask: 0 nothing, k + 1 object k."""
        in_picture, in_sprite = overlap_slices(sprite, self.shape, x, y)
        return self.owner[in_picture][sprite.mask[in_sprite]]

    def _count_covered(self, owners: np.ndarray) -> list[int]:
        """How many visible pixels of each object these are."""
        return np.bincount(owners, minlength=len(self.placed) + 1)[1:].tolist()

    def _rules_allow(self, covered: Sequence[int], target: int) -> bool:
        """Whether every object stays recognisable, and all but the target much as they were."""
        rules = self.rules
        for k, num_covered in enumerate(covered):
            if num_covered == 0:
                continue
            min_visible = max(rules.min_visible_pixels, rules.min_visible_share * self.area[k])
            if self.visible_area[k] - num_covered < min_visible:
                return False
            if self.hidden_share(k, num_covered) < rules.min_hidden_share:
                return False

            should_stay_free = self.placed[k].item.occlusion == "free"
            max_loss = rules.max_loss_of_free if should_stay_free else MAX_SIDE_LOSS
            if k != target and num_covered > max_loss * self.area[k]:
                return False
        return True
