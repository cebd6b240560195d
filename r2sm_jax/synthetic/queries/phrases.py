"""Targets, and phrases that pick exactly those: "the red mug", "the mug behind the book", "what you would drink from".

A phrase is used only if its literal meaning fits its targets and no other object of the image. Positions and sizes need
a clear margin.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial

import numpy as np

from r2sm_jax.synthetic.queries.nouns import (
    Meaning,
    clean_name,
    is_plural,
    lexicon,
    meaning_of,
    plural,
    read_toml,
)
from r2sm_jax.synthetic.queries.objects import ObjectFacts, Objects, clearly_larger
from r2sm_jax.synthetic.random_choice import pick

CLEAR = 0.20  # margin of a position, in extents of all objects together
BETWEEN = 0.12  # margin of a place between two objects


@dataclass(frozen=True)
class Phrase:
    """Words that pick exactly the objects `ids`.

    `plural`: takes "are". `bare`: the text after "the". `lead`: a sentence before it. `reasoning`: names no class.
    """

    text: str
    ids: tuple[int, ...]
    plural: bool = False
    bare: str | None = None
    possessive: str | None = None
    lead: str = ""
    reasoning: bool = False


class PhraseWriter:
    """Draws phrases for the objects of one image, in the training words or in the held-out ones."""

    def __init__(self, objects: Objects, rng: np.random.Generator, held_out: bool):
        self.objects, self.rng, self.held_out = objects, rng, held_out
        self.words = read_toml("phrases.toml")
        self._anchors: dict[int, list[str]] = {}

    def phrase(self, among: Set[int]) -> Phrase | None:
        """A phrase for a random target `among` these, in half of the draws for a partly hidden one. None if none was
        found."""
        wants_hidden = self.rng.random() < 0.5
        possible = [target for target in self.objects.all if target.id in among]
        target = pick(
            self.rng, [t for t in possible if t.partly_hidden == wants_hidden] or possible
        )
        draw = self.rng.random()
        writers = (self._name, self._place, self._occlusion, self._reasoning, self._several)
        for share, write in zip((0.45, 0.15, 0.15, 0.15, 0.10), writers, strict=True):
            draw -= share
            if draw < 0:
                return next(
                    (phrase for _ in range(3) if (phrase := write(target)) is not None), None
                )
        return None

    def absent(self, category: str) -> Phrase | None:
        """The name of a class that the image does not have; None if it could mean an object that is there."""
        meaning = meaning_of(clean_name(category))
        nouns = [noun for noun in self._nouns(meaning) if not self.objects.named(noun)]
        if not nouns:
            return None
        noun = pick(self.rng, nouns)
        return Phrase(f"the {noun}", (), is_plural(noun), None if is_plural(noun) else noun)

    def anchor(self, other: ObjectFacts) -> str | None:
        """A short unique singular name of another object, to relate a target to: "the red mug"."""
        if other.id not in self._anchors:
            self._anchors[other.id] = [
                _joined("the", colour, noun)
                for noun in self._nouns(self.objects.meaning[other.id])
                for colour in (None, other.colour)
                if not is_plural(noun)
                and self.objects.matching(self.objects.named(noun), colour, None) == (other.id,)
            ]
        names = self._anchors[other.id]
        return pick(self.rng, names) if names else None

    def _nouns(self, meaning: Meaning) -> Sequence[str]:
        return meaning.held_out_nouns if self.held_out else meaning.nouns

    def _noun(
        self, target: ObjectFacts, anything: bool = False
    ) -> tuple[str, frozenset[int]] | None:
        """A noun for a target and all objects that it could mean; now and then the noun of a group.

        `anything`: a noun for any object at all.
        """
        if anything:
            return pick(self.rng, self.words["anything"]), frozenset(self.objects.by_id)
        if self.objects.in_lexicon and self.rng.random() < 0.08:
            for meaning in lexicon().groups.values():
                nouns, ids = self._nouns(meaning), self.objects.meant_by(meaning)
                if nouns and target.id in ids:
                    return pick(self.rng, nouns), ids
        if not (nouns := self._nouns(self.objects.meaning[target.id])):
            return None
        noun = pick(self.rng, nouns)
        return noun, self.objects.named(noun)

    def _adjectives(self, colour: str | None, pattern: str | None) -> tuple[str, str]:
        """Words before and after a noun: "red" mug "with stripes"."""
        after = ""
        if pattern is not None:
            words = lexicon().patterns.get(pattern, {"before": [pattern], "after": []})
            if words["after"] and self.rng.random() < 0.35:
                after, pattern = pick(self.rng, words["after"]), None
            else:
                pattern = pick(self.rng, words["before"])
        return _joined(pattern, colour), after

    def _singular(
        self, target: ObjectFacts, noun: str, before: str = "", after: str = ""
    ) -> Phrase:
        """The phrase for one object: "the" and its noun, with words before and after that."""
        many, bare = is_plural(noun), _joined(before, noun, after)
        ending = "'" if many and bare.endswith("s") else "'s"
        possessive = None if after or " of " in noun else f"the {bare}{ending}"
        return Phrase(f"the {bare}", (target.id,), many, None if many else bare, possessive)

    def _name(self, target: ObjectFacts) -> Phrase | None:
        """Class, colour and pattern: "the red mug", "the striped thing"."""
        described = self.objects.in_lexicon and (target.colour or target.pattern)
        if (
            named := self._noun(target, anything=bool(described) and self.rng.random() < 0.06)
        ) is None:
            return None
        noun, ids = named
        options = [(None, None), (None, None), (target.colour, None), (target.colour, None)]
        if target.pattern not in (None, "plain") or self.rng.random() >= 0.8:
            options += [(None, target.pattern), (target.colour, target.pattern)]
        if noun in self.words["anything"]:
            options = [option for option in options if option != (None, None)]
        unique = [
            option for option in options if self.objects.matching(ids, *option) == (target.id,)
        ]
        return (
            self._singular(target, noun, *self._adjectives(*pick(self.rng, unique)))
            if unique
            else None
        )

    def _place(self, target: ObjectFacts) -> Phrase | None:
        """Size or position among its class, or a place relative to other objects."""
        if (named := self._noun(target)) is None:
            return None
        noun, ids = named
        draw = self.rng.random()
        if draw < 0.6:
            others = self._others(target, ids)
            write = self._size if draw < 0.3 else self._outermost
            return write(target, noun, others) if others else None
        return (
            self._relation(target, noun, ids) if draw < 0.88 else self._between(target, noun, ids)
        )

    def _size(self, target: ObjectFacts, noun: str, others: Sequence[ObjectFacts]) -> Phrase | None:
        if is_plural(noun):
            return None
        two = len(others) == 1
        if all(clearly_larger(target, other) for other in others):
            degree = "larger" if two else "largest"
        elif all(clearly_larger(other, target) for other in others):
            degree = "smaller" if two else "smallest"
        else:
            return None
        return self._singular(target, noun, before=pick(self.rng, self.words["size"][degree]))

    def _others(self, target: ObjectFacts, ids: frozenset[int]) -> list[ObjectFacts]:
        return [self.objects.by_id[i] for i in ids if i != target.id]

    def _outermost(
        self, target: ObjectFacts, noun: str, others: Sequence[ObjectFacts]
    ) -> Phrase | None:
        for words in self.words["direction"]:
            axis, sign = words["axis"], words["sign"]
            if all(
                self.objects.gap(other.id, target.id, axis, sign)[0] > CLEAR for other in others
            ):
                if self.rng.random() < 0.4:
                    return self._singular(target, noun, before=words["before"])
                return self._singular(target, noun, after=pick(self.rng, words["after"]))
        return None

    def _relation(self, target: ObjectFacts, noun: str, ids: frozenset[int]) -> Phrase | None:
        """A direction from another object in which nothing else lies that the noun could mean."""
        other = pick(self.rng, self.objects.all)
        anchor = None if other.id in ids else self.anchor(other)
        if anchor is None:
            return None
        gap, rest = self.objects.gap, ids - {target.id, other.id}
        for words in self.words["direction"]:
            axis, sign = words["axis"], words["sign"]
            across = max(abs(distance) for distance in gap(other.id, target.id, 1 - axis))
            clear = gap(other.id, target.id, axis, sign)[0] > max(CLEAR, across)
            if clear and all(gap(other.id, i, axis, sign)[1] < 0.0 for i in rest):
                return self._singular(
                    target, noun, after=f"{pick(self.rng, words['relation'])} {anchor}"
                )
        return None

    def _between(self, target: ObjectFacts, noun: str, ids: frozenset[int]) -> Phrase | None:
        others = [other for other in self.objects.all if other.id not in ids]
        if len(others) < 2:
            return None
        first, last = (others[int(i)] for i in self.rng.choice(len(others), 2, replace=False))
        names = self.anchor(first), self.anchor(last)
        between = partial(self.objects.between, first.id, last.id)
        if (
            None in names
            or not between(target.id, BETWEEN)
            or any(between(i, -0.05) for i in ids - {target.id})
        ):
            return None
        return self._singular(target, noun, after=f"between {names[0]} and {names[1]}")

    def _occlusion(self, target: ObjectFacts) -> Phrase | None:
        """Behind or in front of another object, or in full view where the others of its class are not.

        No phrase says that its target is partly hidden: that would make the query amodal (docs/intent.md).
        """
        if (named := self._noun(target)) is None:
            return None
        noun, ids = named
        others = self._others(target, ids)
        draw = self.rng.random()
        behind = draw < 0.7

        def related(one: ObjectFacts, other: ObjectFacts) -> bool:
            return other.id in one.hidden_by if behind else one.id in other.hidden_by

        partners = [
            other for other in self.objects.all if other.id not in ids and related(target, other)
        ]
        partners = [other for other in partners if (target if behind else other).partly_hidden]
        if draw < 0.2 or not partners:
            if (
                not others
                or target.occlusion != 0
                or not all(other.occlusion > 0.1 for other in others)
            ):
                return None
            return self._singular(
                target, noun, after=pick(self.rng, self.words["occlusion"]["clear"])
            )
        other = pick(self.rng, partners)
        anchor = self.anchor(other)
        if anchor is None or any(related(one, other) for one in others):
            return None
        words = self.words["occlusion"]
        relations = words["behind"] if behind else words["in_front"]
        if behind and not is_plural(noun):
            relations = relations + words["behind_singular"]
        return self._singular(target, noun, after=f"{pick(self.rng, relations)} {anchor}")

    def _reasoning(self, target: ObjectFacts) -> Phrase | None:
        """The use of an object, or of all objects with that use, without their class."""
        if not self.objects.in_lexicon:
            return self._use_or_idea(target)
        category = self.objects.category[target.id]
        groups = [meaning for meaning in lexicon().groups.values() if category in meaning.classes]
        meaning = (
            self.objects.meaning[target.id]
            if self.rng.random() < 0.6 or not groups
            else pick(self.rng, groups)
        )
        ids = tuple(sorted(self.objects.meant_by(meaning)))
        clauses = meaning.held_out_functions if self.held_out else meaning.functions
        if not 1 <= len(ids) <= 5 or not clauses:
            return None
        lead, _, clause = pick(self.rng, clauses).rpartition(" | ")
        words, many = self.words["reasoning"], len(ids) > 1
        heads = words["all"] if many else words["one"]
        if not many and not clause.startswith(tuple(words["not_after_what"])):
            heads = [*heads, "what"]
        head = pick(self.rng, heads)
        if head == "what":
            clause = clause.removeprefix("that ")
        return Phrase(f"{head} {clause}", ids, many, lead=lead, reasoning=True)

    def _use_or_idea(self, target: ObjectFacts) -> Phrase | None:
        """The same for objects with uses and ideas of their own. All need some, else any phrase could mean the rest."""
        if not all(facts.uses or facts.ideas for facts in self.objects.all):
            return None
        names = {word for name in self.objects.category.values() for word in name.split()}
        ideas = [
            idea  # whose words do not begin like a class name: "sunny" and "sun"
            for idea in target.ideas
            if not any(
                word.startswith(name) or name.startswith(word)
                for word in idea.split()
                for name in names
            )
        ]
        if not (known := [*target.uses, *ideas]):
            return None
        chosen = pick(self.rng, known)
        ids = tuple(
            i
            for i, facts in sorted(self.objects.by_id.items())
            if chosen in (*facts.uses, *facts.ideas)
        )
        words, many = self.words["reasoning"], len(ids) > 1
        head = pick(self.rng, words["several"] if many else words["one"])
        if chosen in ideas:
            clauses = words["held_out_ideas"] if self.held_out else words["ideas"]
            chosen = pick(self.rng, clauses).format(has="have" if many else "has", idea=chosen)
        elif many and chosen.startswith("that "):
            return None  # its verb is for one
        return Phrase(f"{head} {chosen}", ids, many, reasoning=True) if len(ids) <= 5 else None

    def _several(self, target: ObjectFacts) -> Phrase | None:
        """All of a class, all of a colour or pattern, or two objects named in one breath."""
        draw = self.rng.random()
        if draw < 0.35:
            return self._two_names(target)
        if (named := self._noun(target, anything=draw < 0.5 and self.objects.in_lexicon)) is None:
            return None
        noun, ids = named
        any_noun = noun in self.words["anything"]
        options = [(target.colour, None), (None, target.pattern)] + (
            [] if any_noun else [(None, None)] * 2
        )
        colour, pattern = pick(self.rng, options)
        noun_alone = colour is None and pattern is None
        found = self.objects.matching(ids, colour, pattern)
        seen = [self.objects.by_id[i] for i in found]
        unknown = any(
            (colour and not facts.colour) or (pattern and not facts.pattern) for facts in seen
        )
        if not 2 <= len(found) <= (50 if noun_alone else 5) or unknown or (any_noun and noun_alone):
            return None
        before, after = self._adjectives(colour, pattern)
        bare = _joined(before, plural(noun), after)
        return Phrase(
            f"{pick(self.rng, self._determiners(noun, len(found)))} {bare}", found, True, bare=bare
        )

    def _determiners(self, noun: str, count: int) -> list[str]:
        """What may stand before the plural of a noun that means all `count` objects."""
        words = self.words["determiners"]
        if is_plural(noun) or not 2 <= count <= 5:
            return words["always"]
        return (
            words["always"] + words["unchanged" if plural(noun) == noun else "changed"][count - 2]
        )

    def _two_names(self, target: ObjectFacts) -> Phrase | None:
        others = [other for other in self.objects.all if other.id != target.id] or [target]
        first, second = self._name(target), self._name(pick(self.rng, others))
        if first is None or second is None or first.ids == second.ids:
            return None
        start = "both " if self.rng.random() < 0.2 else ""
        return Phrase(
            f"{start}{first.text} and {second.text}", tuple(sorted(first.ids + second.ids)), True
        )


def _joined(*words: str | None) -> str:
    return " ".join(word for word in words if word)
