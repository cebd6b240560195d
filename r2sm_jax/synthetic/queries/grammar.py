"""Sentence templates (wordings.txt and others), expanded to texts with fields such as {x}.

The notation is explained at the top of wordings.txt. Fields are filled later, with the words of a
target.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

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
    choice = _CHOICE.search(template)
    match = choice or _SHARED_WORD.search(template)
    words = match and (match[1] if choice else shared_words.get(match[1].lower()))
    if not match or words is None:
        yield template
        return
    for word in words.split("|"):
        if not choice and match[1][0].isupper():
            word = word[0].upper() + word[1:]
        chosen = template[: match.start()] + word + template[match.end() :]
        yield from _expand_choices(chosen, shared_words)


@cache
def read_sections(file_name: str) -> dict[str, list[str]]:
    """The lines of a text file of this package by section ("== …"), without comments."""
    text = (files("r2sm_jax.synthetic.queries") / file_name).read_text("utf-8")
    sections: dict[str, list[str]] = {}
    title = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("=="):
            title = line.removeprefix("==").strip()
        elif line and not line.startswith("#"):
            sections.setdefault(title, []).append(line)
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
        pairs: Minimal pairs: the wordings of a modal template and of its amodal twin, by type.
        bare: Modal wordings that say nothing about the mask ("Trace {x}."). plain: only "{x}" of
            these, if it is there.
        sets: Hard modal wordings of a whole set of things.
        commands, questions: Sentences around a noun phrase {w}.
        shared_words: Alternatives by name.
    """

    def __init__(self, file_name: str):
        sections = dict(read_sections(file_name))
        self.shared_words = dict(map(_split_name, sections.pop("shared words", ())))
        self.commands = self._expand_frames(sections.pop("commands", ()))
        self.questions = self._expand_frames(sections.pop("questions", ()))
        pairs = sections.pop("pairs", ())

        self.easy: dict[MaskType, list[Wording]] = {"modal": [], "amodal": []}
        self.hard: dict[MaskType, list[Wording]] = {"modal": [], "amodal": []}
        for title, templates in sections.items():
            mask_type, family = _split_name(title)
            for template in templates:
                self._add(mask_type, template, family)
        self.pairs: list[dict[MaskType, tuple[Wording, ...]]] = []
        for lines in zip(pairs[::2], pairs[1::2], strict=True):
            pair = {}
            for mask_type, template in map(_split_name, lines):
                pair[mask_type] = self._add(mask_type, template, "pair")
            self.pairs.append(pair)

        self.bare = [wording for wording in self.easy["modal"] if wording.family == "bare"]
        self.plain = [wording for wording in self.bare if wording.texts == ("{x}",)] or self.bare
        self.sets = [wording for wording in self.hard["modal"] if wording.family == "quantifier"]

    def _expand_frames(self, templates: Iterable[str]) -> list[str]:
        expanded = (expand_template(template, {"w"}, self.shared_words) for template in templates)
        return [text for texts in expanded for text in texts]

    def _add(self, mask_type: Any, template: str, family: str) -> tuple[Wording, ...]:
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


def _split_name(line: str) -> tuple[Any, str]:
    """The parts of "NAME: TEXT"."""
    name, text = line.split(":", 1)
    return name, text.strip()


@cache
def phrasebook(name: Literal["wordings", "held_out", "test"]) -> Phrasebook:
    """The training wordings, the held-out ones, or those of the split `test`."""
    return Phrasebook(f"{name}.txt")
