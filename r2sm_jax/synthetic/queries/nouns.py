"""Nouns: what objects are called (lexicon.toml), plurals, which objects a noun could mean, and names of classes."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from r2sm_jax.errors import InputError

_PREPOSITION = re.compile(r"\s+(?:of|in|on|with|behind|at|from|for|under|by|near|to|and)\s+")
_WORD = re.compile(r"[^\W_]+")
_SINGULAR_ENDINGS = ("ss", "us", "is", "'s", "lens", "canvas")


@dataclass(frozen=True)
class Meaning:
    """Nouns and function clauses of a class or of a group of classes, as lexicon.toml explains them."""

    classes: Sequence[str]
    functions: Sequence[str] = ()
    held_out_functions: Sequence[str] = ()
    nouns: Sequence[str] = ()
    held_out_nouns: Sequence[str] = ()
    unless: Sequence[str] = ()


@dataclass(frozen=True)
class Lexicon:
    """The classes that the grammar knows, and nouns in general. lexicon.toml explains the entries."""

    classes: Mapping[str, Meaning]
    groups: Mapping[str, Meaning]
    patterns: Mapping[str, Mapping[str, Sequence[str]]]
    plurals: Mapping[str, str]
    nouns: Mapping[str, Sequence[str]]
    agreement: Mapping[str, dict[str, str]]


@cache
def read_toml(file_name: str) -> dict[str, Any]:
    """A TOML file of this package. Raises InputError for a line that is not TOML."""
    try:
        return tomllib.loads((files("r2sm_jax.synthetic.queries") / file_name).read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{file_name}: {error}") from error


@cache
def lexicon() -> Lexicon:
    """The content of lexicon.toml, with the classes and plurals of lexicon_objects.toml. Raises InputError if it lacks
    something or has something unknown."""
    content = dict(read_toml("lexicon.toml"))
    try:
        for kind, more in read_toml("lexicon_objects.toml").items():
            content[kind] = content[kind] | more
        for kind in ("classes", "groups"):
            content[kind] = {
                name: Meaning(**{"classes": [name]} | entry)
                for name, entry in content[kind].items()
            }
        return Lexicon(**content)
    except (KeyError, TypeError) as error:
        raise InputError(f"lexicon.toml: {error}") from error


def meaning_of(name: str) -> Meaning:
    """The entry of a class in the lexicon, or its name alone."""
    nouns = [name] if name else []
    return lexicon().classes.get(name) or Meaning([name], nouns=nouns, held_out_nouns=nouns)


def clean_name(name: str) -> str:
    """The noun in a free-text region name: lower case, no article, no stray blanks or punctuation."""
    noun = re.sub(r"[^\w\s'&/-]", " ", name.lower().replace("_", " "))
    return re.sub(r"^(?:the|a|an|some)\s+", "", " ".join(noun.split()))


def is_plural(noun: str) -> bool:
    """Whether a noun takes "are": "scissors", "people", "wooden chairs"; not "bus", "row of trees"."""
    if re.search(r"\sand\s", noun):
        return True
    head = (_PREPOSITION.split(noun)[0].split() or [""])[-1]
    if head in lexicon().nouns["always_plural"]:
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
    else:
        word += "es" if word.endswith(("s", "x", "z", "ch", "sh")) else "s"
    return f"{start} {word}".strip() + "".join(rest)


@cache
def could_mean(noun: str, category: str) -> bool:
    """Whether a noun could mean an object of a category: "cup" a "mug", "box" a "cat litter box"."""
    words = lexicon()
    if category in words.classes:
        if noun in (*words.classes[category].nouns, *words.classes[category].held_out_nouns):
            return True
    elif f" {category}".endswith((f" {noun}", f" {plural(noun)}")):
        return True
    heads = {noun.split()[-1], category.split()[-1] if category else ""}
    anyone = words.nouns["anyone"]
    return heads.issubset((*anyone, *words.nouns["people"])) and not heads.isdisjoint(anyone)


def display_name(name: str) -> str:
    """A class name without underscores and without trailing numbers: "coffee_mug_075" → "coffee mug"."""
    words = name.replace("_", " ").split()
    while len(words) > 1 and words[-1].isdigit():
        words.pop()
    return " ".join(words)


def words_of(text: str) -> tuple[str, ...]:
    """The words and numbers of a text, without case and punctuation."""
    return tuple(_WORD.findall(text.casefold()))


def same_class(said: str, name: str) -> bool:
    """Whether `said` is the class `name`, as it is written or as it is displayed."""
    return words_of(said) in (words_of(name), words_of(display_name(name)))


def says_name(text: str, name: str) -> bool:
    """Whether a text says a class name or its plural, in one word, in several or with hyphens."""
    return _name_pattern(name).search(text.casefold()) is not None


@cache
def _name_pattern(name: str) -> re.Pattern[str]:
    *first, last = words_of(display_name(name)) or ("",)
    if not last:
        return re.compile("(?!)")  # found nowhere
    # More spellings than English has do no harm: nobody writes "mouses" but for mice.
    lasts = {last, last + "s", last + "es", plural(last)}
    lasts |= {re.sub(ending, several, last) for ending, several in (("y$", "ies"), ("fe?$", "ves"))}
    spellings = "|".join(r"[\s_-]*".join(map(re.escape, (*first, word))) for word in sorted(lasts))
    return re.compile(rf"(?<![^\W_])(?:{spellings})(?![^\W\d_])")
