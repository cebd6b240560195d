"""Writes queries about the objects of one image: sentences that ask for modal or amodal masks.

A query has a target (one or more objects), a phrase that means exactly that target in the image,
and a wording that carries the mask type. Target and phrase are chosen without regard to the type,
so that only the wording tells it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

import numpy as np

from r2sm_jax.query import KEYWORDS, MaskType, Query, keyword_mask_type
from r2sm_jax.synthetic.queries.grammar import Wording, agreement, phrasebook
from r2sm_jax.synthetic.queries.objects import ImageObjects, ObjectFacts
from r2sm_jax.synthetic.queries.phrases import Phrase, PhraseWriter
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
SPLIT_STRIDE = 10_000_000
"""Scene indices of different splits never meet."""

QUERY_STRIDE = 1000
"""Query ids of different scenes never meet."""

HARD_SHARE = 0.36  # wordings that a keyword rule gets wrong
BARE_SHARE = 0.36  # modal wordings without any word about the mask
PLAIN_SHARE = 0.40  # of those, the phrase alone or in a command or question
SET_SHARE = 0.40  # hard modal wordings of a set of things that say "the whole set"
TWIN_SHARE = 0.30  # queries that share their phrase with a query of the other type
PAIR_SHARE = 0.50  # twins that also share a minimal pair of wordings
COMMAND_SHARE, QUESTION_SHARE = 0.4, 0.2  # of noun phrases, which then stand in a sentence
MAX_QUESTION_LENGTH = 50  # characters; "… for me?" does not fit behind anything longer


def write_queries(
    objects: Sequence[ObjectFacts],
    *,
    rng: np.random.Generator,
    count: int,
    split: Split = "train",
    first_id: int = 0,
    forbidden: Mapping[MaskType, Collection[int]] = MappingProxyType({}),
) -> tuple[Query, ...]:
    """Up to `count` queries about one image, half modal, half amodal, with ids from `first_id` + 1.

    No query of a type refers to one of its `forbidden` objects; if that leaves none, all queries
    are of the other type. Half of the targets of either type are partly hidden, if the image has
    such objects.

    `train` and `val` use the training words. `val_phrasing` and `val_hard` use only wordings, nouns
    and function clauses held out from them, `test` the same nouns and clauses in wordings of its
    own. In `val_hard` the keyword rule gets every query wrong, and every phrase occurs with both
    types.
    """
    if not objects or count < 1:
        return ()

    writer = _QueryWriter(objects, rng, split)
    num_left: dict[MaskType, int] = {"modal": count // 2, "amodal": count // 2}
    odd_type: MaskType = "modal" if rng.random() < 0.5 else "amodal"
    num_left[odd_type] += count % 2

    ids = {facts.id for facts in objects}
    allowed: dict[MaskType, set[int]] = {
        mask_type: ids.difference(forbidden.get(mask_type, ())) for mask_type in num_left
    }
    if not allowed["amodal"]:
        num_left = {"modal": count if allowed["modal"] else 0, "amodal": 0}

    by_text: dict[str, Query] = {}
    # Images with few objects run out of different sentences; they get fewer.
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
    shuffled = [queries[int(k)] for k in rng.permutation(len(queries))]
    return _number(shuffled, first_id)


def write_absent_queries(
    objects: Sequence[ObjectFacts],
    absent: Sequence[str],
    *,
    rng: np.random.Generator,
    count: int,
    split: Split = "train",
    first_id: int = 0,
) -> tuple[Query, ...]:
    """Up to `count` queries for classes that the image does not have, half of either type.

    They have no target. No noun is used that could mean one of the objects that are there.
    """
    if not objects:
        return ()

    writer = _QueryWriter(objects, rng, split)
    by_text: dict[str, Query] = {}
    for k in rng.permutation(len(absent)):
        if len(by_text) == count:
            break
        mask_type: MaskType = "modal" if rng.random() < 0.5 else "amodal"
        phrase = writer.phrases.absent(absent[int(k)])
        if phrase is None:
            continue
        query = writer.word(phrase, mask_type)
        if query is not None:
            by_text[query.text] = query
    return _number(list(by_text.values()), first_id)


def _number(queries: Sequence[Query], first_id: int) -> tuple[Query, ...]:
    return tuple(replace(query, id=first_id + n) for n, query in enumerate(queries, start=1))


class _QueryWriter:
    """Writes queries about the objects of one image."""

    def __init__(self, objects: Sequence[ObjectFacts], rng: np.random.Generator, split: Split):
        held_out = split in ("val_phrasing", "val_hard", "test")
        self.rng = rng
        self.all_hard = split == "val_hard"
        if split == "test":
            self.book = phrasebook("test")
        else:
            self.book = phrasebook("held_out" if held_out else "wordings")
        self.objects = ImageObjects(objects)
        self.phrases = PhraseWriter(self.objects, rng, held_out)

    def write(
        self, num_left: Mapping[MaskType, int], allowed: Mapping[MaskType, set[int]]
    ) -> list[Query]:
        """A query of a type with some left, or one of each type about one target, or none.

        `allowed` are the objects that queries of a type may refer to.
        """
        open_types: list[MaskType] = [t for t, number in num_left.items() if number > 0]
        allowed_ids = set().union(*(allowed[mask_type] for mask_type in open_types))
        phrase = self.phrases.phrase(allowed_ids)
        if phrase is None:
            return []
        if self.all_hard and KEYWORDS.search(f"{phrase.lead} {phrase.text}"):
            return []  # the keyword rule would read the phrase, not the wording

        mask_types: list[MaskType] = [t for t in open_types if allowed[t].issuperset(phrase.ids)]
        if not mask_types:
            return []
        # Either two sentences about the same things, one of each type, or one of the type that is
        # still rarer.
        are_twins = len(mask_types) == 2 and (self.all_hard or self.rng.random() < TWIN_SHARE)
        if len(mask_types) == 2 and not are_twins:
            amodal_share = num_left["amodal"] / (num_left["modal"] + num_left["amodal"])
            mask_types = [mask_types[int(self.rng.random() < amodal_share)]]

        # Both random numbers are used up for single queries too.
        pair = None
        if self.book.pairs and self.rng.random() < PAIR_SHARE:
            pair = pick(self.rng, self.book.pairs)

        queries = []
        for mask_type in mask_types:
            preferred: Sequence[Wording] = ()
            if are_twins and pair is not None:
                preferred = pair[0] if mask_type == "modal" else pair[1]
            query = self.word(phrase, mask_type, preferred)
            if query is not None:
                queries.append(query)
        return queries if len(queries) == len(mask_types) else []

    def word(
        self, phrase: Phrase, mask_type: MaskType, preferred: Sequence[Wording] = ()
    ) -> Query | None:
        """A query of a type, in one of the `preferred` wordings if that fits.

        None if it is not hard and has to be.
        """
        wording, fields = self._choose_wording(phrase, mask_type)
        if preferred:
            candidate = pick(self.rng, preferred)
            if candidate.needs <= fields.keys():
                wording = candidate

        text, form = self._make_sentence(wording, phrase, fields)
        is_hard = keyword_mask_type(text) != mask_type
        if self.all_hard and not is_hard:
            return None
        kind = {
            "task": "reasoning" if phrase.reasoning else "referring",
            "hard": is_hard,
            "multi": len(phrase.ids) > 1,
            "wording": wording.family,
            "form": form,
        }
        return Query(0, text, mask_type, phrase.ids, kind)

    def _choose_wording(
        self, phrase: Phrase, mask_type: MaskType
    ) -> tuple[Wording, dict[str, str]]:
        """A wording that fits a phrase, and its fields."""
        rng = self.rng
        book = self.book
        is_hard = self.all_hard or rng.random() < HARD_SHARE
        fields = self._make_fields(phrase, mask_type)

        wordings = book.hard[mask_type] if is_hard else book.easy[mask_type]
        if mask_type == "modal" and not is_hard and rng.random() < BARE_SHARE / (1 - HARD_SHARE):
            wordings = book.plain if rng.random() < PLAIN_SHARE else book.bare
        if mask_type == "modal" and is_hard and "ns" in fields and rng.random() < SET_SHARE:
            wordings = book.sets

        # This ends: every list has wordings with {x} alone.
        while True:
            wording = pick(rng, wordings)
            if wording.needs <= fields.keys():
                return wording, fields

    def _make_fields(self, phrase: Phrase, mask_type: MaskType) -> dict[str, str]:
        """The fields that a phrase fills in a wording, and "hidden" for a partly hidden target."""
        is_single = len(phrase.ids) < 2
        fields = agreement("them" if phrase.plural else "it")
        fields["x"] = phrase.text
        fields["pl"] = "" if is_single else "s"
        if phrase.possessive:
            fields["poss"] = phrase.possessive
        if phrase.bare:
            fields["n" if is_single else "ns"] = phrase.bare
        if any(self.objects.by_id[i].is_partly_hidden for i in phrase.ids):
            fields["hidden"] = ""
        if len(phrase.ids) == 1:
            front = self._name_object_in_front(phrase, mask_type)
            if front:
                fields["y"] = front
        return fields

    def _name_object_in_front(self, phrase: Phrase, mask_type: MaskType) -> str | None:
        """The name of an object that hides the single target, if the phrase lacks it."""
        target = self.objects.by_id[phrase.ids[0]]
        if not target.is_partly_hidden:
            return None
        fronts = [i for i in target.hidden_by if i in self.objects.by_id]
        # An amodal wording asks to think away this object alone, so nothing else may hide the
        # target.
        is_only_one = len(fronts) == len(target.hidden_by) == 1
        if not fronts or (mask_type == "amodal" and not is_only_one):
            return None
        name = self.phrases.anchor(self.objects.by_id[pick(self.rng, fronts)])
        return name if name and name not in phrase.text else None

    def _make_sentence(
        self, wording: Wording, phrase: Phrase, fields: dict[str, str]
    ) -> tuple[str, str]:
        """The finished text and its form: noun phrase, command or question."""
        template = pick(self.rng, wording.texts)
        text = template.format(**fields)
        draw = self.rng.random()
        form = {".": "command", "?": "question"}.get(text[-1], "noun phrase")
        if form == "noun phrase" and not _stands_alone(text):
            if draw < COMMAND_SHARE:
                text = pick(self.rng, self.book.commands).format(w=text)
                form = "command"
            elif draw < COMMAND_SHARE + QUESTION_SHARE and ";" not in text and ":" not in text:
                text = pick(self.rng, self._questions_for(text)).format(w=text)
                form = "question"
            elif draw < 0.8 and template == "{x}" and text.startswith("what "):
                text += "?"
                form = "question"

        if phrase.lead:
            text = f"{phrase.lead} {text[0].upper()}{text[1:]}"
            return (text if text[-1] in ".?" else text + "."), form

        casing = self.rng.random()
        capitalised = text[0].upper() + text[1:]
        if form == "noun phrase":
            return (capitalised + "." if casing < 0.25 else text), form
        if casing < 0.2:
            return text.lower().removesuffix("."), form
        return capitalised, form

    def _questions_for(self, text: str) -> list[str]:
        if "," not in text and len(text) < MAX_QUESTION_LENGTH:
            return self.book.questions
        return [question for question in self.book.questions if question.endswith("{w}?")]


def _stands_alone(text: str) -> bool:
    """Whether a noun phrase does not fit into a command or question."""
    return text.startswith(("a mask", "the mask", "no ", "what about")) or text.endswith(
        ("please", "thank you")
    )
