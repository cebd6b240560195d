"""Which things a query means, and words that pick exactly those.

A phrase is used only when its meaning, evaluated on every thing in the scene, gives the target and nothing
else. Positions and sizes need a clear margin. What is unknown, such as the colours of a photo, is never
relied on.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from r2sm_jax.queries.nouns import (
    CLASSES,
    GROUPS,
    PATTERNS,
    Meaning,
    clean_name,
    could_mean,
    is_plural,
    plural,
)
from r2sm_jax.queries.objects import HIDDEN, ObjectFacts, Phrase, pick

# How often each kind of target is tried; the kinds are methods of `Scene`.
SHARES = {
    "name": 0.45,  # class or synonym, with colour or pattern
    "place": 0.15,  # size, position, relation to another thing
    "occlusion": 0.15,  # behind, in front of, partly hidden
    "reasoning": 0.15,  # function or context, the class is not named
    "several": 0.10,  # more than one thing, named
}
CLEAR = 0.20  # margin of a position, in extents of the scene

IDEAS = (
    ("that {0} to do with {1}", "one thinks of at the word {1}", "connected with {1}"),
    ("one would associate with {1}", "related to {1}"),
)
"""Words of training, and held out from it, for what things bring to mind."""
THINGS = ("thing", "object", "item")  # nouns for anything at all


class Scene:
    """The things of one image and the phrases that single some of them out."""

    def __init__(self, things: Sequence[ObjectFacts], rng: np.random.Generator, held_out: bool):
        self.things = {thing.id: thing for thing in things}
        self.rng = rng
        self.held_out = held_out
        self.category = {thing.id: clean_name(thing.category) for thing in things}
        self.drawn = all(name in CLASSES for name in self.category.values())
        x0, y0, x1, y1 = zip(*(thing.box for thing in things), strict=True)
        self.extent = (max(1.0, max(x1) - min(x0)), max(1.0, max(y1) - min(y0)))
        self.centres = {thing.id: self._centres(thing) for thing in things}
        self._named: dict[str, frozenset[int]] = {}
        self._plain: dict[int, list[str]] = {}

    def _centres(self, thing: ObjectFacts) -> list[tuple[float, float]]:
        """Centre of the whole and of the visible box, in extents of the scene."""
        boxes = [thing.box] + ([thing.visible_box] if thing.visible_box else [])
        width, height = self.extent
        return [((b[0] + b[2]) / 2 / width, (b[1] + b[3]) / 2 / height) for b in boxes]

    # Nouns and names

    def nouns(self, thing: ObjectFacts) -> tuple[str, ...]:
        """The nouns of this split for a thing."""
        meaning = CLASSES.get(self.category[thing.id])
        if meaning is None:
            return (self.category[thing.id],) if self.category[thing.id] else ()
        return meaning.held_out_nouns if self.held_out else meaning.nouns

    def named(self, noun: str) -> frozenset[int]:
        """The things that a noun could mean, in any split's vocabulary."""
        if noun not in self._named:
            self._named[noun] = frozenset(i for i in self.things if could_mean(noun, self.category[i]))
        return self._named[noun]

    def matching(self, ids: Iterable[int], colour: str | None, pattern: str | None) -> tuple[int, ...]:
        """Those of `ids` that could have a colour and a pattern; what is unknown could be anything."""
        return tuple(
            i
            for i in sorted(ids)
            if (colour is None or self.things[i].colour in (colour, None))
            and (pattern is None or self.things[i].pattern in (pattern, None))
        )

    def described(self, noun: str, colour: str | None, pattern: str | None) -> str:
        """A noun with its adjectives, or with words after it: "red mug with stripes"."""
        after = ""
        if pattern is not None:
            before_words, after_words = PATTERNS.get(pattern, ((pattern,), ()))
            if after_words and self.rng.random() < 0.35:
                after, pattern = " " + pick(self.rng, after_words), None
            else:
                pattern = pick(self.rng, before_words)
        return " ".join(word for word in (pattern, colour, noun) if word) + after

    def singular(self, bare: str, ids: tuple[int, ...], noun: str, simple: bool = True, **more: Any) -> Phrase:
        """A phrase for one thing: "the" and `bare`."""
        many = is_plural(noun)
        owner = f"the {bare}'" if bare.endswith("s") and many else f"the {bare}'s"
        simple = simple and bare.endswith(noun) and " of " not in noun
        return Phrase(f"the {bare}", ids, many, None if many else bare, owner if simple else None, **more)

    def class_words(self, thing: ObjectFacts) -> tuple[str, frozenset[int]] | None:
        """A noun for a thing and all that the noun could mean; now and then the noun of its group."""
        rng = self.rng
        if self.drawn and rng.random() < 0.08:
            for meaning in GROUPS.values():
                nouns = meaning.held_out_nouns if self.held_out else meaning.nouns
                ids = self.in_group(meaning)
                if nouns and thing.id in ids:
                    return pick(rng, nouns), ids
        nouns = self.nouns(thing)
        if not nouns:
            return None
        noun = pick(rng, nouns)
        return noun, self.named(noun)

    def in_group(self, meaning: Meaning) -> frozenset[int]:
        """The things of a group or class; none where another thing makes its words doubtful."""
        if any(name in meaning.unless for name in self.category.values()):
            return frozenset()
        return frozenset(i for i, name in self.category.items() if name in meaning.classes)

    def name(self, thing: ObjectFacts) -> Phrase | None:
        """Class, colour and pattern: "the red mug", "the striped thing"."""
        rng = self.rng
        if self.drawn and (thing.colour or thing.pattern) and rng.random() < 0.06:
            noun, ids = pick(rng, THINGS), frozenset(self.things)
        else:
            words = self.class_words(thing)
            if words is None:
                return None
            noun, ids = words
        plain = thing.pattern in (None, "plain") and rng.random() < 0.8
        options = [(None, None), (None, None), (thing.colour, None), (thing.colour, None)]
        if not plain:
            options += [(None, thing.pattern), (thing.colour, thing.pattern)]
        unique = [option for option in options if self.matching(ids, *option) == (thing.id,)]
        if noun in THINGS:
            unique = [option for option in unique if option != (None, None)]
        if not unique:
            return None
        return self.singular(self.described(noun, *pick(rng, unique)), (thing.id,), noun)

    def anchor(self, thing: ObjectFacts) -> str | None:
        """A short unique singular name of another thing, to relate a target to: "the red mug"."""
        if thing.id not in self._plain:
            self._plain[thing.id] = [
                " ".join(word for word in ("the", colour, noun) if word)
                for noun in self.nouns(thing)
                for colour in (None, thing.colour)
                if not is_plural(noun) and self.matching(self.named(noun), colour, None) == (thing.id,)
            ]
        names = self._plain[thing.id]
        return pick(self.rng, names) if names else None

    # Place and size

    def place(self, thing: ObjectFacts) -> Phrase | None:
        """Size or position among its class, or a place relative to other things."""
        words = self.class_words(thing)
        if words is None:
            return None
        noun, ids = words
        draw = self.rng.random()
        if draw < 0.3:
            return self._size(thing, noun, ids)
        if draw < 0.6:
            return self._outermost(thing, noun, ids)
        return self._relation(thing, noun, ids) if draw < 0.88 else self._between(thing, noun, ids)

    def _size(self, thing: ObjectFacts, noun: str, ids: frozenset[int]) -> Phrase | None:
        others = [self.things[i] for i in ids if i != thing.id]
        if not others or is_plural(noun):
            return None

        def larger(a: ObjectFacts, b: ObjectFacts) -> bool:
            return a.area > 1.4 * b.area and a.area * (1 - a.occlusion) > 1.1 * b.area * (1 - b.occlusion)

        two = len(others) == 1
        if all(larger(thing, other) for other in others):
            words = ("bigger", "larger") if two else ("biggest", "largest")
        elif all(larger(other, thing) for other in others):
            words = ("smaller",) if two else ("smallest", "tiniest")
        else:
            return None
        return self.singular(f"{pick(self.rng, words)} {noun}", (thing.id,), noun)

    def _outermost(self, thing: ObjectFacts, noun: str, ids: frozenset[int]) -> Phrase | None:
        others = [i for i in ids if i != thing.id]
        if not others:
            return None
        for axis, sign, adjective, after in (
            (0, -1, "leftmost", ("on the left", "furthest to the left")),
            (0, 1, "rightmost", ("on the right", "furthest to the right")),
            (1, -1, "topmost", ("at the top", "highest up")),
            (1, 1, "lowest", ("at the bottom", "lowest down")),
        ):
            if all(self._gap(i, thing.id, axis, sign)[0] > CLEAR for i in others):
                if self.rng.random() < 0.4:
                    return self.singular(f"{adjective} {noun}", (thing.id,), noun)
                return self.singular(f"{noun} {pick(self.rng, after)}", (thing.id,), noun, simple=False)
        return None

    def _gap(self, start: int, end: int, axis: int, sign: int) -> tuple[float, float]:
        """Least and greatest distance from one centre to another along an axis."""
        gaps = [sign * (b[axis] - a[axis]) for a in self.centres[start] for b in self.centres[end]]
        return min(gaps), max(gaps)

    def _relation(self, thing: ObjectFacts, noun: str, ids: frozenset[int]) -> Phrase | None:
        other = pick(self.rng, list(self.things.values()))
        anchor = None if other.id in ids else self.anchor(other)
        if anchor is None:
            return None
        for axis, sign, relations in (
            (0, -1, ("to the left of", "left of")),
            (0, 1, ("to the right of", "right of")),
            (1, -1, ("above", "higher up than")),
            (1, 1, ("below", "lower down than")),
        ):
            across = max(abs(gap) for gap in self._gap(other.id, thing.id, 1 - axis, 1))
            if self._gap(other.id, thing.id, axis, sign)[0] > max(CLEAR, across) and all(
                self._gap(other.id, i, axis, sign)[1] < 0.0 for i in ids if i not in (thing.id, other.id)
            ):
                words = f"{noun} {pick(self.rng, relations)} {anchor}"
                return self.singular(words, (thing.id,), noun, simple=False)
        return None

    def _between(self, thing: ObjectFacts, noun: str, ids: frozenset[int]) -> Phrase | None:
        others = [t for t in self.things.values() if t.id not in ids]
        if len(others) < 2:
            return None
        first, second = (others[int(i)] for i in self.rng.choice(len(others), 2, replace=False))

        def inside(i: int, margin: float) -> bool:
            ends = [self._gap(first.id, i, 0, 1), self._gap(i, second.id, 0, 1)]
            level = [self._gap(first.id, i, 1, 1), self._gap(second.id, i, 1, 1)]
            if margin > 0:
                return min(e[0] for e in ends) > margin and all(v[0] > -0.2 and v[1] < 0.2 for v in level)
            return min(e[1] for e in ends) > margin

        names = self.anchor(first), self.anchor(second)
        if None in names or not inside(thing.id, 0.12) or any(inside(i, -0.05) for i in ids if i != thing.id):
            return None
        return self.singular(f"{noun} between {names[0]} and {names[1]}", (thing.id,), noun, simple=False)

    # Occlusion

    def occlusion(self, thing: ObjectFacts) -> Phrase | None:
        """Behind or in front of another thing, or partly hidden where the others of its class are not."""
        words = self.class_words(thing)
        if words is None:
            return None
        noun, ids = words
        draw = self.rng.random()
        if draw < 0.2:
            return self._hidden_or_clear(thing, noun, ids)
        behind = draw < 0.7
        if behind and thing.occlusion >= HIDDEN:
            partners = [self.things[i] for i in thing.hidden_by if i in self.things and i not in ids]
        else:
            rest = [t for t in self.things.values() if t.id not in ids and t.occlusion >= HIDDEN]
            partners = [] if behind else [t for t in rest if thing.id in t.hidden_by]
        if not partners:
            return self._hidden_or_clear(thing, noun, ids)
        other = pick(self.rng, partners)
        rest = [self.things[i] for i in ids if i != thing.id]
        linked = any(other.id in t.hidden_by if behind else t.id in other.hidden_by for t in rest)
        anchor = self.anchor(other)
        if anchor is None or linked:
            return None
        if behind:
            relations = ["behind"] * 3 + ["partly hidden by", "partially covered by"]
            relations += ["standing behind", "peeking out from behind"] if not is_plural(noun) else []
        else:
            relations = ["in front of"] * 3
            relations += ["hiding part of", "covering part of", "partly blocking the view of"]
        return self.singular(f"{noun} {pick(self.rng, relations)} {anchor}", (thing.id,), noun, simple=False)

    def _hidden_or_clear(self, thing: ObjectFacts, noun: str, ids: frozenset[int]) -> Phrase | None:
        rest = [self.things[i] for i in ids if i != thing.id]
        if not rest:
            return None
        if thing.occlusion > 0.1 and all(other.occlusion < 0.01 for other in rest):
            words = ["partly hidden", "partially hidden", "partially covered", "partly obscured", "occluded"]
            return self.singular(f"{pick(self.rng, words)} {noun}", (thing.id,), noun)
        if thing.occlusion == 0 and all(other.occlusion > 0.1 for other in rest):
            after = ["in full view", "that nothing hides", "with nothing in front"]
            return self.singular(f"{noun} {pick(self.rng, after)}", (thing.id,), noun, simple=False)
        return None

    def reasoning(self, thing: ObjectFacts) -> Phrase | None:
        """What a thing, or all things with the same use, are for. The class is not named."""
        if not self.drawn:
            return self._use_or_idea(thing)
        mine = self.category[thing.id]
        meanings = [meaning for meaning in GROUPS.values() if mine in meaning.classes]
        meaning = CLASSES[mine] if self.rng.random() < 0.6 else pick(self.rng, meanings)
        ids = tuple(sorted(self.in_group(meaning)))
        if not 1 <= len(ids) <= 5:
            return None
        clauses = meaning.held_out_functions if self.held_out else meaning.functions
        lead, _, clause = pick(self.rng, clauses).rpartition(" | ")
        many = len(ids) > 1
        heads = ["the things", "all the things", "the objects"] if many else ["the thing", "the object"]
        if not many and not clause.startswith(("to ", "made ", "needed ", "with ")):
            heads += ["what"]
        head = pick(self.rng, heads)
        text = f"what {clause.removeprefix('that ')}" if head == "what" else f"{head} {clause}"
        return Phrase(text, ids, many, lead=lead, reasoning=True)

    def _use_or_idea(self, thing: ObjectFacts) -> Phrase | None:
        """The same for things whose source tells uses or ideas; one that tells neither could be meant by any."""
        if not all(t.uses or t.ideas for t in self.things.values()):
            return None
        named = tuple({word for name in self.category.values() for word in name.split()})
        ideas = [
            idea
            for idea in thing.ideas
            if not any(word.startswith(named) or any(n.startswith(word) for n in named) for word in idea.split())
        ]
        told = [*thing.uses, *ideas]
        if not told:
            return None
        chosen = pick(self.rng, told)
        ids = tuple(i for i, t in sorted(self.things.items()) if chosen in t.uses or chosen in t.ideas)
        many = len(ids) > 1
        head = pick(self.rng, ("the things", "the objects") if many else ("the thing", "the object"))
        if chosen in ideas:
            chosen = pick(self.rng, IDEAS[self.held_out]).format("have" if many else "has", chosen)
        elif many and chosen.startswith("that "):
            return None  # its verb is for one
        return Phrase(f"{head} {chosen}", ids, many, reasoning=True) if len(ids) <= 5 else None

    def several(self, thing: ObjectFacts) -> Phrase | None:
        """All of a class, all of a colour or pattern, or two things named in one breath."""
        rng = self.rng
        draw = rng.random()
        if draw < 0.35:
            return self._two_names(thing)
        if draw < 0.5 and self.drawn:
            noun, ids = pick(rng, THINGS), frozenset(self.things)
        else:
            words = self.class_words(thing)
            if words is None:
                return None
            noun, ids = words
        options = [(thing.colour, None), (None, thing.pattern)]
        if noun not in THINGS:
            options += [(None, None), (None, None)]
        colour, pattern = option = pick(rng, options)
        found = self.matching(ids, *option)
        unknown = any((colour and not self.things[i].colour) or (pattern and not self.things[i].pattern) for i in found)
        most = 50 if option == (None, None) else 5
        if not 2 <= len(found) <= most or unknown or (noun in THINGS and most == 50):
            return None
        bare = self.described(plural(noun), *option)
        number = ("two", "three", "four", "five", "")[min(len(found), 6) - 2]
        starts = ["all the"]
        if number and not is_plural(noun):
            starts += [f"the {number}"] if len(found) == 2 else []
            if plural(noun) != noun:
                starts += ["the", "all", *(("both the", "both") if len(found) == 2 else (f"all {number}",))]
        return Phrase(f"{pick(rng, starts)} {bare}", found, True, bare=bare)

    def _two_names(self, thing: ObjectFacts) -> Phrase | None:
        rest = [t for t in self.things.values() if t.id != thing.id] or [thing]
        first, second = self.name(thing), self.name(pick(self.rng, rest))
        if first is None or second is None or first.ids == second.ids:
            return None
        start = "both " if self.rng.random() < 0.2 else ""
        return Phrase(f"{start}{first.text} and {second.text}", tuple(sorted(first.ids + second.ids)), True)

    def phrase(self) -> Phrase | None:
        """A random phrase for a random target, half of the time for one that is hidden in part."""
        rng = self.rng
        wants_hidden = rng.random() < 0.5
        things = [t for t in self.things.values() if (t.occlusion >= HIDDEN) == wants_hidden]
        thing = pick(rng, things or list(self.things.values()))
        draw = rng.random()
        for kind, share in SHARES.items():
            draw -= share
            if draw < 0:
                return next((p for _ in range(3) if (p := getattr(self, kind)(thing)) is not None), None)
        return None
