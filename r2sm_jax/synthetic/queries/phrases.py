"""Phrases that pick exactly their targets: "the red mug", "the mug behind the book".

A phrase is used only if its literal meaning fits its targets and no other object of the image.
Positions and sizes need a clear margin. A method returns None if there is no such phrase; the next
attempt draws again.
"""

from collections.abc import Callable, Sequence, Set

import numpy as np

from r2sm_jax.synthetic.queries.names import NameWriter, Phrase, join_words
from r2sm_jax.synthetic.queries.nouns import is_plural, lexicon, plural
from r2sm_jax.synthetic.queries.objects import ObjectFacts, is_clearly_larger
from r2sm_jax.synthetic.random_choice import choose, pick

# Shares of the draws.
KIND_SHARES = np.cumsum((0.45, 0.15, 0.15, 0.15, 0.1))
"""Of names, positions, phrases about hiding, uses, and phrases for several objects."""
CHOICE_KIND_SHARES = np.cumsum((0.3, 0.48, 0.1, 0.12))
"""Of names with a colour, positions, phrases about hiding, and phrases for several objects."""
POSITION_SHARES = np.cumsum((0.3, 0.3, 0.28, 0.12))
"""Of sizes, outermost objects, relations to one object, places between two."""
CHOICE_SHARE = 0.5
"""Of phrases about photos where objects have their like beside them, at least those about one."""
ORDER_SHARE = 0.5  # of outermost objects of a photo, those that are counted: "second from the left"
DIRECTION_BEFORE_SHARE = 0.4  # of outermost objects, the direction before the noun: "leftmost mug"
CLASS_FUNCTION_SHARE = 0.6  # of uses, that of the class and not of a group that it belongs to
BOTH_SHARE = 0.2  # of two names, "both" before them
FULL_VIEW_SHARE = 0.2  # of phrases about hiding, "in full view"
BEHIND_SHARE = 0.5  # of phrases about hiding, "behind"; the rest is "in front of"

MAX_ATTEMPTS = 3  # to write a phrase of one kind about one target
# Margins, in extents of all objects together.
MIN_DIRECTION_GAP = 0.20  # of a position
MIN_DIRECTION_GAP_OF_PHOTO = 0.14  # of a position in a photo, where objects stand closer
MIN_ORDER_GAP = 0.04  # from one object to the next where they are counted
MAX_COUNTED = 6  # of a class, where its second or third is meant
MIN_BETWEEN_GAP = 0.12  # of a position between two objects
MAX_BETWEEN_DOUBT = 0.05  # from which another object may lie between them as well
MIN_HIDDEN_OF_OTHERS = 0.1  # share that is hidden of all others where one is "in full view"
MAX_TARGETS = 5  # of a phrase that does not name a class
MAX_TARGETS_OF_CLASS = 50


