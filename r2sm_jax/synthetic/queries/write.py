"""Writes queries about the objects of one image: sentences that ask for modal or amodal masks.

A query has a target (one or more objects), a phrase that means exactly that target in the image,
and a wording that carries the mask type. Target and phrase are chosen without regard to the type,
so that only the wording tells it.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import numpy as np

from r2sm_jax.query import KEYWORDS, MASK_TYPES, MaskType, Query, keyword_mask_type
from r2sm_jax.synthetic.queries.grammar import Wording, agreement, phrasebook
from r2sm_jax.synthetic.queries.names import Phrase
from r2sm_jax.synthetic.queries.objects import ImageObjects, ObjectFacts
from r2sm_jax.synthetic.queries.phrases import PhraseWriter
from r2sm_jax.synthetic.random_choice import pick

Split = Literal["train", "val", "val_phrasing", "val_hard", "test"]
ABSENT_SPLIT, TEST_SPLIT = "val_absent", "test"
SPLITS: dict[str, Split] = {
    "train": "train",
    "val": "val",
    "val_phrasing": "val_phrasing",
    "val_hard": "val_hard",
    "dev": "val",
    ABSENT_SPLIT: "val",
    TEST_SPLIT: "test",
}
"""Splits of procedural data, and the wordings of each.

