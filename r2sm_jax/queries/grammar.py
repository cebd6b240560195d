"""Templates and the wordings that they stand for. The notation is explained at the top of wordings.txt."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TypeVar

import numpy as np

from r2sm_jax.errors import InputError
from r2sm_jax.query import MaskType, keyword_mask_type

T = TypeVar("T")

_AGREEMENT = {
    "it": {"it": "it", "they": "it", "its": "its", "itself": "itself"},
    "him": {"it": "him", "they": "he", "its": "his", "itself": "himself"},
    "her": {"it": "her", "they": "she", "its": "her", "itself": "herself"},
    "them": {"it": "them", "they": "they", "its": "their", "itself": "themselves"},
}
_ONE = {"is": "is", "was": "was", "does": "does", "s": "s", "es": "es"}
_SEVERAL = {"is": "are", "was": "were", "does": "do", "s": "", "es": ""}
FIELDS = frozenset({"x", "n", "ns", "poss", "y", "pl"} | _AGREEMENT["it"].keys() | _ONE.keys())
"""What a template can have in braces."""

_CHOICE, _SHARED = re.compile(r"\[([^\[\]]*)\]"), re.compile(r"<([\w ]+)>")


def pick(rng: np.random.Generator, items: Sequence[T]) -> T:
    """One of some items, each as likely."""
    return items[int(rng.random() * len(items))]


def agreement(pronoun: str) -> dict[str, str]:
    """The fields that agree with a target that is "it", "him", "her" or "them"."""
    return _AGREEMENT[pronoun] | (_SEVERAL if pronoun == "them" else _ONE)


def expand(template: str, shared: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Every text that the choices of a template stand for. `shared` holds shared words, as "whole|complete".

    Raises:
        InputError: there are no shared words of a name, or brackets do not match.
    """
    if match := _CHOICE.search(template):
        words = match[1]
    elif match := _SHARED.search(template):
        words = (shared or {}).get(match[1].lower())
        if words is None:
            raise InputError(f"{template!r}: there are no shared words {match[1]!r}")
        if match[1][0].isupper():
            words = "|".join(word[0].upper() + word[1:] for word in words.split("|"))
    elif re.search(r"[][<>{}|~]", re.sub(r"{\w+}", "", template)):
        raise InputError(f"{template!r}: brackets do not match, or a sign stands where it means nothing")
    else:
        return (template,)
    start, end = template[: match.start()], template[match.end() :]
    return tuple(text for word in words.split("|") for text in expand(start + word + end, shared))


@cache
def read_sections(file_name: str) -> dict[str, tuple[str, ...]]:
    """The lines of a text file of this package by the "== …" before them, without comments and empty lines.

    Raises:
        InputError: a line stands before the first section, or two sections have one name.
    """
    sections: dict[str, list[str]] = {}
    title = None
    for number, line in enumerate((files("r2sm_jax.queries") / file_name).read_text("utf-8").splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("=="):
            title = line.removeprefix("==").strip()
            if title in sections:
                raise InputError(f"{file_name}, line {number}: there is a section {title!r} before this one")
            sections[title] = []
        elif title is None:
            raise InputError(f"{file_name}, line {number}: begin a section first, with '== NAME'")
        else:
            sections[title].append(line)
    return {title: tuple(lines) for title, lines in sections.items()}


@dataclass(frozen=True)
class Wording:
    """The texts of one template, all of them right or all of them wrong by the keyword rule."""

    texts: tuple[str, ...]
    family: str
    fields: frozenset[str] = frozenset()
    """What must be known of a target."""
    hidden_only: bool = False
    """Only for a target that is hidden in part."""


class Phrasebook:
    """The wordings of one file.

    Attributes:
        easy, hard: Wordings by mask type that the keyword rule gets right, and wrong.
        pairs: Minimal pairs: the wordings of a modal template and of its amodal twin.
        plain, bare: Modal wordings that are the target alone, and those that say nothing about the mask.
        sets: Hard modal wordings of a whole set of things.
        commands, questions: Sentences around a noun phrase {w}.
    """

    def __init__(self, file_name: str):
        self.easy: dict[MaskType, list[Wording]] = {"modal": [], "amodal": []}
        self.hard: dict[MaskType, list[Wording]] = {"modal": [], "amodal": []}
        sections = dict(read_sections(file_name))
        pairs = sections.pop("pairs", ())
        self.commands, self.questions = sections.pop("commands", ()), sections.pop("questions", ())
        try:
            self._shared = dict(_named_words(line) for line in sections.pop("shared words", ()))
            for title, templates in sections.items():
                mask_type, family = _typed(title)
                for template in templates:
                    self._add(template, family, mask_type)
            self.pairs = [self._add_pair(*pair) for pair in zip(pairs[::2], pairs[1::2], strict=True)]
            for shell in self.commands + self.questions:
                if re.findall(r"{.*?}", shell) != ["{w}"]:
                    raise InputError(f"{shell!r}: a command or question has one {{w}}")
        except (InputError, ValueError) as error:
            raise InputError(f"{file_name}: {error}") from error
        self.bare = [wording for wording in self.easy["modal"] if wording.family == "bare"]
        self.plain = [wording for wording in self.bare if wording.texts == ("{x}",)] or self.bare
        self.sets = [wording for wording in self.hard["modal"] if wording.family == "quantifier"]

    def _add(self, template: str, family: str, mask_type: MaskType) -> tuple[Wording, ...]:
        """Adds the easy and the hard wording of a template, where there are any."""
        texts = expand(template.removeprefix("~"), self._shared)
        fields = frozenset(re.findall(r"{(\w+)}", "".join(texts)))
        if not fields <= FIELDS:
            raise InputError(f"{template!r}: there is no {', '.join(sorted(fields - FIELDS))} to fill in")
        added = []
        for wordings, right in ((self.easy, True), (self.hard, False)):
            chosen = tuple(text for text in texts if (keyword_mask_type(text) == mask_type) == right)
            if chosen:
                added.append(Wording(chosen, family, fields, template.startswith("~")))
                wordings[mask_type].append(added[-1])
        return tuple(added)

    def _add_pair(self, modal: str, amodal: str) -> tuple[tuple[Wording, ...], tuple[Wording, ...]]:
        (first, modal), (second, amodal) = _typed(modal), _typed(amodal)
        if (first, second) != ("modal", "amodal"):
            raise InputError(f"{modal!r}: a pair is a line 'modal: …' and a line 'amodal: …'")
        return self._add(modal, "pair", "modal"), self._add(amodal, "pair", "amodal")

    def all(self, mask_type: MaskType) -> frozenset[str]:
        """Every wording of a type."""
        return frozenset(text for w in self.easy[mask_type] + self.hard[mask_type] for text in w.texts)


def _named_words(line: str) -> tuple[str, str]:
    name, colon, words = line.partition(":")
    if not colon or not all(word.strip() for word in words.split("|")):
        raise InputError(f"{line!r}: shared words are 'NAME: word|word'")
    return name.strip(), "|".join(word.strip() for word in words.split("|"))


def _typed(line: str) -> tuple[MaskType, str]:
    """The parts of "modal: …" or "amodal: …"."""
    mask_type, _, text = line.partition(":")
    if mask_type not in ("modal", "amodal") or not text.strip():
        raise InputError(f"{line!r}: begin with 'modal: ' or 'amodal: '")
    return mask_type, text.strip()


@cache
def phrasebook(held_out: bool) -> Phrasebook:
    """The training wordings or the held-out ones."""
    return Phrasebook("held_out.txt" if held_out else "wordings.txt")
