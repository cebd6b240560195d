"""Templates and the wordings that they stand for. The notation is explained at the top of wordings.txt."""

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from r2sm_jax.errors import InputError
from r2sm_jax.query import MaskType, keyword_mask_type
from r2sm_jax.synthetic.queries.nouns import lexicon

FIELDS = frozenset(
    [
        "x",
        "n",
        "ns",
        "poss",
        "y",
        "pl",
        "it",
        "they",
        "its",
        "itself",
        "is",
        "was",
        "does",
        "s",
        "es",
    ]
)
"""What a wording can have in braces, as wordings.txt explains it."""

_CHOICE, _SHARED = re.compile(r"\[([^\[\]]*)\]"), re.compile(r"<([\w ]+)>")


def agreement(pronoun: str) -> dict[str, str]:
    """The fields that agree with a target that is "it", "him", "her" or "them"."""
    return (
        lexicon().agreement["several" if pronoun == "them" else "one"]
        | lexicon().agreement[pronoun]
    )


def expand(
    template: str, fields: Set[str], shared: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Every text that the choices of a template stand for.

    `fields` are those that it may have in braces; `shared` has shared words by name, as "whole|complete". Raises
    InputError for an unknown field, for unknown shared words and for a bracket without its partner.
    """
    texts = tuple(_choices(template, shared or {}))
    rest = re.sub(f"{{(?:{'|'.join(fields)})}}", "", "".join(texts))
    if wrong := re.search(r"{\w*}?|<[\w ]*>?|[][}>|~]", rest):
        raise InputError(f"{template!r}: {wrong[0]!r} is unknown, or a bracket lacks its partner")
    return texts


def _choices(template: str, shared: Mapping[str, str]) -> Iterator[str]:
    if match := _CHOICE.search(template):
        words = match[1].split("|")
    elif (match := _SHARED.search(template)) and match[1].lower() in shared:
        words = shared[match[1].lower()].split("|")
        if match[1][0].isupper():
            words = [word[0].upper() + word[1:] for word in words]
    else:
        yield template
        return
    for word in words:
        yield from _choices(template[: match.start()] + word + template[match.end() :], shared)


@cache
def read_sections(file_name: str) -> dict[str, list[str]]:
    """The lines of a text file of this package by section ("== …"), without comments and empty lines.

    Raises InputError for a line before the first section.
    """
    lines: list[str] = []
    sections = {"": lines}
    for line in map(
        str.strip, (files("r2sm_jax.synthetic.queries") / file_name).read_text("utf-8").splitlines()
    ):
        if line.startswith("=="):
            lines = sections.setdefault(line.removeprefix("==").strip(), [])
        elif line and not line.startswith("#"):
            lines.append(line)
    if sections.pop(""):
        raise InputError(f"{file_name}: begin a section first, with '== NAME'")
    return sections


@dataclass(frozen=True)
class Wording:
    """Texts of one template. The keyword rule gets the mask type of all of them right, or of none."""

    texts: tuple[str, ...]
    family: str
    needs: frozenset[str] = frozenset()
    """The fields that a target must fill, and "hidden" if it must be hidden in part."""


class Phrasebook:
    """The wordings of one file. Raises InputError for a line that does not follow the notation.

    Attributes:
        easy, hard: Wordings by mask type that the keyword rule gets right, and wrong.
        pairs: Minimal pairs: the wordings of a modal template and of its amodal twin.
        bare: Modal wordings that say nothing about the mask ("Trace {x}."). plain: of these only "{x}", if it is there.
        sets: Hard modal wordings of a whole set of things.
        commands, questions: Sentences around a noun phrase {w}.
        shared: Shared words by name.
    """

    def __init__(self, file_name: str):
        self.easy: dict[MaskType, list[Wording]] = {"modal": [], "amodal": []}
        self.hard: dict[MaskType, list[Wording]] = {"modal": [], "amodal": []}
        sections = dict(read_sections(file_name))
        commands, questions, pairs = (
            sections.pop(title, []) for title in ("commands", "questions", "pairs")
        )
        try:
            self.shared = dict(_split(line) for line in sections.pop("shared words", []))
            for title, templates in sections.items():
                mask_type, family = _split(title, *self.easy)
                for template in templates:
                    self._add(mask_type, template, family)
            self.pairs = [
                (
                    self._add(*_split(modal, "modal"), "pair"),
                    self._add(*_split(amodal, "amodal"), "pair"),
                )
                for modal, amodal in zip(pairs[::2], pairs[1::2], strict=True)
            ]
            self.commands = [text for line in commands for text in expand(line, {"w"}, self.shared)]
            self.questions = [
                text for line in questions for text in expand(line, {"w"}, self.shared)
            ]
        except ValueError as error:
            raise InputError(f"{file_name}: a pair lacks its second line") from error
        except InputError as error:
            raise InputError(f"{file_name}: {error}") from error
        self.bare = [wording for wording in self.easy["modal"] if wording.family == "bare"]
        self.plain = [wording for wording in self.bare if wording.texts == ("{x}",)] or self.bare
        self.sets = [wording for wording in self.hard["modal"] if wording.family == "quantifier"]

    def _add(self, mask_type: MaskType, template: str, family: str) -> tuple[Wording, ...]:
        """Adds the easy and the hard wording of a template, where there are any."""
        texts = expand(template.removeprefix("~"), FIELDS, self.shared)
        needs = frozenset(re.findall(r"{(\w+)}", "".join(texts))) | (
            {"hidden"} if template.startswith("~") else set()
        )
        added = []
        for wordings, right in ((self.easy, True), (self.hard, False)):
            chosen = tuple(
                text for text in texts if (keyword_mask_type(text) == mask_type) == right
            )
            if chosen:
                added.append(Wording(chosen, family, needs))
                wordings[mask_type].append(added[-1])
        return tuple(added)


def _split(line: str, *names: str) -> tuple[Any, str]:
    """The parts of "NAME: TEXT". Any name is allowed if `names` is empty."""
    name, _, text = line.partition(":")
    if not text.strip() or (names and name not in names):
        raise InputError(f"{line!r}: expected '{' or '.join(names) or 'NAME'}: …'")
    return name, text.strip()


@cache
def phrasebook(name: Literal["wordings", "held_out", "test"]) -> Phrasebook:
    """The training wordings, the held-out ones, or those of the split `test`, which are neither of these."""
    return Phrasebook(f"{name}.txt")