`dev` selects the checkpoints of a run and is never reported. `ABSENT_SPLIT`, of composed
photographs only, asks for things that are not there. `TEST_SPLIT`, of drawn scenes only, is scored
once for a release and selects nothing.
"""
# Of all wordings of one type, the hard ones: those of which the keyword rule gets the type wrong.
HARD_SHARE = 0.36
# Of hard modal wordings for a set of things, those that say "the whole set".
WHOLE_SET_SHARE = 0.40
# Of all modal wordings, the bare ones, without a word about the mask. They are drawn from those
# that are not hard, of which they are a larger share.
BARE_SHARE_OF_MODAL = 0.36
BARE_SHARE = BARE_SHARE_OF_MODAL / (1 - HARD_SHARE)
# Of bare wordings, the phrase alone, which may still become a command or a question.
PLAIN_SHARE = 0.40

# Of phrases that fit both types, those that become one query of each: twins.
TWIN_SHARE = 0.30
# Of twins, those in a minimal pair of wordings, which differ in the words about the mask alone.
PAIR_SHARE = 0.50

# Of noun phrases, those that become a command, a question, or end with a question mark because they
# begin with "what".
COMMAND_SHARE = 0.4
QUESTION_SHARE = 0.2
WHAT_QUESTION_SHARE = 0.2
# Of noun phrases, those with a capital and a full stop; of sentences, those in lower case.
CAPITALISED_SHARE = 0.25
LOWER_CASE_SHARE = 0.2
MAX_QUESTION_LENGTH = 50  # characters; "… for me?" does not fit behind anything longer
# Noun phrases that fit into no command and no question begin or end so.
STANDS_ALONE_BEFORE = ("a mask", "the mask", "no ", "what about")
STANDS_ALONE_AFTER = ("please", "thank you")


def write_queries(
    objects: Sequence[ObjectFacts],
    *,
    rng: np.random.Generator,
    count: int,
    split: Split = "train",
    forbidden: Mapping[MaskType, Collection[int]] = MappingProxyType({}),
    of_photo: bool = False,
) -> tuple[Query, ...]:
    """Up to `count` queries about one image, half modal, half amodal; their ids are all 0.

    No query of a type refers to one of its `forbidden` objects; if that leaves none, all queries
    are of the other type. Half of the targets of either type are partly hidden, if the image has
    such objects. Of a photo, half of the phrases are about one of several of its class, if there
    are any.

    `train` and `val` use the training words. `val_phrasing` and `val_hard` use only wordings, nouns
    and function clauses held out from them, `test` the same nouns and clauses in wordings of its
    own. In `val_hard` the keyword rule gets every query wrong, and every phrase occurs with both
    types.
    """
    if not objects or count < 1:
        return ()

    writer = _QueryWriter(objects, rng, split, of_photo)
    ids = {facts.id for facts in objects}
    allowed: dict[MaskType, set[int]] = {
        t: ids.difference(forbidden.get(t, ())) for t in MASK_TYPES
    }
    num_left: dict[MaskType, int] = dict.fromkeys(MASK_TYPES, count // 2)
    num_left[pick(rng, MASK_TYPES)] += count % 2
    possible_types: list[MaskType] = [t for t in MASK_TYPES if allowed[t]]
    if len(possible_types) < 2:
        num_left = dict.fromkeys(possible_types, count)

    by_text: dict[str, Query] = {}
    # Attempts fail where a phrase does not fit, or a sentence comes again. Images with few objects
    # run out of different sentences; they get fewer queries.
    for _ in range(60 * count + 60):
        if not any(num_left.values()):
            break
        queries = writer.write(num_left, allowed)
        texts = {query.text for query in queries}
        if len(texts) < len(queries) or texts & by_text.keys():
            continue
        for query in queries:
            by_text[query.text] = query
            num_left[query.mask_type] -= 1

    queries = list(by_text.values())
    return tuple(queries[int(k)] for k in rng.permutation(len(queries)))


def write_absent_queries(
    objects: Sequence[ObjectFacts],
    absent: Sequence[str],
    *,
    rng: np.random.Generator,
    count: int,
    split: Split = "train",
) -> tuple[Query, ...]:
    """Up to `count` queries for classes that the image does not have, half of either type.

    They have no target. No noun is used that could mean one of the objects that are there. An image
    without objects gets no queries.
    """
    if not objects:
        return ()

    writer = _QueryWriter(objects, rng, split, of_photo=True)
    by_text: dict[str, Query] = {}
    for k in rng.permutation(len(absent)):
        if len(by_text) == count:
            break
        mask_type = pick(rng, MASK_TYPES)
        phrase = writer.phrases.absent_name(absent[int(k)])
        query = phrase and writer.word(phrase, mask_type)
        if query:
            by_text[query.text] = query
    return tuple(by_text.values())


class _QueryWriter:
    """Writes queries about the objects of one image.

    Every method draws from `rng` in a fixed order. Another order gives other sentences for the same
    seed.
    """

    def __init__(
        self,
        objects: Sequence[ObjectFacts],
        rng: np.random.Generator,
        split: Split,
        of_photo: bool = False,
    ):
        held_out = split in ("val_phrasing", "val_hard", "test")
        self.rng = rng
        self.all_hard = split == "val_hard"
        if split == "test":
            self.book = phrasebook("test")
        else:
            self.book = phrasebook("held_out" if held_out else "wordings")
        self.phrases = PhraseWriter(ImageObjects(objects), rng, held_out, of_photo)

    def write(
        self, num_left: Mapping[MaskType, int], allowed: Mapping[MaskType, set[int]]
    ) -> list[Query]:
        """A query of a type with some left, or twins, one of each type about one target.

        `allowed` are the objects that queries of a type may refer to. Returns an empty list for a
        phrase that fits no type, or no wording; the caller tries again.
        """
        open_types: list[MaskType] = [t for t, number in num_left.items() if number > 0]
        phrase = self.phrases.phrase(set().union(*(allowed[t] for t in open_types)))
        if phrase is None:
            return []
        if self.all_hard and KEYWORDS.search(f"{phrase.lead} {phrase.text}"):
            return []  # the keyword rule would read the phrase, not the wording
        mask_types: list[MaskType] = [t for t in open_types if allowed[t].issuperset(phrase.ids)]
        if not mask_types:
            return []

        # In `val_hard` every phrase that can be is a twin, so that the phrase cannot tell the type.
        fits_both = len(mask_types) == 2
        are_twins = fits_both and (self.all_hard or self.rng.random() < TWIN_SHARE)
        if fits_both and not are_twins:
            # The type of which more queries are left is the likelier one, so that both end equal.
            amodal_share = num_left["amodal"] / (num_left["modal"] + num_left["amodal"])
            mask_types = ["amodal" if self.rng.random() < amodal_share else "modal"]

        # Single queries draw a pair too, and do not use it: the sentences of a seed stay the same
        # only if the number of draws does (tests/test_unchanged.py).
        pair: Mapping[MaskType, Sequence[Wording]] = {}
        if self.book.pairs and self.rng.random() < PAIR_SHARE:
            pair = pick(self.rng, self.book.pairs)
        if not are_twins:
            pair = {}

        worded = [self.word(phrase, t, preferred=pair.get(t, ())) for t in mask_types]
        queries = [query for query in worded if query is not None]
        # One twin without the other would leave a phrase that occurs with one type only.
        return queries if len(queries) == len(mask_types) else []

    def word(
        self, phrase: Phrase, mask_type: MaskType, preferred: Sequence[Wording] = ()
    ) -> Query | None:
        """A query of a type, in one of the `preferred` wordings if that fits.

        Returns None if the keyword rule gets the type right where it must not (`val_hard`).
        """
        is_from_hard = self.all_hard or self.rng.random() < HARD_SHARE
        fields = self._make_fields(phrase, mask_type)
        wordings = self._choose_wordings(mask_type, is_from_hard, is_set="ns" in fields)
        wording = pick(self.rng, wordings)
        while not wording.needs <= fields.keys():  # this ends: every list has some with {x} alone
            wording = pick(self.rng, wordings)
        if preferred:
            candidate = pick(self.rng, preferred)
            if candidate.needs <= fields.keys():
                wording = candidate

        text, form = self._make_sentence(wording, phrase, fields)
        # Judged by the finished sentence: words of the phrase can mislead the rule too.
        misleads_keyword_rule = keyword_mask_type(text) != mask_type
        if self.all_hard and not misleads_keyword_rule:
            return None
        kind = {
            "task": "reasoning" if phrase.reasoning else "referring",
            "hard": misleads_keyword_rule,
            "multi": len(phrase.ids) > 1,
            "wording": wording.family,
            "form": form,
        }
        return Query(0, text, mask_type, phrase.ids, kind)

    def _choose_wordings(
        self, mask_type: MaskType, is_from_hard: bool, is_set: bool
    ) -> Sequence[Wording]:
        """A list of wordings to pick from; `is_set` says that the target is a set."""
        book = self.book
        if mask_type == "amodal":
            return book.hard["amodal"] if is_from_hard else book.easy["amodal"]
        if is_from_hard:
            says_whole_set = is_set and self.rng.random() < WHOLE_SET_SHARE
            return book.sets if says_whole_set else book.hard["modal"]
        if self.rng.random() >= BARE_SHARE:
            return book.easy["modal"]
        return book.plain if self.rng.random() < PLAIN_SHARE else book.bare

    def _make_fields(self, phrase: Phrase, mask_type: MaskType) -> dict[str, str]:
        """The fields that a phrase fills in a wording, and "hidden" for a partly hidden target.

        Their names are those of wordings.txt, which explains them: x is the target, n and ns are
        its noun without "the", poss its possessive, y what hides it, and pl a plural ending. The
        others agree with the target ("it" or "them").
        """
        is_single = len(phrase.ids) < 2
        fields = agreement("them" if phrase.plural else "it")
        fields["x"] = phrase.text
        fields["pl"] = "" if is_single else "s"
        if phrase.possessive:
            fields["poss"] = phrase.possessive
        if phrase.bare:
            fields["n" if is_single else "ns"] = phrase.bare
        targets = [self.phrases.objects.by_id[i] for i in phrase.ids]
        if any(target.is_partly_hidden for target in targets):
            fields["hidden"] = ""
        if len(targets) == 1:
            front = self._name_object_in_front(targets[0], mask_type)
            if front and front not in phrase.text:
                fields["y"] = front
        return fields

    def _name_object_in_front(self, target: ObjectFacts, mask_type: MaskType) -> str | None:
        """The name of an object that hides the target."""
        if not target.is_partly_hidden:
            return None
        by_id = self.phrases.objects.by_id
        fronts = [i for i in target.hidden_by if i in by_id]
        # An amodal wording asks to think away this object alone, so nothing else may hide the
        # target.
        if not fronts or (mask_type == "amodal" and len(target.hidden_by) > 1):
            return None
        return self.phrases.anchor(by_id[pick(self.rng, fronts)])

    def _make_sentence(
        self, wording: Wording, phrase: Phrase, fields: dict[str, str]
    ) -> tuple[str, str]:
        """The finished text and its form: noun phrase, command or question."""
        template = pick(self.rng, wording.texts)
        text = template.format(**fields)
        # "what you would wear" is a question as it stands, if the wording adds nothing to it.
        is_what_clause = template == "{x}" and text.startswith("what ")
        text, form = self._make_command_or_question(text, is_what_clause)

        if phrase.lead:
            text = f"{phrase.lead} {_capitalise(text)}"
            return (text if text[-1] in ".?" else text + "."), form

        draw = self.rng.random()
        if form == "noun phrase":
            return (_capitalise(text) + "." if draw < CAPITALISED_SHARE else text), form
        if draw < LOWER_CASE_SHARE:
            return text.lower().removesuffix("."), form
        return _capitalise(text), form

    def _make_command_or_question(self, text: str, is_what_clause: bool) -> tuple[str, str]:
        """Puts some noun phrases into a command or a question. Returns the text and its form."""
        # Drawn for texts that stay as they are too, so that the number of draws is the same.
        draw = self.rng.random()
        if text.endswith("."):
            return text, "command"
        if text.endswith("?"):
            return text, "question"
        if text.startswith(STANDS_ALONE_BEFORE) or text.endswith(STANDS_ALONE_AFTER):
            return text, "noun phrase"

        if draw < COMMAND_SHARE:
            return pick(self.rng, self.book.commands).format(w=text), "command"
        if draw < COMMAND_SHARE + QUESTION_SHARE and not re.search("[;:]", text):
            questions = self.book.questions
            if "," in text or len(text) >= MAX_QUESTION_LENGTH:
                questions = [question for question in questions if question.endswith("{w}?")]
            return pick(self.rng, questions).format(w=text), "question"
        if draw < COMMAND_SHARE + QUESTION_SHARE + WHAT_QUESTION_SHARE and is_what_clause:
            return text + "?", "question"
        return text, "noun phrase"


def _capitalise(text: str) -> str:
    """The text with a capital at its start. `str.capitalize` would change other letters too."""
    return text[0].upper() + text[1:]
