"""Sentence templates (wordings.txt and others), expanded to texts with fields such as {x}.

The notation is explained at the top of wordings.txt. Fields are filled later, with the words of a
target.
"""

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from r2sm_jax.query import MaskType, keyword_mask_type
from r2sm_jax.synthetic.queries.nouns import lexicon

FIELDS = frozenset("x n ns poss y pl it they its itself is was does s es".split())
"""The fields that a wording can have in braces, as wordings.txt explains them."""

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SHARED_WORD = re.compile(r"<([\w ]+)>")
_NOT_EXPANDED = re.compile(r"{\w*}?|<[\w ]*>?|[][}>|~]")


def agreement(pronoun: str) -> dict[str, str]:
    """The fields that agree with a target that is "it", "him", "her" or "them"."""
    number = "several" if pronoun == "them" else "one"
    return lexicon().agreement[number] | lexicon().agreement[pronoun]


def expand_template(
    template: str, fields: Set[str], shared_words: Mapping[str, str]
) -> tuple[str, ...]:
    """Every text that the choices of a template stand for.

    `fields` may be in braces. `shared_words` are alternatives by name, as "whole|complete". Raises
    ValueError for an unknown field or name, and for a bracket without its partner.
    """
    texts = tuple(_expand_choices(template, shared_words))
    without_fields = re.sub(f"{{(?:{'|'.join(fields)})}}", "", "".join(texts))
    wrong = _NOT_EXPANDED.search(without_fields)
    if wrong:
        raise ValueError(f"{template!r}: {wrong[0]!r} is unknown, or a bracket lacks its partner")
    return texts


def _expand_choices(template: str, shared_words: Mapping[str, str]) -> Iterator[str]:
    """Replaces the first choice by each of its words, and goes on with each of these templates."""
    match = _CHOICE.search(template)
    if match:
        words = match[1].split("|")
    else:
        match = _SHARED_WORD.search(template)
        if not match or match[1].lower() not in shared_words:
            yield template
            return
        words = shared_words[match[1].lower()].split("|")
        if match[1][0].isupper():
            words = [word[0].upper() + word[1:] for word in words]

    for word in words:
        chosen = template[: match.start()] + word + template[match.end() :]
        yield from _expand_choices(chosen, shared_words)


@cache
def read_sections(file_name: str) -> dict[str, list[str]]:
    """The lines of a text file of this package by section ("== …"), without comments.

    Raises ValueError for a line before the first section.
    """
    text = (files("r2sm_jax.synthetic.queries") / file_name).read_text("utf-8")
    sections: dict[str, list[str]] = {}
    title = None
    for line in map(str.strip, text.splitlines()):
        if line.startswith("=="):
            title = line.removeprefix("==").strip()
            sections.setdefault(title, [])
        elif line and not line.startswith("#"):
            if title is None:
                raise ValueError(f"{file_name}: begin a section first, with '== NAME'")
            sections[title].append(line)
    return sections


@dataclass(frozen=True)
class Wording:
    """Texts of one template.

    The keyword rule gets the mask type of all of them right, or of none.
    """

    texts: tuple[str, ...]
    family: str
    needs: frozenset[str] = frozenset()
    """The fields that a target must fill, and "hidden" if it must be partly hidden."""


class Phrasebook:
    """The wordings of one file. Raises ValueError for a line that does not follow the notation.

    Attributes:
        easy, hard: Wordings by mask type that the keyword rule gets right, and wrong.
        pairs: Minimal pairs: the wordings of a modal template and of its amodal twin.
        bare: Modal wordings that say nothing about the mask ("Trace {x}."). plain: only "{x}" of
            these, if it is there.
        sets: Hard modal wordings of a whole set of things.
        commands, questions: Sentences around a noun phrase {w}.
        shared_words: Alternatives by name.
    """

    def __init__(self, file_name: str):
        self.easy: dict[MaskType, list[Wording]] = {"modal": [], "amodal": []}
        self.hard: dict[MaskType, list[Wording]] = {"modal": [], "amodal": []}
        self.pairs: list[tuple[tuple[Wording, ...], tuple[Wording, ...]]] = []
        try:
            self._read(read_sections(file_name))
        except ValueError as error:
            raise ValueError(f"{file_name}: {error}") from error

        self.bare = [wording for wording in self.easy["modal"] if wording.family == "bare"]
        self.plain = [wording for wording in self.bare if wording.texts == ("{x}",)] or self.bare
        self.sets = [wording for wording in self.hard["modal"] if wording.family == "quantifier"]

    def _read(self, sections: Mapping[str, list[str]]) -> None:
        shared_lines = sections.get("shared words", [])
        self.shared_words = dict(_split_name(line, "NAME") for line in shared_lines)
        self.commands = self._expand_frames(sections.get("commands", []))
        self.questions = self._expand_frames(sections.get("questions", []))

        for title, templates in sections.items():
            if title in ("shared words", "commands", "questions", "pairs"):
                continue
            mask_type, family = _split_mask_type(title)
            for template in templates:
                self._add(mask_type, template, family)

        pairs = sections.get("pairs", [])
        if len(pairs) % 2:
            raise ValueError("a pair lacks its second line")
        for modal, amodal in zip(pairs[::2], pairs[1::2], strict=True):
            modal_wordings = self._add(*_split_mask_type(modal, "modal"), "pair")
            amodal_wordings = self._add(*_split_mask_type(amodal, "amodal"), "pair")
            self.pairs.append((modal_wordings, amodal_wordings))

    def _expand_frames(self, templates: list[str]) -> list[str]:
        frames: list[str] = []
        for template in templates:
            frames += expand_template(template, {"w"}, self.shared_words)
        return frames

    def _add(self, mask_type: MaskType, template: str, family: str) -> tuple[Wording, ...]:
        """Adds the easy and the hard wording of a template, where there are any."""
        texts = expand_template(template.removeprefix("~"), FIELDS, self.shared_words)
        needs = set(re.findall(r"{(\w+)}", "".join(texts)))
        if template.startswith("~"):
            needs.add("hidden")

        # Texts of one template can differ in what the keyword rule makes of them.
        right = [text for text in texts if keyword_mask_type(text) == mask_type]
        wrong = [text for text in texts if keyword_mask_type(text) != mask_type]
        added = []
        for wordings, chosen in ((self.easy, right), (self.hard, wrong)):
            if chosen:
                wording = Wording(tuple(chosen), family, frozenset(needs))
                wordings[mask_type].append(wording)
                added.append(wording)
        return tuple(added)


def _split_name(line: str, expected: str) -> tuple[str, str]:
    """The parts of "NAME: TEXT"."""
    name, _, text = line.partition(":")
    if not text.strip():
        raise ValueError(f"{line!r}: expected '{expected}: …'")
    return name, text.strip()


def _split_mask_type(
    line: str, expected: Literal["modal", "amodal", "modal or amodal"] = "modal or amodal"
) -> tuple[MaskType, str]:
    """The parts of "modal: TEXT" or "amodal: TEXT".

    Raises ValueError for a line that has not the `expected` type before its colon.
    """
    name, text = _split_name(line, expected)
    if name == "modal" and expected != "amodal":
        return "modal", text
    if name == "amodal" and expected != "modal":
        return "amodal", text
    raise ValueError(f"{line!r}: expected '{expected}: …'")


@cache
def phrasebook(name: Literal["wordings", "held_out", "test"]) -> Phrasebook:
    """The training wordings, the held-out ones, or those of the split `test`."""
    return Phrasebook(f"{name}.txt")
