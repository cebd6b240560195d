"""Writes queries about the objects of one image: sentences that ask for modal or amodal masks.

A query has a target (one or more objects), a phrase that means exactly that target in the image, and a wording that
carries the mask type. Target and phrase are chosen without regard to the type, so that only the wording tells it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

import numpy as np

from r2sm_jax.query import KEYWORDS, MaskType, Query, keyword_mask_type
from r2sm_jax.synthetic.queries.grammar import Wording, agreement, phrasebook
from r2sm_jax.synthetic.queries.objects import ObjectFacts, Objects
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
"""Splits of procedural data, and the wordings of each. `dev` selects the checkpoints of a run and is never reported;
`ABSENT_SPLIT`, of composed photographs only, asks for things that are not there; `TEST_SPLIT`, of drawn scenes only,
is scored once for a release and nothing is ever chosen by it."""
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


def write_queries(
    objects: Sequence[ObjectFacts],
    *,
    rng: np.random.Generator,
    count: int,
    split: Split = "train",
    first_id: int = 0,
    forbidden: Mapping[MaskType, Collection[int]] = MappingProxyType({}),
) -> tuple[Query, ...]:
    """Up to `count` different queries about one image, half modal and half amodal, numbered from `first_id` + 1.

    No query of a type means one of its `forbidden` objects; if that leaves none, all queries are of the other type.
    Half of the targets of either type are partly hidden, if the image has such objects. `train` and `val` use the
    training words, `val_phrasing` and `val_hard` only wordings, nouns and function clauses held out from them, `test`
    the same nouns and clauses in wordings of its own. In `val_hard` the keyword rule gets every query wrong, and every
    phrase occurs with both types.
    """
    if not objects or count < 1:
        return ()
    writer = _QueryWriter(objects, rng, split)
    left: dict[MaskType, int] = {"modal": count // 2, "amodal": count // 2}
    left["modal" if rng.random() < 0.5 else "amodal"] += count % 2
    ids = {facts.id for facts in objects}
    askable: dict[MaskType, set[int]] = {t: ids.difference(forbidden.get(t, ())) for t in left}
    if not askable["amodal"]:
        left = {"modal": count if askable["modal"] else 0, "amodal": 0}
    found: dict[str, Query] = {}
    for _ in range(60 * count + 60):
        if not any(left.values()):
            break
        written = writer.queries(left, askable)
        texts = {query.text for query in written}
        if len(texts) == len(written) and not texts & found.keys():
            for query in written:
                found[query.text] = query
                left[query.mask_type] -= 1
    queries = list(found.values())
    order = rng.permutation(len(queries))
    return tuple(replace(queries[int(i)], id=first_id + n) for n, i in enumerate(order, 1))


def write_absent_queries(
    objects: Sequence[ObjectFacts],
    absent: Sequence[str],
    *,
    rng: np.random.Generator,
    count: int,
    split: Split = "train",
    first_id: int = 0,
) -> tuple[Query, ...]:
    """Up to `count` queries for things of the classes `absent`, which the image does not have, half of either type.

    They have no target. No noun is used that could mean one of the objects that are there.
    """
    if not objects:
        return ()
    writer = _QueryWriter(objects, rng, split)
    found: dict[str, Query] = {}
    for category in [absent[int(i)] for i in rng.permutation(len(absent))]:
        if len(found) == count:
            break
        mask_type: MaskType = "modal" if rng.random() < 0.5 else "amodal"
        phrase = writer.phrases.absent(category)
        if phrase is not None and (query := writer.query(phrase, mask_type)) is not None:
            found[query.text] = query
    return tuple(replace(query, id=first_id + n) for n, query in enumerate(found.values(), 1))


class _QueryWriter:
    """Writes queries about the objects of one image."""

    def __init__(self, objects: Sequence[ObjectFacts], rng: np.random.Generator, split: Split):
        held_out = split in ("val_phrasing", "val_hard", "test")
        self.rng, self.all_hard = rng, split == "val_hard"
        self.book = phrasebook(
            "test" if split == "test" else "held_out" if held_out else "wordings"
        )
        self.objects = Objects(objects)
        self.phrases = PhraseWriter(self.objects, rng, held_out)

    def queries(
        self, left: dict[MaskType, int], askable: Mapping[MaskType, set[int]]
    ) -> list[Query]:
        """A query of a type with some `left` to write, or one of each type about one target; none if that fails.

        `askable` are the objects that queries of a type may mean.
        """
        open_types: list[MaskType] = [t for t, number in left.items() if number > 0]
        phrase = self.phrases.phrase(set().union(*(askable[t] for t in open_types)))
        if phrase is None or (self.all_hard and KEYWORDS.search(f"{phrase.lead} {phrase.text}")):
            return []
        types: list[MaskType] = [t for t in open_types if askable[t].issuperset(phrase.ids)]
        if not types:
            return []
        if len(types) == 2 and not (self.all_hard or self.rng.random() < TWIN_SHARE):
            types = [
                types[int(self.rng.random() < left["amodal"] / (left["modal"] + left["amodal"]))]
            ]
        pairs = self.book.pairs
        pair = pick(self.rng, pairs) if pairs and self.rng.random() < PAIR_SHARE else None
        written = []
        for mask_type in types:
            twins = (
                pair[0 if mask_type == "modal" else 1]
                if len(types) == 2 and pair is not None
                else ()
            )
            if (query := self.query(phrase, mask_type, twins)) is not None:
                written.append(query)
        return written if len(written) == len(types) else []

    def query(
        self, phrase: Phrase, mask_type: MaskType, twins: Sequence[Wording] = ()
    ) -> Query | None:
        """A query of a type, worded as one of the `twins` if that fits. None if it is not hard and has to be."""
        wording, fields = self._choose(phrase, mask_type)
        if twins:
            twin = pick(self.rng, twins)
            wording = twin if twin.needs <= fields.keys() else wording
        text, form = self._sentence(wording, phrase, fields)
        kind = {
            "task": "reasoning" if phrase.reasoning else "referring",
            "hard": keyword_mask_type(text) != mask_type,
            "multi": len(phrase.ids) > 1,
            "wording": wording.family,
            "form": form,
        }
        return (
            None
            if self.all_hard and not kind["hard"]
            else Query(0, text, mask_type, phrase.ids, kind)
        )

    def _choose(self, phrase: Phrase, mask_type: MaskType) -> tuple[Wording, dict[str, str]]:
        """A wording that fits a phrase, and its fields. The search ends: every list has wordings with {x} alone."""
        book, rng = self.book, self.rng
        hard = self.all_hard or rng.random() < HARD_SHARE
        fields = self._fields(phrase, mask_type)
        wordings = (book.hard if hard else book.easy)[mask_type]
        if not hard and mask_type == "modal" and rng.random() < BARE_SHARE / (1 - HARD_SHARE):
            wordings = book.plain if rng.random() < PLAIN_SHARE else book.bare
        if hard and mask_type == "modal" and "ns" in fields and rng.random() < SET_SHARE:
            wordings = book.sets
        while True:
            wording = pick(rng, wordings)
            if wording.needs <= fields.keys():
                return wording, fields

    def _fields(self, phrase: Phrase, mask_type: MaskType) -> dict[str, str]:
        """The fields that a phrase can fill in a wording, and "hidden" for a partly hidden target."""
        one = len(phrase.ids) < 2
        fields = agreement("them" if phrase.plural else "it") | {
            "x": phrase.text,
            "pl": "" if one else "s",
        }
        if phrase.possessive:
            fields["poss"] = phrase.possessive
        if phrase.bare:
            fields["n" if one else "ns"] = phrase.bare
        if any(self.objects.by_id[i].partly_hidden for i in phrase.ids):
            fields["hidden"] = ""
        target = self.objects.by_id[phrase.ids[0]] if phrase.ids else None
        if one and target is not None and target.partly_hidden:
            fronts = [i for i in target.hidden_by if i in self.objects.by_id]
            if fronts and (mask_type == "modal" or len(fronts) == len(target.hidden_by) == 1):
                front = self.phrases.anchor(self.objects.by_id[pick(self.rng, fronts)])
                if front and front not in phrase.text:
                    fields["y"] = front
        return fields

    def _sentence(
        self, wording: Wording, phrase: Phrase, fields: dict[str, str]
    ) -> tuple[str, str]:
        """The finished text and its form: noun phrase, command or question."""
        template = pick(self.rng, wording.texts)
        text = template.format(**fields)
        draw = self.rng.random()
        form = {".": "command", "?": "question"}.get(text[-1], "noun phrase")
        alone = text.startswith(("a mask", "the mask", "no ", "what about")) or text.endswith(
            ("please", "thank you")
        )
        if form == "noun phrase" and not alone:
            if draw < 0.4:
                text, form = pick(self.rng, self.book.commands).format(w=text), "command"
            elif draw < 0.6 and ";" not in text and ":" not in text:
                short = (
                    "," not in text and len(text) < 50
                )  # "… for me?" would hang behind anything longer
                questions = [
                    question
                    for question in self.book.questions
                    if short or question.endswith("{w}?")
                ]
                text, form = pick(self.rng, questions).format(w=text), "question"
            elif draw < 0.8 and template == "{x}" and text.startswith("what "):
                text, form = text + "?", "question"
        if phrase.lead:
            text = f"{phrase.lead} {text[0].upper()}{text[1:]}"
            return (text if text[-1] in ".?" else text + "."), form
        casing = self.rng.random()
        if form == "noun phrase":
            return (text[0].upper() + text[1:] + "." if casing < 0.25 else text), form
        if casing < 0.2:
            return text.lower().removesuffix("."), form
        return text[0].upper() + text[1:], form
