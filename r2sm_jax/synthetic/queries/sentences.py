"""Sentences without an image, for the mask-type head. Those for training come from the grammar and from the lists
`r2sm_train` and `rules_train`. The other lists are for development, for tests and for the temperature.

The drawn scenes know a few dozen classes. A head that reads only about those takes the noun for a part of the wording,
and fails when somebody asks for a lighthouse. So `write_text_only_queries` fills the training wordings with hundreds of
other nouns, with people, places and remarks that say nothing about the mask type, and with spelling mistakes.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Literal, cast

import numpy as np

from r2sm_jax.errors import InputError
from r2sm_jax.query import MASK_TYPES, MaskType, Sentence
from r2sm_jax.synthetic.queries.grammar import (
    FIELDS,
    Phrasebook,
    Wording,
    agreement,
    expand,
    phrasebook,
    read_sections,
)
from r2sm_jax.synthetic.random_choice import pick

PAIR_SHARE = 0.15  # draws that give both halves of a minimal pair for one target
R2SM_SHARE = 0.6  # draws of a sentence in the manner of R2SM
NOTHING_SHARE = 0.04  # draws of a text from which nobody can tell what is wanted

SentenceList = Literal[
    "development", "test", "calibration", "r2sm_train", "rules_train", "val_r2sm"
]
"""Lists of sentences in intent/. docs/intent.md says who wrote them, and from what."""


@cache
def free_templates() -> dict[str, tuple[str, ...]]:
    """All texts of words.txt and text_only_queries.txt by section. Raises InputError as `expand`."""
    words = read_sections("words.txt")
    fields = FIELDS | words.keys()
    try:
        return {
            title: tuple(
                text
                for line in lines
                for text in expand(line, fields, phrasebook("wordings").shared)
            )
            for title, lines in (words | read_sections("text_only_queries.txt")).items()
        } | {"nothing": tuple(read_sections("nothing.txt")["nothing"])}
    except InputError as error:
        raise InputError(f"words.txt or text_only_queries.txt: {error}") from error


def write_text_only_queries(
    count: int, *, seed: int, without: Sequence[str] = ()
) -> list[Sentence]:
    """`count` different sentences, half of them modal. The keyword rule gets 0.3 to 0.6 of either type wrong.

    Those in the manner of R2SM are written `without` some of their authors, such as "author a". What says nothing
    at all (`nothing.txt`) is there as modal and as amodal, so that a head learns to be undecided.
    """
    rng, book = np.random.default_rng(seed), phrasebook("wordings")
    written = _written(rng, without)
    found: dict[str, Sentence] = {}
    while len(found) < count:
        draw = rng.random()
        if draw < NOTHING_SHARE:
            text, both = _draw(rng, "nothing"), pick(rng, MASK_TYPES)
            found.setdefault(f"{both}: {text}", Sentence(text, both, f"{both}: nothing"))
        elif draw < NOTHING_SHARE + R2SM_SHARE:
            sentence = next(written)
            text = _finish(rng, book, None, sentence.text)
            found.setdefault(text, Sentence(text, sentence.mask_type, sentence.family))
        else:
            for text, mask_type, family in _from_wordings(rng, book):
                found.setdefault(text, Sentence(text, mask_type, f"{mask_type}: {family}"))
    return list(found.values())[:count]


def _from_wordings(
    rng: np.random.Generator, book: Phrasebook
) -> Iterator[tuple[str, MaskType, str]]:
    """Text, mask type and family of a sentence about a random target, or of both halves of a minimal pair."""
    fields = _target(rng)
    wordings: dict[MaskType, Wording]
    if rng.random() < PAIR_SHARE:
        modal, amodal = pick(rng, book.pairs)
        wordings = {"modal": pick(rng, modal), "amodal": pick(rng, amodal)}
    else:
        drawn: MaskType = pick(rng, MASK_TYPES)
        wordings = {drawn: _wording(rng, book, drawn)}
    for mask_type, wording in wordings.items():
        if wording.needs <= fields.keys():
            text = _fill(rng, pick(rng, wording.texts), fields)
            yield _finish(rng, book, fields.get("lead"), text), mask_type, wording.family


@cache
def intent_sentences(name: SentenceList = "development") -> tuple[Sentence, ...]:
    """The sentences of intent/NAME.tsv, see docs/intent.md. Only those of `written_sentences` are trained on."""
    text = (files("r2sm_jax.synthetic.queries") / "intent" / f"{name}.tsv").read_text(
        encoding="utf-8"
    )
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    return tuple(Sentence(**{"reason": ""} | cast(Any, row)) for row in rows)


def written_sentences() -> tuple[Sentence, ...]:
    """The sentences in the manner of R2SM that are trained on; `family` is the author."""
    return intent_sentences("r2sm_train") + intent_sentences("rules_train")


def _written(rng: np.random.Generator, without: Sequence[str]) -> Iterator[Sentence]:
    """Draws written sentences, alone or with a second one that may change what they ask for. Of those that say the same
    of the mask (`Sentence.reason`), all are drawn before any comes again."""
    texts, left = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for row in written_sentences():
        if row.family not in without:
            texts[row.reason].append(row.text)
    while True:
        mask_type: MaskType = pick(rng, MASK_TYPES)
        form = pick(rng, free_templates()[f"{mask_type}: forms"])
        reason, _, section = form.partition(", ")
        left[reason] = left[reason] or rng.permutation(texts[reason]).tolist()
        text = left[reason].pop()
        if section:
            text = f"{text if text[-1] in '.?!' else text + '.'} {_draw(rng, section)}"
        yield Sentence(text, mask_type, f"{mask_type}: r2sm {form}")


def _wording(rng: np.random.Generator, book: Phrasebook, mask_type: MaskType) -> Wording:
    if mask_type == "modal" and rng.random() < 0.4:
        casual = pick(
            rng, free_templates()["modal: casual"] + free_templates()["questions about use"]
        )
        return pick(rng, (Wording((casual,), "bare"), pick(rng, book.plain), pick(rng, book.bare)))
    if rng.random() < 0.12:
        casual = free_templates()[
            "amodal: casual" if mask_type == "amodal" else "modal: nothing guessed"
        ]
        return Wording((pick(rng, casual),), "casual")
    wordings = (book.hard if rng.random() < 0.5 else book.easy)[mask_type]
    if rng.random() < 0.5:  # every family of meaning as often, however many wordings it has
        family = pick(rng, list(dict.fromkeys(wording.family for wording in wordings)))
        wordings = [wording for wording in wordings if wording.family == family]
    return pick(rng, wordings)


def _fill(rng: np.random.Generator, text: str, fields: Mapping[str, str] | None = None) -> str:
    """Replaces the fields of a target by their words, and {thing}, {person}, ... each by one word from its list."""
    fields, templates = fields or {}, free_templates()
    while "{" in text:
        text = re.sub(
            r"{(\w+)}",
            lambda m: fields[m[1]] if m[1] in fields else pick(rng, templates[m[1]]),
            text,
        )
    return text


def _draw(rng: np.random.Generator, section: str) -> str:
    return _fill(rng, pick(rng, free_templates()[section]))


def _target(rng: np.random.Generator) -> dict[str, str]:
    """The fields of a random target and of the thing in front of it."""
    draw = rng.random()
    if draw < 0.1:
        purpose, noun = pick(rng, free_templates()["purposes"]), _draw(rng, "nouns of purposes")
        return _fields(rng, _fill(rng, purpose), noun)
    if draw < 0.16:
        return _fields(rng, "it", "thing") | {"lead": _draw(rng, "questions about use")}
    person, several = rng.random() < 0.25, rng.random() < 0.25
    noun = _draw(rng, "person" if person else "thing")
    if several:
        noun += "es" if noun.endswith(("s", "sh", "ch", "x")) else "s"
    bare = noun
    if rng.random() < 0.35:
        bare = f"{_draw(rng, 'adjective')} {bare}"
    group = rng.random() < 0.05
    determiner = (
        "the"
        if rng.random() < 0.65
        else _draw(rng, f"determiners of {'several' if several else 'one'}")
    )
    text = _draw(rng, "groups") if group else f"{determiner} {bare}".strip()
    for _ in range(int(rng.random() < 0.5) + int(rng.random() < 0.12)):
        text += " " + _draw(rng, "places")
    one = pick(rng, ("him", "her", "it")) if person and (group or not several) else "it"
    return _fields(rng, text, bare, "them" if several and not group else one)


def _fields(rng: np.random.Generator, text: str, bare: str, pronoun: str = "it") -> dict[str, str]:
    several = pronoun == "them"
    fields = agreement(pronoun) | {
        "x": text,
        "pl": "s" if several else "",
        "poss": text + ("'" if several else "'s"),
        "n": bare,
        "y": "the " + _draw(rng, "front"),
        "hidden": "",
    }
    return fields | {"ns": bare} if several else fields


def _finish(rng: np.random.Generator, book: Phrasebook, lead: str | None, text: str) -> str:
    """A command or question around a noun phrase, remarks before and after, and slips of the pen."""
    if text[-1] not in ".?!" and rng.random() < 0.5:
        text = pick(rng, book.commands if rng.random() < 0.6 else book.questions).format(w=text)
    if rng.random() < 0.08:
        end = text[-1] if text[-1] in ".?" else ""
        text = f"{text.removesuffix(end)}, {_draw(rng, 'endings')}{end}"
    if rng.random() < 0.08:
        text = f"{_draw(rng, 'openings')}, {text[0].lower()}{text[1:]}"
    if lead or rng.random() < 0.12:
        text = f"{lead or _draw(rng, 'remarks before')} {text[0].upper()}{text[1:]}"
    casing = rng.random()
    if casing < 0.25:
        text = text.lower().removesuffix(".")
    elif casing < 0.5:
        text = text[0].upper() + text[1:]
    return _misspelt(rng, text) if rng.random() < 0.07 else text


def _misspelt(rng: np.random.Generator, text: str) -> str:
    """One to three letters dropped, doubled or swapped."""
    letters = list(text)
    for place in rng.integers(1, max(2, len(letters) - 2), rng.integers(1, 4)):
        at = int(min(place, len(letters) - 2))
        draw = rng.random()
        if draw < 0.4:
            del letters[at]
        elif draw < 0.7:
            letters.insert(at, letters[at])
        else:
            letters[at], letters[at + 1] = letters[at + 1], letters[at]
    return "".join(letters)
