"""Phrases that pick exactly their targets: "the red mug", "the mug behind the book".

A phrase is used only if its literal meaning fits its targets and no other object of the image.
Positions and sizes need a clear margin.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from r2sm_jax.synthetic.queries.nouns import (
    LexiconEntry,
    clean_name,
    is_plural,
    lexicon,
    lexicon_entry,
    plural,
    read_toml,
)
from r2sm_jax.synthetic.queries.objects import ImageObjects, ObjectFacts, is_clearly_larger
from r2sm_jax.synthetic.random_choice import pick

MAX_ATTEMPTS = 3  # to write a phrase of one kind about one target
MIN_DIRECTION_GAP = 0.20  # margin of a position, in extents of all objects together
MIN_BETWEEN_GAP = 0.12  # margin of a position between two objects
MAX_BETWEEN_DOUBT = 0.05  # from which another object may lie between them as well
MIN_HIDDEN_OF_OTHERS = 0.1  # share that is hidden of all others where one is "in full view"
MAX_TARGETS = 5  # of a phrase that does not name a class
MAX_TARGETS_OF_CLASS = 50

Named = tuple[str, frozenset[int]]
"""A noun and the ids of all objects that it could mean."""


@dataclass(frozen=True)
class Phrase:
    """Words that pick exactly the objects `ids`.

    `plural`: takes "are". `bare`: the text after "the". `lead`: a sentence before it. `reasoning`:
    names no class.
    """

    text: str
    ids: tuple[int, ...]
    plural: bool = False
    bare: str | None = None
    possessive: str | None = None
    lead: str = ""
    reasoning: bool = False


class PhraseWriter:
    """Writes random phrases for the objects of one image, in training words or held-out ones."""

    def __init__(self, objects: ImageObjects, rng: np.random.Generator, held_out: bool):
        self.objects = objects
        self.rng = rng
        self.held_out = held_out
        self.words = read_toml("phrases.toml")
        # Anchors are asked for often, and finding them draws no random number.
        self._anchors: dict[int, list[str]] = {}

    def phrase(self, allowed_ids: Set[int]) -> Phrase | None:
        """A phrase for a random target of these, in half of the draws for a partly hidden one.

        None if that fails.
        """
        prefer_hidden = self.rng.random() < 0.5
        allowed = [facts for facts in self.objects.all if facts.id in allowed_ids]
        preferred = [facts for facts in allowed if facts.is_partly_hidden == prefer_hidden]
        target = pick(self.rng, preferred or allowed)

        # One draw for the kind and up to MAX_ATTEMPTS of its writer: the order of the draws is what
        # keeps the sentences of a seed the same.
        shares = (
            (0.45, self._name),
            (0.15, self._position),
            (0.15, self._occlusion),
            (0.15, self._reasoning),
            (0.10, self._several),
        )
        draw = self.rng.random()
        for share, write in shares:
            draw -= share
            if draw < 0:
                for _ in range(MAX_ATTEMPTS):
                    phrase = write(target)
                    if phrase is not None:
                        return phrase
                return None
        return None

    def absent(self, category: str) -> Phrase | None:
        """The name of a class that the image lacks; None if it could mean another object."""
        entry = lexicon_entry(clean_name(category))
        nouns = [noun for noun in self._nouns(entry) if not self.objects.named(noun)]
        if not nouns:
            return None
        noun = pick(self.rng, nouns)
        many = is_plural(noun)
        return Phrase(f"the {noun}", (), many, bare=None if many else noun)

    def anchor(self, other: ObjectFacts) -> str | None:
        """A short unique singular name of another object, to relate a target to: "the red mug"."""
        if other.id not in self._anchors:
            names = []
            for noun in self._nouns(self.objects.entry[other.id]):
                for colour in (None, other.colour):
                    ids = self.objects.matching(self.objects.named(noun), colour, None)
                    if ids == (other.id,) and not is_plural(noun):
                        names.append(_join("the", colour, noun))
            self._anchors[other.id] = names
        names = self._anchors[other.id]
        return pick(self.rng, names) if names else None

    # Nouns and adjectives.

    def _nouns(self, entry: LexiconEntry) -> Sequence[str]:
        return entry.held_out_nouns if self.held_out else entry.nouns

    def _noun(self, target: ObjectFacts, for_anything: bool = False) -> Named | None:
        """A noun for a target and all objects that it could mean; now and then the noun of a group.

        `for_anything`: a noun for any object at all.
        """
        if for_anything:
            return pick(self.rng, self.words["anything"]), frozenset(self.objects.by_id)

        if self.objects.in_lexicon and self.rng.random() < 0.08:
            for group in lexicon().groups.values():
                nouns = self._nouns(group)
                ids = self.objects.described_by(group)
                if nouns and target.id in ids:
                    return pick(self.rng, nouns), ids

        nouns = self._nouns(self.objects.entry[target.id])
        if not nouns:
            return None
        noun = pick(self.rng, nouns)
        return noun, self.objects.named(noun)

    def _adjectives(self, colour: str | None, pattern: str | None) -> tuple[str, str]:
        """Words before and after a noun: "red" mug "with stripes"."""
        if pattern is None:
            return _join(colour), ""
        words = lexicon().patterns.get(pattern, {"before": [pattern], "after": []})
        if words["after"] and self.rng.random() < 0.35:
            return _join(colour), pick(self.rng, words["after"])
        return _join(pick(self.rng, words["before"]), colour), ""

    def _singular(
        self, target: ObjectFacts, noun: str, before: str = "", after: str = ""
    ) -> Phrase:
        """The phrase for one object: "the" and its noun, with words before and after that."""
        many = is_plural(noun)
        bare = _join(before, noun, after)
        possessive = None
        if not after and " of " not in noun:
            possessive = f"the {bare}'" if many and bare.endswith("s") else f"the {bare}'s"
        return Phrase(f"the {bare}", (target.id,), many, None if many else bare, possessive)

    def _others(self, target: ObjectFacts, ids: frozenset[int]) -> list[ObjectFacts]:
        return [self.objects.by_id[i] for i in ids if i != target.id]

    # Phrases for one object by its name.

    def _name(self, target: ObjectFacts) -> Phrase | None:
        """Class, colour and pattern: "the red mug", "the striped thing"."""
        has_looks = self.objects.in_lexicon and bool(target.colour or target.pattern)
        named = self._noun(target, for_anything=has_looks and self.rng.random() < 0.06)
        if named is None:
            return None
        noun, ids = named

        # What stands twice is picked twice as often. "Plain" is rarely said.
        options = [(None, None), (None, None), (target.colour, None), (target.colour, None)]
        if target.pattern not in (None, "plain") or self.rng.random() >= 0.8:
            options += [(None, target.pattern), (target.colour, target.pattern)]
        if noun in self.words["anything"]:
            options = [option for option in options if option != (None, None)]

        unique = [
            (colour, pattern)
            for colour, pattern in options
            if self.objects.matching(ids, colour, pattern) == (target.id,)
        ]
        if not unique:
            return None
        before, after = self._adjectives(*pick(self.rng, unique))
        return self._singular(target, noun, before, after)

    # Phrases for one object by its size or position.

    def _position(self, target: ObjectFacts) -> Phrase | None:
        """Size or position among its class, or a position relative to other objects."""
        named = self._noun(target)
        if named is None:
            return None
        noun, ids = named
        draw = self.rng.random()
        if draw >= 0.88:
            return self._between(target, noun, ids)
        if draw >= 0.6:
            return self._relation(target, noun, ids)

        others = self._others(target, ids)
        if not others:
            return None
        if draw < 0.3:
            return self._size(target, noun, others)
        return self._outermost(target, noun, others)

    def _size(self, target: ObjectFacts, noun: str, others: Sequence[ObjectFacts]) -> Phrase | None:
        if is_plural(noun):
            return None
        of_two = len(others) == 1
        if all(is_clearly_larger(target, other) for other in others):
            degree = "larger" if of_two else "largest"
        elif all(is_clearly_larger(other, target) for other in others):
            degree = "smaller" if of_two else "smallest"
        else:
            return None
        return self._singular(target, noun, before=pick(self.rng, self.words["size"][degree]))

    def _outermost(
        self, target: ObjectFacts, noun: str, others: Sequence[ObjectFacts]
    ) -> Phrase | None:
        for words in self.words["direction"]:
            gaps = [
                self.objects.gap(other.id, target.id, words["axis"], words["sign"])[0]
                for other in others
            ]
            if min(gaps) > MIN_DIRECTION_GAP:
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

        gap = self.objects.gap
        rest = ids - {target.id, other.id}
        for words in self.words["direction"]:
            axis, sign = words["axis"], words["sign"]
            # The target lies further in this direction than to the side.
            sideways = max(abs(distance) for distance in gap(other.id, target.id, 1 - axis))
            min_gap = max(MIN_DIRECTION_GAP, sideways)
            is_clear = gap(other.id, target.id, axis, sign)[0] > min_gap
            if is_clear and all(gap(other.id, i, axis, sign)[1] < 0.0 for i in rest):
                relation = pick(self.rng, words["relation"])
                return self._singular(target, noun, after=f"{relation} {anchor}")
        return None

    def _between(self, target: ObjectFacts, noun: str, ids: frozenset[int]) -> Phrase | None:
        others = [other for other in self.objects.all if other.id not in ids]
        if len(others) < 2:
            return None
        first, last = (others[int(i)] for i in self.rng.choice(len(others), 2, replace=False))
        first_name = self.anchor(first)
        last_name = self.anchor(last)
        if first_name is None or last_name is None:
            return None
        if not self.objects.is_between(first.id, last.id, target.id, MIN_BETWEEN_GAP):
            return None
        for i in ids - {target.id}:
            if self.objects.could_be_between(first.id, last.id, i, -MAX_BETWEEN_DOUBT):
                return None
        return self._singular(target, noun, after=f"between {first_name} and {last_name}")

    # Phrases for one object by what hides it or what it hides.

    def _occlusion(self, target: ObjectFacts) -> Phrase | None:
        """Behind or in front of another object, or in full view unlike the others of its class.

        No phrase says that its target is partly hidden: that would make the query amodal
        (docs/intent.md).
        """
        named = self._noun(target)
        if named is None:
            return None
        noun, ids = named
        others = self._others(target, ids)
        draw = self.rng.random()
        behind = draw < 0.7

        def is_related(one: ObjectFacts, other: ObjectFacts) -> bool:
            return other.id in one.hidden_by if behind else one.id in other.hidden_by

        partners = []
        for other in self.objects.all:
            hidden = target if behind else other
            if other.id not in ids and is_related(target, other) and hidden.is_partly_hidden:
                partners.append(other)

        if draw < 0.2 or not partners:
            return self._in_full_view(target, noun, others)

        other = pick(self.rng, partners)
        anchor = self.anchor(other)
        if anchor is None or any(is_related(one, other) for one in others):
            return None
        words = self.words["occlusion"]
        relations = words["behind"] if behind else words["in_front"]
        if behind and not is_plural(noun):
            relations = relations + words["behind_singular"]
        return self._singular(target, noun, after=f"{pick(self.rng, relations)} {anchor}")

    def _in_full_view(
        self, target: ObjectFacts, noun: str, others: Sequence[ObjectFacts]
    ) -> Phrase | None:
        if not others or target.occlusion != 0:
            return None
        if not all(other.occlusion > MIN_HIDDEN_OF_OTHERS for other in others):
            return None
        return self._singular(target, noun, after=pick(self.rng, self.words["occlusion"]["clear"]))

    # Phrases that do not name the class.

    def _reasoning(self, target: ObjectFacts) -> Phrase | None:
        """The use of an object, or of all objects with that use, without their class."""
        if not self.objects.in_lexicon:
            return self._use_or_idea(target)

        category = self.objects.category[target.id]
        groups = [group for group in lexicon().groups.values() if category in group.classes]
        if self.rng.random() < 0.6 or not groups:
            entry = self.objects.entry[target.id]
        else:
            entry = pick(self.rng, groups)
        ids = tuple(sorted(self.objects.described_by(entry)))
        clauses = entry.held_out_functions if self.held_out else entry.functions
        if not 1 <= len(ids) <= MAX_TARGETS or not clauses:
            return None

        lead, _, clause = pick(self.rng, clauses).rpartition(" | ")
        words = self.words["reasoning"]
        many = len(ids) > 1
        if many:
            heads = words["all"]
        elif clause.startswith(tuple(words["not_after_what"])):
            heads = words["one"]
        else:
            heads = [*words["one"], "what"]
        head = pick(self.rng, heads)
        if head == "what":
            clause = clause.removeprefix("that ")
        return Phrase(f"{head} {clause}", ids, many, lead=lead, reasoning=True)

    def _use_or_idea(self, target: ObjectFacts) -> Phrase | None:
        """A use or an idea of the target's own.

        All objects need some, else any phrase could mean the rest.
        """
        if not all(facts.uses or facts.ideas for facts in self.objects.all):
            return None
        names = set(" ".join(self.objects.category.values()).split())
        ideas = [idea for idea in target.ideas if not _resembles(idea, names)]
        choices = [*target.uses, *ideas]
        if not choices:
            return None

        words = pick(self.rng, choices)
        ids = tuple(
            i
            for i, facts in sorted(self.objects.by_id.items())
            if words in facts.uses or words in facts.ideas
        )
        many = len(ids) > 1
        templates = self.words["reasoning"]
        head = pick(self.rng, templates["several"] if many else templates["one"])
        if words in ideas:
            clauses = templates["held_out_ideas"] if self.held_out else templates["ideas"]
            words = pick(self.rng, clauses).format(has="have" if many else "has", idea=words)
        elif many and words.startswith("that "):
            return None  # its verb is for one
        if len(ids) > MAX_TARGETS:
            return None
        return Phrase(f"{head} {words}", ids, many, reasoning=True)

    # Phrases for several objects.

    def _several(self, target: ObjectFacts) -> Phrase | None:
        """All of a class, all of a colour or pattern, or two objects named in one breath."""
        draw = self.rng.random()
        if draw < 0.35:
            return self._two_names(target)
        named = self._noun(target, for_anything=draw < 0.5 and self.objects.in_lexicon)
        if named is None:
            return None
        noun, ids = named

        # A class alone is twice as likely, but "all the things" alone means nothing.
        means_anything = noun in self.words["anything"]
        options = [(target.colour, None), (None, target.pattern)]
        if not means_anything:
            options += [(None, None), (None, None)]
        colour, pattern = pick(self.rng, options)
        has_adjective = colour is not None or pattern is not None
        if means_anything and not has_adjective:
            return None

        matching = self.objects.matching(ids, colour, pattern)
        max_targets = MAX_TARGETS if has_adjective else MAX_TARGETS_OF_CLASS
        if not 2 <= len(matching) <= max_targets:
            return None
        for i in matching:
            facts = self.objects.by_id[i]
            if (colour and not facts.colour) or (pattern and not facts.pattern):
                return None  # it may have another one

        before, after = self._adjectives(colour, pattern)
        bare = _join(before, plural(noun), after)
        determiner = pick(self.rng, self._determiners(noun, len(matching)))
        return Phrase(f"{determiner} {bare}", matching, plural=True, bare=bare)

    def _determiners(self, noun: str, count: int) -> list[str]:
        """What may stand before the plural of a noun that means all `count` objects."""
        words = self.words["determiners"]
        if is_plural(noun) or not 2 <= count <= 5:
            return words["always"]
        by_count = words["unchanged"] if plural(noun) == noun else words["changed"]
        return words["always"] + by_count[count - 2]

    def _two_names(self, target: ObjectFacts) -> Phrase | None:
        others = [other for other in self.objects.all if other.id != target.id] or [target]
        first = self._name(target)
        second = self._name(pick(self.rng, others))
        if first is None or second is None or first.ids == second.ids:
            return None
        start = "both " if self.rng.random() < 0.2 else ""
        ids = tuple(sorted(first.ids + second.ids))
        return Phrase(f"{start}{first.text} and {second.text}", ids, plural=True)


def _resembles(idea: str, names: Set[str]) -> bool:
    """Whether a word of an idea and a class name begin alike: "sunny" and "sun"."""
    for word in idea.split():
        for name in names:
            if word.startswith(name) or name.startswith(word):
                return True
    return False


def _join(*words: str | None) -> str:
    return " ".join(word for word in words if word)
