"""Names of objects: "the red mug", "the striped thing", "the vehicle".

A name is used only if no other object of the image could be called so. phrases.py adds positions,
uses and relations.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from r2sm_jax.synthetic.queries.nouns import (
    LexiconEntry,
    clean_name,
    is_plural,
    lexicon,
    lexicon_entry,
    read_toml,
)
from r2sm_jax.synthetic.queries.objects import ImageObjects, ObjectFacts
from r2sm_jax.synthetic.random_choice import pick

# Shares of the draws.
GROUP_NOUN_SHARE = 0.08  # nouns of a group of classes: "the vehicle"
ANYTHING_SHARE = 0.06  # nouns for any object at all: "the striped thing"
PLAIN_SHARE = 0.2  # of objects without a pattern, names that may say "plain"
PATTERN_AFTER_SHARE = 0.35  # of patterns, those that follow their noun: "with stripes"
CLASS_NAME_SHARE = 0.3  # of nouns for an object of a photo, at least the name of its class

PEOPLE = {"person", "people", "human", "man", "woman", "boy", "girl", "child"}
"""Words at the end of the classes whose colour is that of their clothes."""

Named = tuple[str, frozenset[int]]
"""A noun and the ids of all objects that it could mean."""


@dataclass(frozen=True)
class Phrase:
    """Words that pick exactly the objects `ids`."""

    text: str
    ids: tuple[int, ...]
    plural: bool = False
    """Whether it takes "are"."""
    bare: str | None = None
    """The text without its article, for wordings that bring their own: "red mug"."""
    possessive: str | None = None
    """The form that a part belongs to: "the red mug's"."""
    lead: str = ""
    """A sentence that comes before it."""
    reasoning: bool = False
    """Whether it says what its targets are for, and not what they are called."""


class NameWriter:
    """Writes random names for the objects of one image, in training words or held-out ones.

    Every method draws from `rng` in a fixed order. Another order gives other sentences for the same
    seed.
    """

    def __init__(
        self,
        objects: ImageObjects,
        rng: np.random.Generator,
        held_out: bool,
        of_photo: bool = False,
    ):
        """`of_photo` says that people ask for these objects by class and among their like; what is
        drawn has many names, and seldom its like beside it."""
        self.objects = objects
        self.rng = rng
        self.held_out = held_out
        self.of_photo = of_photo
        self.words = read_toml("phrases.toml")
        self._anchors: dict[int, list[str]] = {}  # of each object; they are asked for often

    def name(self, target: ObjectFacts) -> Phrase | None:
        """Class, colour and pattern: "the red mug", "the striped thing"."""
        has_looks = self.objects.in_lexicon and bool(target.colour or target.pattern)
        for_anything = has_looks and self.rng.random() < ANYTHING_SHARE
        named = self.noun(target, for_anything)
        if named is None:
            return None
        noun, ids = named

        # What stands twice is picked twice as often. "Plain" is rarely said. The number for that is
        # drawn only for objects without a pattern: one more draw would change the sentences of a
        # seed.
        options = [(None, None), (None, None), (target.colour, None), (target.colour, None)]
        has_pattern = target.pattern not in (None, "plain")
        if has_pattern or self.rng.random() >= 1 - PLAIN_SHARE:
            options += [(None, target.pattern), (target.colour, target.pattern)]
        if for_anything:
            options = [option for option in options if option != (None, None)]
        unique = [o for o in options if self.objects.matching(ids, *o) == (target.id,)]
        if not unique:
            return None
        return self.singular(target, noun, *self.adjectives(target, *pick(self.rng, unique)))

    def name_by_colour(self, target: ObjectFacts) -> Phrase | None:
        """A name that needs the colour: "the red mug", "the person in red"."""
        named = self.noun(target)
        if named is None or target.colour is None:
            return None
        noun, ids = named
        if self.objects.matching(ids, target.colour, None) != (target.id,):
            return None
        return self.singular(target, noun, *self.adjectives(target, target.colour, None))

    def absent_name(self, category: str) -> Phrase | None:
        """The name of a class that the image lacks; None if it could mean another object."""
        nouns = self.nouns(lexicon_entry(clean_name(category)))
        nouns = [noun for noun in nouns if not self.objects.named(noun)]
        if not nouns:
            return None
        noun = self._pick_noun(nouns, clean_name(category))
        many = is_plural(noun)
        return Phrase(f"the {noun}", (), many, bare=None if many else noun)

    def anchor(self, other: ObjectFacts) -> str | None:
        """A short unique singular name of another object, to relate a target to: "the red mug"."""
        if other.id not in self._anchors:
            names = []
            for noun in self.nouns(self.objects.entry[other.id]):
                for colour in (None, other.colour):
                    ids = self.objects.matching(self.objects.named(noun), colour, None)
                    if ids == (other.id,) and not is_plural(noun):
                        before, after = colour, None
                        if colour and is_person(other.category):
                            before, after = None, f"in {colour}"
                        names.append(join_words("the", before, noun, after))
            self._anchors[other.id] = names
        # A random number is drawn at each call, so that not all relations use the same name.
        names = self._anchors[other.id]
        return pick(self.rng, names) if names else None

    def nouns(self, entry: LexiconEntry) -> Sequence[str]:
        """The nouns of a class that this split may use; none of a class such as "object".

        Annotations without a class name are called so. The noun fits every object of the image, and
        `ImageObjects.named` would count only those with this class.
        """
        nouns = entry.held_out_nouns if self.held_out else entry.nouns
        return [noun for noun in nouns if noun not in self.words["anything"]]

    def noun(self, target: ObjectFacts, for_anything: bool = False) -> Named | None:
        """A noun for a target and all objects that it could mean; now and then the noun of a group.

        `for_anything`: a noun for any object at all.
        """
        if for_anything:
            return pick(self.rng, self.words["anything"]), frozenset(self.objects.by_id)

        if self.objects.in_lexicon and self.rng.random() < GROUP_NOUN_SHARE:
            for group in lexicon().groups.values():
                nouns = self.nouns(group)
                ids = self.objects.described_by(group)
                if nouns and target.id in ids:
                    return pick(self.rng, nouns), ids

        nouns = self.nouns(self.objects.entry[target.id])
        if not nouns:
            return None
        noun = self._pick_noun(nouns, self.objects.category[target.id])
        return noun, self.objects.named(noun)

    def _pick_noun(self, nouns: Sequence[str], category: str) -> str:
        """Picks the name of the class as often for what is there as for what is absent, so that it
        does not tell."""
        noun = pick(self.rng, nouns)
        says_class = self.of_photo and category in nouns
        return category if says_class and self.rng.random() < CLASS_NAME_SHARE else noun

    def adjectives(
        self, target: ObjectFacts, colour: str | None, pattern: str | None
    ) -> tuple[str, str]:
        """Words before and after a noun: "red" mug "with stripes", person "dressed in red"."""
        if colour and is_person(target.category):
            return "", pick(self.rng, self.words["clothes"]).format(colour=colour)
        if pattern is None:
            return join_words(colour), ""
        words = lexicon().patterns.get(pattern, {"before": [pattern], "after": []})
        if words["after"] and self.rng.random() < PATTERN_AFTER_SHARE:
            return join_words(colour), pick(self.rng, words["after"])
        return join_words(pick(self.rng, words["before"]), colour), ""

    def singular(self, target: ObjectFacts, noun: str, before: str = "", after: str = "") -> Phrase:
        """The phrase for one object: "the" and its noun, with words before and after that."""
        many = is_plural(noun)
        bare = join_words(before, noun, after)
        possessive = None
        # "The mug on the left's" is no English.
        if not after and " of " not in noun:
            possessive = f"the {bare}'" if many and bare.endswith("s") else f"the {bare}'s"
        return Phrase(f"the {bare}", (target.id,), many, None if many else bare, possessive)


def is_person(category: str) -> bool:
    return not PEOPLE.isdisjoint(category.split()[-1:])


def join_words(*words: str | None) -> str:
    """The words with blanks between them, without those that are missing."""
    return " ".join(word for word in words if word)
