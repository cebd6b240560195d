"""The query grammar: from the things in one image to sentences that ask for modal or amodal masks.

A query is a target (which things), a phrase that picks exactly that target by its literal meaning in the
scene, and a wording that carries the mask type. The target and its phrase (`phrases.py`) are chosen without
regard to the type, so that only the wording tells one type from the other.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np

from r2sm_jax.queries import amodal_wordings, held_out_wordings, modal_wordings, purpose_wordings, wordings
from r2sm_jax.queries.objects import HIDDEN, ObjectFacts, Phrase, pick
from r2sm_jax.queries.phrases import Scene
from r2sm_jax.query import KEYWORDS, MaskType, Query, keyword_mask_type

Split = Literal["train", "val", "val_phrasing", "val_hard"]
SPLITS: dict[str, Split] = {
    "train": "train", "val": "val", "val_phrasing": "val_phrasing", "val_hard": "val_hard", "dev": "val",
}  # fmt: skip
"""Splits of procedural data, and the wordings of each. `dev` is what a run selects checkpoints by: never reported."""
SPLIT_STRIDE = 10_000_000
"""Scene indices of different splits never meet."""

QUERY_STRIDE = 1000
"""Query ids of different scenes never meet."""

HARD_SHARE = 0.36  # wordings that a keyword rule gets wrong
BARE_SHARE = 0.36  # modal wordings without any word about the mask
PLAIN_SHARE = 0.40  # of those, the phrase alone or in a shell
SET_SHARE = 0.40  # hard modal wordings of a set of things that say "the whole set"
TWIN_SHARE = 0.30  # queries that share their phrase with a query of the other type
PAIR_SHARE = 0.50  # twins that also share a minimal pair of wordings


@dataclass(frozen=True)
class Wording:
    """The expansions of one template, all of them right or all of them wrong by the keyword rule."""

    texts: tuple[str, ...]
    family: str
    slots: frozenset[str]
    hidden_only: bool


def _wordings(template: str, family: str, mask_type: MaskType) -> tuple[Wording | None, Wording | None]:
    """The easy and the hard wordings of a template."""
    texts = wordings.expand(template.removeprefix("~"))
    slots = frozenset(re.findall(r"{(\w+)}", "".join(texts)))
    easy = tuple(text for text in texts if keyword_mask_type(text) == mask_type)
    hard = tuple(text for text in texts if keyword_mask_type(text) != mask_type)
    hidden_only = template.startswith("~")
    return (
        Wording(easy, family, slots, hidden_only) if easy else None,
        Wording(hard, family, slots, hidden_only) if hard else None,
    )


class Phrasebook:
    """The wordings by mask type, apart by whether a keyword rule gets them right, and the minimal pairs."""

    def __init__(self, families: dict[MaskType, wordings.Families], pairs: Sequence[tuple[str, str]] = ()):
        self.easy: dict[MaskType, list[Wording]] = {"modal": [], "amodal": []}
        self.hard: dict[MaskType, list[Wording]] = {"modal": [], "amodal": []}
        self.pairs: list[tuple[tuple[Wording, ...], tuple[Wording, ...]]] = []
        for mask_type, by_family in families.items():
            for family, templates in by_family.items():
                for template in templates:
                    self._add(template, family, mask_type)
        for modal, amodal in pairs:
            self.pairs.append((self._add(modal, "pair", "modal"), self._add(amodal, "pair", "amodal")))
        self.sets = [wording for wording in self.hard["modal"] if wording.family.endswith("quantifier")]
        self.plain = [wording for wording in self.easy["modal"] if wording.texts == ("{x}",)]
        self.bare = [wording for wording in self.easy["modal"] if wording.family == "bare"]
        self.plain = self.plain or self.bare

    def _add(self, template: str, family: str, mask_type: MaskType) -> tuple[Wording, ...]:
        easy, hard = _wordings(template, family, mask_type)
        self.easy[mask_type] += [easy] if easy else []
        self.hard[mask_type] += [hard] if hard else []
        return tuple(wording for wording in (easy, hard) if wording)

    def all(self, mask_type: MaskType) -> frozenset[str]:
        """Every wording of a type."""
        return frozenset(text for w in self.easy[mask_type] + self.hard[mask_type] for text in w.texts)


@cache
def phrasebook(held_out: bool) -> Phrasebook:
    """The training wordings or the held-out ones."""
    if held_out:
        return Phrasebook({"modal": held_out_wordings.MODAL, "amodal": held_out_wordings.AMODAL})
    families: dict[MaskType, wordings.Families] = {
        "modal": modal_wordings.MODAL | purpose_wordings.MODAL,
        "amodal": amodal_wordings.AMODAL | purpose_wordings.AMODAL,
    }
    return Phrasebook(families, wordings.PAIRS + purpose_wordings.PAIRS)


def _slots(scene: Scene, phrase: Phrase, mask_type: MaskType) -> dict[str, str]:
    """The values of the slots that a phrase can fill."""
    values = wordings.agreement("them" if phrase.plural else "it") | {
        "x": phrase.text,
        "pl": "s" if len(phrase.ids) > 1 else "",
    }
    if phrase.possessive:
        values["poss"] = phrase.possessive
    if phrase.bare:
        values["ns" if len(phrase.ids) > 1 else "n"] = phrase.bare
    target = scene.things[next(iter(phrase.ids))]
    if len(phrase.ids) == 1 and target.occlusion >= HIDDEN:
        fronts = [i for i in target.hidden_by if i in scene.things]
        if fronts and (mask_type == "modal" or len(fronts) == len(target.hidden_by) == 1):
            front = scene.anchor(scene.things[pick(scene.rng, fronts)])
            if front and front not in phrase.text:
                values["y"] = front
    return values


def _fits(scene: Scene, wording: Wording, phrase: Phrase, slots: dict[str, str]) -> bool:
    hidden = any(scene.things[i].occlusion >= HIDDEN for i in phrase.ids)
    return wording.slots <= slots.keys() and (hidden or not wording.hidden_only)


def _choose(
    scene: Scene, book: Phrasebook, phrase: Phrase, mask_type: MaskType, hard: bool
) -> tuple[Wording, dict[str, str]]:
    """A wording that a phrase fits, with the slots. Every list has wordings with no slot but {x}."""
    slots = _slots(scene, phrase, mask_type)
    entries = (book.hard if hard else book.easy)[mask_type]
    if not hard and mask_type == "modal" and scene.rng.random() < BARE_SHARE / (1 - HARD_SHARE):
        entries = book.plain if scene.rng.random() < PLAIN_SHARE else book.bare
    if hard and mask_type == "modal" and "ns" in slots and scene.rng.random() < SET_SHARE:
        entries = book.sets
    while True:
        wording = pick(scene.rng, entries)
        if _fits(scene, wording, phrase, slots):
            return wording, slots


def _sentence(
    rng: np.random.Generator, wording: Wording, phrase: Phrase, slots: dict[str, str], held_out: bool
) -> tuple[str, str]:
    """The finished text and its form."""
    template = pick(rng, wording.texts)
    text = template.format(**slots)
    shells = held_out_wordings if held_out else wordings
    draw = rng.random()
    form = {".": "command", "?": "question"}.get(text[-1], "noun phrase")
    alone = text.startswith(("a mask", "the mask", "no ", "what about")) or text.endswith(("please", "thank you"))
    if form == "noun phrase" and not alone:
        if draw < 0.4:
            text, form = pick(rng, shells.COMMANDS).format(w=text), "command"
        elif draw < 0.6 and ";" not in text and ":" not in text:
            # "… for me?" would hang behind a clause.
            shell = pick(rng, shells.QUESTIONS if "," not in text and len(text) < 50 else shells.LONG_QUESTIONS)
            text, form = shell.format(w=text), "question"
        elif draw < 0.8 and template == "{x}" and text.startswith("what "):
            text, form = text + "?", "question"
    if phrase.lead:
        text = f"{phrase.lead} {text[0].upper()}{text[1:]}"
        return (text if text[-1] in ".?" else text + "."), form
    casing = rng.random()
    if form == "noun phrase":
        return (text[0].upper() + text[1:] + "." if casing < 0.25 else text), form
    if casing < 0.2:
        return text.lower().removesuffix("."), form
    return text[0].upper() + text[1:], form


def _query(text: str, form: str, mask_type: MaskType, phrase: Phrase, wording: Wording) -> Query:
    kind = {
        "task": "reasoning" if phrase.reasoning else "referring",
        "hard": keyword_mask_type(text) != mask_type,
        "multi": len(phrase.ids) > 1,
        "wording": wording.family.removeprefix("hard: "),
        "form": form,
    }
    return Query(0, text, mask_type, phrase.ids, kind)


def write_queries(
    things: Sequence[ObjectFacts], *, rng: np.random.Generator, count: int, split: Split = "train", first_id: int = 0
) -> tuple[Query, ...]:
    """Up to `count` different queries about one image, half modal and half amodal, numbered from `first_id` + 1.

    Half of the targets are partly hidden where there are any, for either type alike. `train` and `val` use
    the training words; `val_phrasing` and `val_hard` only wordings, nouns and function clauses held out from
    them. In `val_hard` a keyword rule gets every query wrong, and every phrase occurs with both types.
    """
    if not things or count < 1:
        return ()
    held_out, all_hard = split in ("val_phrasing", "val_hard"), split == "val_hard"
    book = phrasebook(held_out)
    scene = Scene(things, rng, held_out)
    left = {"modal": count // 2, "amodal": count // 2}
    left["modal" if rng.random() < 0.5 else "amodal"] += count % 2
    found: dict[str, Query] = {}
    for _ in range(60 * count + 60):
        types: list[MaskType] = [t for t in ("modal", "amodal") if left[t] > 0]
        if not types:
            break
        phrase = scene.phrase()
        if phrase is None or (all_hard and KEYWORDS.search(f"{phrase.lead} {phrase.text}")):
            continue
        if len(types) == 2 and not (all_hard or rng.random() < TWIN_SHARE):
            types = [types[int(rng.random() < left["amodal"] / (left["modal"] + left["amodal"]))]]
        pair = pick(rng, book.pairs) if book.pairs and rng.random() < PAIR_SHARE else None
        written = []
        for mask_type in types:
            hard = all_hard or rng.random() < HARD_SHARE
            wording, slots = _choose(scene, book, phrase, mask_type, hard)
            if len(types) == 2 and pair is not None:
                twin = pick(rng, pair[0 if mask_type == "modal" else 1])
                wording = twin if _fits(scene, twin, phrase, slots) else wording
            written.append(_query(*_sentence(rng, wording, phrase, slots, held_out), mask_type, phrase, wording))
        texts = {query.text for query in written}
        if len(texts) < len(written) or texts & found.keys():
            continue
        if all_hard and not all(query.kind["hard"] for query in written):
            continue
        for query in written:
            found[query.text] = query
            left[query.mask_type] -= 1
    queries = list(found.values())
    order = rng.permutation(len(queries))
    return tuple(replace(queries[int(i)], id=first_id + n) for n, i in enumerate(order, 1))
