"""What the query grammar knows of the objects of one image, and which of them fit a description.

An unknown attribute, such as the colour of an object in a photo, fits every description.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from r2sm_jax.synthetic.queries.nouns import Meaning, clean_name, could_mean, lexicon, meaning_of

HIDDEN = 0.05
"""Share of its complete mask from which an object counts as partly hidden."""

Box = tuple[float, float, float, float]
"""`x0, y0, x1, y1` in pixels."""


@dataclass(frozen=True)
class ObjectFacts:
    """What the grammar knows of one object.

    `box`, `area` (pixels) and `occlusion` (hidden share; NaN if unknown) are those of the complete mask; `hidden_by`
    has the ids of the objects that hide a part of it.
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
    def partly_hidden(self) -> bool:
        return self.occlusion >= HIDDEN


class Objects:
    """The objects of one image, their names and their places.

    Attributes:
        all, by_id: The objects.
        category, meaning: For each id the noun of its category, and its entry in the lexicon (or the noun alone).
        in_lexicon: Whether the lexicon has all categories.
    """

    def __init__(self, objects: Sequence[ObjectFacts]):
        self.all = tuple(objects)
        self.by_id = {facts.id: facts for facts in objects}
        self.category = {facts.id: clean_name(facts.category) for facts in objects}
        self.in_lexicon = lexicon().classes.keys() >= set(self.category.values())
        self.meaning = {i: meaning_of(name) for i, name in self.category.items()}
        x0, y0, x1, y1 = zip(*(facts.box for facts in objects), strict=True)
        width, height = max(1.0, max(x1) - min(x0)), max(1.0, max(y1) - min(y0))

        def centre(box: Box) -> tuple[float, float]:
            return (box[0] + box[2]) / 2 / width, (box[1] + box[3]) / 2 / height

        self._centres = {
            facts.id: (centre(facts.box), centre(facts.visible_box or facts.box))
            for facts in objects
        }

    def named(self, noun: str) -> frozenset[int]:
        """The objects that a noun could mean, in the vocabulary of any split."""
        return frozenset(i for i, name in self.category.items() if could_mean(noun, name))

    def meant_by(self, meaning: Meaning) -> frozenset[int]:
        """The objects of a class or group; none where another object makes its words doubtful."""
        if not set(meaning.unless).isdisjoint(self.category.values()):
            return frozenset()
        return frozenset(i for i, name in self.category.items() if name in meaning.classes)

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
        """Least and greatest distance from one centre to another along an axis, in extents of all objects together.

        The centre of the complete mask and that of the visible mask both count.
        """
        gaps = [
            sign * (b[axis] - a[axis]) for a in self._centres[start] for b in self._centres[end]
        ]
        return min(gaps), max(gaps)

    def between(self, first: int, last: int, middle: int, margin: float) -> bool:
        """Whether an object could lie between two others from left to right.

        With a margin above 0 it must: at that distance from both, and at their height.
        """
        sides = [self.gap(first, middle, 0), self.gap(middle, last, 0)]
        if margin <= 0:
            return all(greatest > margin for _, greatest in sides)
        heights = [self.gap(first, middle, 1), self.gap(last, middle, 1)]
        level = all(least > -0.2 and greatest < 0.2 for least, greatest in heights)
        return level and all(least > margin for least, _ in sides)


def clearly_larger(a: ObjectFacts, b: ObjectFacts) -> bool:
    """Whether `a` is larger than `b` by a margin, as a whole and in what is visible."""
    return a.area > 1.4 * b.area and a.area * (1 - a.occlusion) > 1.1 * b.area * (1 - b.occlusion)