class PhraseWriter(NameWriter):
    """Writes random phrases for the objects of one image: names, places, uses and sets."""

    @property
    def min_direction_gap(self) -> float:
        return MIN_DIRECTION_GAP_OF_PHOTO if self.of_photo else MIN_DIRECTION_GAP

    def phrase(self, allowed_ids: Set[int]) -> Phrase | None:
        """A phrase for a random target of these, in half of the draws for a partly hidden one.

        None if that fails.
        """
        prefer_hidden = self.rng.random() < 0.5
        allowed = [facts for facts in self.objects.all if facts.id in allowed_ids]
        preferred = [facts for facts in allowed if facts.is_partly_hidden == prefer_hidden]
        target = pick(self.rng, preferred or allowed)
        if self.of_photo:
            have_rivals = [facts for facts in allowed if self._has_rivals(facts)]
            if have_rivals and self.rng.random() < CHOICE_SHARE:
                target = pick(self.rng, have_rivals)
            if self._has_rivals(target):
                kinds = (self.name_by_colour, self._position, self._occlusion, self._several)
                phrase = self._attempt(kinds[choose(self.rng, CHOICE_KIND_SHARES)], target)
                if phrase is not None:
                    return phrase

        kinds = (self.name, self._position, self._occlusion, self._reasoning, self._several)
        return self._attempt(kinds[choose(self.rng, KIND_SHARES)], target)

    def _attempt(
        self, write: Callable[[ObjectFacts], Phrase | None], target: ObjectFacts
    ) -> Phrase | None:
        """A phrase of one kind. Kinds that often find none, such as positions, get several
        attempts, so that they do not become much rarer than their share."""
        for _ in range(MAX_ATTEMPTS):
            phrase = write(target)
            if phrase is not None:
                return phrase
        return None

    def _has_rivals(self, target: ObjectFacts) -> bool:
        """Whether the image has another object of the target's class."""
        return list(self.objects.category.values()).count(self.objects.category[target.id]) > 1

    def _others(self, target: ObjectFacts, ids: frozenset[int]) -> list[ObjectFacts]:
        """The objects `ids` without the target."""
        return [self.objects.by_id[i] for i in ids if i != target.id]

    # Phrases for one object by its size or position.

    def _position(self, target: ObjectFacts) -> Phrase | None:
        """Size or position among its class, or a position relative to other objects."""
        named = self.noun(target)
        if named is None:
            return None
        kinds = (self._size, self._outermost, self._relation, self._between)
        return kinds[choose(self.rng, POSITION_SHARES)](target, *named)

    def _size(self, target: ObjectFacts, noun: str, ids: frozenset[int]) -> Phrase | None:
        """The largest or smallest of its class: "the biggest mug", "the smaller mug" of two."""
        others = self._others(target, ids)
        if not others or is_plural(noun):
            return None
        of_two = len(others) == 1
        if all(is_clearly_larger(target, other) for other in others):
            degree = "larger" if of_two else "largest"
        elif all(is_clearly_larger(other, target) for other in others):
            degree = "smaller" if of_two else "smallest"
        else:
            return None
        return self.singular(target, noun, before=pick(self.rng, self.words["size"][degree]))

    def _outermost(self, target: ObjectFacts, noun: str, ids: frozenset[int]) -> Phrase | None:
        """The first of its class in a direction: "the leftmost mug", "the mug at the top"."""
        others = ids - {target.id}
        if not others:
            return None
        if self.of_photo and len(others) >= 2 and self.rng.random() < ORDER_SHARE:
            return self._counted(target, noun, ids)
        for words in self.words["direction"]:
            axis, sign = words["axis"], words["sign"]
            gaps = [self.objects.gap(other, target.id, axis, sign)[0] for other in others]
            if min(gaps) > self.min_direction_gap:
                if self.rng.random() < DIRECTION_BEFORE_SHARE:
                    return self.singular(target, noun, before=words["before"])
                return self.singular(target, noun, after=pick(self.rng, words["after"]))
        return None

    def _counted(self, target: ObjectFacts, noun: str, ids: frozenset[int]) -> Phrase | None:
        """The second or third of its class from one side: "the second mug from the left"."""
        if len(ids) > MAX_COUNTED or is_plural(noun):
            return None
        side = pick(self.rng, self.words["counted"]["sides"])
        place = 0
        for other in ids - {target.id}:
            nearest, furthest = self.objects.gap(other, target.id, 0, side["sign"])
            if nearest > MIN_ORDER_GAP:
                place += 1
            elif furthest > -MIN_ORDER_GAP:
                return None  # it is not clear which of both comes first
        if len(ids) == 3 and place == 1 and self.rng.random() < 0.5:
            return self.singular(target, noun, before=self.words["counted"]["middle"])
        if place not in (1, 2):
            return None
        rank = self.words["counted"]["ranks"][place - 1]
        return self.singular(target, noun, before=rank, after=side["after"])

    def _relation(self, target: ObjectFacts, noun: str, ids: frozenset[int]) -> Phrase | None:
        """The only one of its class in a direction from another one: "the mug above the book"."""
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
            min_gap = max(self.min_direction_gap, sideways)
            is_clear = gap(other.id, target.id, axis, sign)[0] > min_gap
            if is_clear and all(gap(other.id, i, axis, sign)[1] < 0.0 for i in rest):
                relation = pick(self.rng, words["relation"])
                return self.singular(target, noun, after=f"{relation} {anchor}")
        return None

    def _between(self, target: ObjectFacts, noun: str, ids: frozenset[int]) -> Phrase | None:
        """The only one of its class between two objects: "the mug between the book and the hat"."""
        others = [other for other in self.objects.all if other.id not in ids]
        if len(others) < 2:
            return None
        first, last = (others[int(i)] for i in self.rng.choice(len(others), 2, replace=False))
        first_name = self.anchor(first)
        last_name = self.anchor(last)
        if first_name is None or last_name is None:
            return None
        ends = first.id, last.id
        if not self.objects.is_between(*ends, target.id, MIN_BETWEEN_GAP):
            return None
        rest = ids - {target.id}
        if any(self.objects.could_be_between(*ends, i, -MAX_BETWEEN_DOUBT) for i in rest):
            return None
        return self.singular(target, noun, after=f"between {first_name} and {last_name}")

    # Phrases for one object by what hides it or what it hides.

    def _occlusion(self, target: ObjectFacts) -> Phrase | None:
        """Behind or in front of another object, or in full view unlike the others of its class.

        No phrase says that its target is partly hidden: that would make the query amodal
        (docs/intent.md).
        """
        named = self.noun(target)
        if named is None:
            return None
        noun, ids = named
        rivals = self._others(target, ids)
        draw = self.rng.random()
        is_behind = draw < FULL_VIEW_SHARE + BEHIND_SHARE
        partners = []
        for other in self.objects.all:
            front, rear = (other, target) if is_behind else (target, other)
            # Only what is clearly hidden is said to be behind something.
            if rear.is_partly_hidden and front.id in rear.hidden_by and other.id not in ids:
                partners.append(other)
        if draw < FULL_VIEW_SHARE or not partners:
            return self._in_full_view(target, noun, rivals)

        other = pick(self.rng, partners)
        anchor = self.anchor(other)
        if anchor is None:
            return None
        words = self.words["occlusion"]
        if is_behind:
            is_shared = any(other.id in rival.hidden_by for rival in rivals)
            relations = words["behind"]
            if not is_plural(noun):
                relations = relations + words["behind_singular"]
        else:
            is_shared = any(rival.id in other.hidden_by for rival in rivals)
            relations = words["in_front"]
        if is_shared:
            return None
        return self.singular(target, noun, after=f"{pick(self.rng, relations)} {anchor}")

    def _in_full_view(
        self, target: ObjectFacts, noun: str, others: Sequence[ObjectFacts]
    ) -> Phrase | None:
        """The only one of its class that nothing hides: "the mug in full view"."""
        if not others or target.occlusion != 0:
            return None
        if not all(other.occlusion > MIN_HIDDEN_OF_OTHERS for other in others):
            return None
        words = pick(self.rng, self.words["occlusion"]["clear"])
        return self.singular(target, noun, after=words)

    # Phrases that do not name the class.

    def _reasoning(self, target: ObjectFacts) -> Phrase | None:
        """The use of an object, or of all objects with that use, without their class."""
        if not self.objects.in_lexicon:
            return self._use_or_idea(target)

        # The use of its class, or of a group that its class belongs to.
        category = self.objects.category[target.id]
        groups = [group for group in lexicon().groups.values() if category in group.classes]
        entry = self.objects.entry[target.id]
        if self.rng.random() >= CLASS_FUNCTION_SHARE and groups:
            entry = pick(self.rng, groups)
        ids = tuple(sorted(self.objects.described_by(entry)))
        clauses = entry.held_out_functions if self.held_out else entry.functions
        if not 1 <= len(ids) <= MAX_TARGETS or not clauses:
            return None

        # Some clauses follow a sentence: "It is raining. | that would keep you dry".
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
        # An idea that sounds like the name of a class would give the class away.
        names = " ".join(self.objects.category.values()).split()
        ideas = [idea for idea in target.ideas if not _resembles(idea, names)]
        choices = [*target.uses, *ideas]
        if not choices:
            return None

        words = pick(self.rng, choices)
        ids = [facts.id for facts in self.objects.all if words in facts.uses + facts.ideas]
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
        return Phrase(f"{head} {words}", tuple(sorted(ids)), many, reasoning=True)

    # Phrases for several objects.

    def _several(self, target: ObjectFacts) -> Phrase | None:
        """All of a class, all of a colour or pattern, or two objects named in one breath."""
        draw = self.rng.random()
        if draw < 0.35:
            return self._two_names(target)
        # "The red things" needs the colours of all objects. They are known in drawn scenes, whose
        # classes are all in the lexicon.
        for_anything = draw < 0.5 and self.objects.in_lexicon
        named = self.noun(target, for_anything)
        if named is None:
            return None
        noun, ids = named

        # A class alone is twice as likely, but "all the things" alone means nothing.
        options = [(target.colour, None), (None, target.pattern)]
        if not for_anything:
            options += [(None, None), (None, None)]
        colour, pattern = pick(self.rng, options)
        has_adjective = colour is not None or pattern is not None
        if for_anything and not has_adjective:
            return None

        matching = self.objects.matching(ids, colour, pattern)
        max_targets = MAX_TARGETS if has_adjective else MAX_TARGETS_OF_CLASS
        if not 2 <= len(matching) <= max_targets:
            return None
        for i in matching:
            facts = self.objects.by_id[i]
            if (colour and not facts.colour) or (pattern and not facts.pattern):
                return None  # it may have another one

        nouns = plural(noun)
        before, after = self.adjectives(target, colour, pattern)
        bare = join_words(before, nouns, after)
        words = self.words["determiners"]
        determiners = words["always"]
        if not is_plural(noun) and len(matching) <= 5:
            by_count = words["unchanged" if nouns == noun else "changed"]
            determiners = determiners + by_count[len(matching) - 2]
        determiner = pick(self.rng, determiners)
        return Phrase(f"{determiner} {bare}", matching, plural=True, bare=bare)

    def _two_names(self, target: ObjectFacts) -> Phrase | None:
        """The target and another object by their names: "the red mug and the hat"."""
        others = [other for other in self.objects.all if other.id != target.id] or [target]
        first = self.name(target)
        second = self.name(pick(self.rng, others))
        if first is None or second is None or first.ids == second.ids:
            return None
        start = "both " if self.rng.random() < BOTH_SHARE else ""
        ids = tuple(sorted(first.ids + second.ids))
        return Phrase(f"{start}{first.text} and {second.text}", ids, plural=True)


def _resembles(idea: str, names: Sequence[str]) -> bool:
    """Whether a word of an idea and a class name begin alike: "sunny" and "sun"."""
    return any(
        word.startswith(name) or name.startswith(word) for word in idea.split() for name in names
    )
