"""What the query grammar knows of the objects of one image, and which of them fit a description.

An unknown attribute, such as the colour of an object in a photo, fits every description.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from r2sm_jax.data.crops import MIN_HIDDEN_SHARE
from r2sm_jax.synthetic.queries.nouns import (
    LexiconEntry,
    clean_name,
    could_mean,
    lexicon,
    lexicon_entry,
)

# An object is clearly larger than another one if its complete and its visible area are this many
# times larger. The visible one counts too, since that is what one sees.
MIN_AREA_RATIO = 1.4
MIN_VISIBLE_RATIO = 1.1
# Objects side by side differ by less than this in height, in extents of all objects together.
MAX_LEVEL_DIFFERENCE = 0.2

Box = tuple[float, float, float, float]
"""`x0, y0, x1, y1` in pixels."""


@dataclass(frozen=True)
class ObjectFacts:
    """Facts about one object that phrases can state.

    `box`, `area` (pixels) and `occlusion` (hidden share; NaN if unknown) are those of the complete
    mask; `hidden_by` has the ids of the objects that hide a part of it.
    """

    id: int
    category: str
    box: Box
    area: float
    occlusion: float
    hidden_by: tuple[int, ...]
    colour: str | None = None
    pattern: str | None = None
    visible_box: Box | None = None
    uses: tuple[str, ...] = ()
    """Words for its use that can follow "the thing": "to light a room", "that can be eaten"."""
    ideas: tuple[str, ...] = ()
    """Words that one associates with it: "summer", "breakfast"."""

    @property
    def is_partly_hidden(self) -> bool:
        return self.occlusion >= MIN_HIDDEN_SHARE


class ImageObjects:
    """The objects of one image, their names and their positions.

    Attributes:
        all, by_id: The objects.
        category, entry: For each id the noun of its category, and its entry in the lexicon (or the
            noun alone).
        in_lexicon: Whether the lexicon has the categories of all objects. Nouns of groups, nouns
            for anything and uses need that: they could mean an object that the lexicon lacks too.
    """

    def __init__(self, objects: Sequence[ObjectFacts]):
        self.all = tuple(objects)
        self.by_id = {facts.id: facts for facts in objects}
        self.category = {facts.id: clean_name(facts.category) for facts in objects}
        self.in_lexicon = lexicon().classes.keys() >= set(self.category.values())
        self.entry = {i: lexicon_entry(name) for i, name in self.category.items()}

        # Distances are in extents of all objects together.
        x0, y0, x1, y1 = zip(*(facts.box for facts in objects), strict=True)
        width = max(1.0, max(x1) - min(x0))
        height = max(1.0, max(y1) - min(y0))

        def centre(box: Box) -> tuple[float, float]:
            return (box[0] + box[2]) / 2 / width, (box[1] + box[3]) / 2 / height

        self._centres = {
            facts.id: (centre(facts.box), centre(facts.visible_box or facts.box))
            for facts in objects
        }

    def named(self, noun: str) -> frozenset[int]:
        """The objects that a noun could mean, in the vocabulary of any split."""
        return frozenset(i for i, name in self.category.items() if could_mean(noun, name))

    def described_by(self, entry: LexiconEntry) -> frozenset[int]:
        """The objects of a class or group; none where another object makes its words doubtful."""
        if not set(entry.unless).isdisjoint(self.category.values()):
            return frozenset()
        return frozenset(i for i, name in self.category.items() if name in entry.classes)

    def matching(
        self, ids: Iterable[int], colour: str | None, pattern: str | None
    ) -> tuple[int, ...]:
        """Those of `ids` that could have a colour and a pattern, in order. None stands for any."""
        return tuple(
            i
            for i in sorted(ids)
            if (colour is None or self.by_id[i].colour in (colour, None))
            and (pattern is None or self.by_id[i].pattern in (pattern, None))
        )

    def gap(self, start: int, end: int, axis: int, sign: int = 1) -> tuple[float, float]:
        """Smallest and largest distance from one centre to another along an axis (0 is x, 1 is y).

        Distances are positive to the right and downwards, with `sign` -1 the other way round. The
        centre of the complete mask and that of the visible mask both count, so that a position is
        stated only where it holds for either.
        """
        starts = [sign * centre[axis] for centre in self._centres[start]]
        ends = [sign * centre[axis] for centre in self._centres[end]]
        return min(ends) - max(starts), max(ends) - min(starts)

    def could_be_between(self, first: int, last: int, middle: int, margin: float) -> bool:
        """Whether an object may lie between two others; a margin below 0 leaves room for doubt."""
        _, from_first = self.gap(first, middle, axis=0)
        _, to_last = self.gap(middle, last, axis=0)
        return from_first > margin and to_last > margin

    def is_between(self, first: int, last: int, middle: int, margin: float) -> bool:
        """Whether an object clearly lies between two others, this far from both and level."""
        for end in (first, last):
            lowest, highest = self.gap(end, middle, axis=1)
            if lowest <= -MAX_LEVEL_DIFFERENCE or highest >= MAX_LEVEL_DIFFERENCE:
                return False
        from_first, _ = self.gap(first, middle, axis=0)
        to_last, _ = self.gap(middle, last, axis=0)
        return from_first > margin and to_last > margin


def is_clearly_larger(a: ObjectFacts, b: ObjectFacts) -> bool:
    """Whether `a` is larger than `b` by a margin, both in its complete and in its visible area."""
    is_larger = a.area > MIN_AREA_RATIO * b.area
    visible_area = a.area * (1 - a.occlusion)
    return is_larger and visible_area > MIN_VISIBLE_RATIO * b.area * (1 - b.occlusion)
