"""Nouns: what objects are called (lexicon.toml), plurals, and which objects a noun could mean."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from r2sm_jax.errors import InputError

_PREPOSITION = re.compile(r"\s+(?:of|in|on|with|behind|at|from|for|under|by|near|to|and)\s+")
_SINGULAR_ENDINGS = ("ss", "us", "is", "'s", "lens", "canvas")


@dataclass(frozen=True)
class Meaning:
    """Nouns and function clauses of a class or of a group of classes, as lexicon.toml explains them."""

    classes: frozenset[str]
    nouns: tuple[str, ...]
    held_out_nouns: tuple[str, ...]
    functions: tuple[str, ...]
    held_out_functions: tuple[str, ...]
    unless: frozenset[str] = frozenset()
    """Classes that could be meant too: the words are not used beside them."""


@dataclass(frozen=True)
class Lexicon:
    """The content of lexicon.toml."""

    classes: Mapping[str, Meaning]
    groups: Mapping[str, Meaning]
    patterns: Mapping[str, Mapping[str, list[str]]]
    """Words `before` a noun and `after` it, by pattern."""
    plurals: Mapping[str, str]
    always_plural: frozenset[str]
    anyone: frozenset[str]
    """Nouns that any person could be called by."""
    people: frozenset[str]
    """These, and nouns for some people."""


@cache
def read_toml(file_name: str) -> dict[str, Any]:
    """A TOML file of this package.

    Raises:
        InputError: a line is not TOML.
    """
    try:
        return tomllib.loads((files("r2sm_jax.queries") / file_name).read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{file_name}: {error}") from error


@cache
def lexicon() -> Lexicon:
    """The classes that the grammar knows, and nouns in general.

    Raises:
        InputError: an entry of lexicon.toml lacks something or has something unknown.
    """
    content = read_toml("lexicon.toml")
    try:
        nouns = {name: frozenset(words) for name, words in content["nouns"].items()}
        return Lexicon(
            classes={name: _meaning(name, entry | {"classes": [name]}) for name, entry in content["class"].items()},
            groups={
                name: _meaning(name, {"nouns": [], "held_out_nouns": []} | entry)
                for name, entry in content["group"].items()
            },
            patterns=content["pattern"],
            plurals=content["plural"],
            always_plural=nouns["always_plural"],
            anyone=nouns["anyone"],
            people=nouns["anyone"] | nouns["people"],
        )
    except KeyError as error:
        raise InputError(f"lexicon.toml: there is no {error}") from error


def _meaning(name: str, entry: Mapping[str, list[str]]) -> Meaning:
    sets = {key: frozenset(entry[key]) for key in ("classes", "unless") if key in entry}
    try:
        return Meaning(**{key: tuple(words) for key, words in entry.items()} | sets)
    except TypeError as error:
        raise InputError(f"lexicon.toml, {name!r}: {str(error).removeprefix('Meaning.__init__() ')}") from error


def clean_name(name: str) -> str:
    """The noun in a free-text region name: lower case, no article, no stray blanks or punctuation."""
    noun = re.sub(r"[^\w\s'&/-]", " ", name.lower().replace("_", " "))
    return re.sub(r"^(?:the|a|an|some)\s+", "", " ".join(noun.split()))


def is_plural(noun: str) -> bool:
    """Whether a noun takes "are": "scissors", "people", "wooden chairs"; not "bus", "row of trees"."""
    if re.search(r"\sand\s", noun):
        return True
    head = (_PREPOSITION.split(noun)[0].split() or [""])[-1]
    if head in lexicon().always_plural:
        return True
    return head.endswith("s") and len(head) > 3 and not head.endswith(_SINGULAR_ENDINGS)


def plural(noun: str) -> str:
    """The plural of a noun phrase: "wine glass" → "wine glasses", "piece of fruit" → "pieces of fruit"."""
    irregular = lexicon().plurals
    if noun in irregular:
        return irregular[noun]
    if is_plural(noun):
        return noun
    head, *rest = re.split(r"(?=\s+(?:of|in|on|with)\s+)", noun, maxsplit=1)
    start, _, word = head.rpartition(" ")
    if word in irregular:
        word = irregular[word]
    elif re.search(r"[^aeiou]y$", word):
        word = word[:-1] + "ies"
    elif re.search(r"(?:s|x|z|ch|sh)$", word):
        word += "es"
    else:
        word += "s"
    return f"{start} {word}".strip() + "".join(rest)


def could_mean(noun: str, category: str) -> bool:
    """Whether a noun could mean an object of a category: "cup" a "mug", "box" a "cat litter box"."""
    words = lexicon()
    if category in words.classes:
        return noun in words.classes[category].nouns + words.classes[category].held_out_nouns
    if any(category == word or category.endswith(" " + word) for word in (noun, plural(noun))):
        return True
    heads = {noun.split()[-1], category.split()[-1] if category else ""}
    return heads <= words.people and not heads.isdisjoint(words.anyone)
