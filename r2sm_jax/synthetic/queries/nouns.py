"""Nouns: what objects are called, plurals, which objects a noun could mean, class names.

A class name of a file becomes a noun of a query in two steps. `display_name` takes away underscores
and final numbers ("The coffee_mug_075" → "The coffee mug"), and `clean_name` the article, case and
punctuation ("coffee mug"). That noun is looked up in the lexicon, which may have others for it
("cup"). `words_of` and `same_class` only compare names, and `says_name` finds them in sentences of
a language model.
"""

import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

_PREPOSITION = re.compile(r"\s+(?:of|in|on|with|behind|at|from|for|under|by|near|to|and)\s+")
_WORD = re.compile(r"[^\W_]+")
_SINGULAR_ENDINGS = ("ss", "us", "is", "'s", "lens", "canvas")


@dataclass(frozen=True)
class LexiconEntry:
    """Nouns and function clauses of a class or a group of classes (see lexicon.toml)."""

    classes: Sequence[str]
    functions: Sequence[str] = ()
    held_out_functions: Sequence[str] = ()
    nouns: Sequence[str] = ()
    held_out_nouns: Sequence[str] = ()
    unless: Sequence[str] = ()


@dataclass(frozen=True)
class Lexicon:
    """The classes that the grammar knows, and nouns in general (see lexicon.toml)."""

    classes: Mapping[str, LexiconEntry]
    groups: Mapping[str, LexiconEntry]
    patterns: Mapping[str, Mapping[str, Sequence[str]]]
    plurals: Mapping[str, str]
    nouns: Mapping[str, Sequence[str]]
    agreement: Mapping[str, dict[str, str]]


@cache
def read_toml(file_name: str) -> dict[str, Any]:
    """A TOML file of this package."""
    return tomllib.loads((files("r2sm_jax.synthetic.queries") / file_name).read_text("utf-8"))


@cache
def lexicon() -> Lexicon:
    """The content of lexicon.toml, with the classes and plurals of lexicon_objects.toml."""
    tables = dict(read_toml("lexicon.toml"))
    for name, more in read_toml("lexicon_objects.toml").items():
        tables[name] = tables[name] | more
    for name, entry in tables["classes"].items():
        entry["classes"] = [name]
    return msgspec.convert(tables, Lexicon)


def lexicon_entry(name: str) -> LexiconEntry:
    """The entry of a class in the lexicon, or its name alone."""
    nouns = [name] if name else []
    alone = LexiconEntry([name], nouns=nouns, held_out_nouns=nouns)
    return lexicon().classes.get(name, alone)


def clean_name(name: str) -> str:
    """The noun in a free-text region name: lower case, without article and punctuation."""
    noun = re.sub(r"[^\w\s'&/-]", " ", name.lower().replace("_", " "))
    return re.sub(r"^(?:the|a|an|some)\s+", "", " ".join(noun.split()))


def is_plural(noun: str) -> bool:
    """Whether a noun takes "are": "scissors", "people", "chairs"; not "bus", "row of trees"."""
    if re.search(r"\sand\s", noun):
        return True
    words = _PREPOSITION.split(noun)[0].split()
    head = words[-1] if words else ""
    if head in lexicon().nouns["always_plural"]:
        return True
    return head.endswith("s") and len(head) > 3 and not head.endswith(_SINGULAR_ENDINGS)


def plural(noun: str) -> str:
    """The plural of a noun phrase: "wine glass" → "wine glasses", "bit of pie" → "bits of pie"."""
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
    elif word.endswith(("s", "x", "z", "ch", "sh")):
        word += "es"
    else:
        word += "s"
    return f"{start} {word}".strip() + "".join(rest)


@cache
def could_mean(noun: str, category: str) -> bool:
    """Whether a noun could mean an object of a category: "cup" a mug, "box" a cat litter box."""
    if category in lexicon().classes:
        entry = lexicon().classes[category]
        if noun in entry.nouns or noun in entry.held_out_nouns:
            return True
    elif f" {category}".endswith((f" {noun}", f" {plural(noun)}")):
        return True

    # "The person" could be the girl, and "the girl" the person, but "the girl" is not the boy.
    heads = {noun.split()[-1], category.split()[-1] if category else ""}
    anyone = lexicon().nouns["anyone"]
    return heads.issubset((*anyone, *lexicon().nouns["people"])) and not heads.isdisjoint(anyone)


def display_name(name: str) -> str:
    """A class name without underscores and final numbers: "coffee_mug_075" → "coffee mug"."""
    words = name.replace("_", " ").split()
    while len(words) > 1 and words[-1].isdigit():
        words.pop()
    return " ".join(words)


def words_of(text: str) -> tuple[str, ...]:
    """The words and numbers of a text, without case and punctuation."""
    return tuple(_WORD.findall(text.casefold()))


def same_class(text: str, name: str) -> bool:
    """Whether a text is the class `name`, as it is written or as it is displayed."""
    return words_of(text) in (words_of(name), words_of(display_name(name)))


def absent_names(names: Iterable[str], present: Collection[str]) -> list[str]:
    """The names of classes that none of those which are present may be: "cup" is not absent beside
    "Cups" or "coffee cup", nor is "coffee cup" beside "cup"."""
    absent = []
    for name in names:
        if not any(says_name(name, other) or says_name(other, name) for other in present):
            absent.append(name)
    return absent


def says_name(text: str, name: str) -> bool:
    """Whether a text says a class name or its plural, in one word, in several or with hyphens."""
    return _name_pattern(name).search(text.casefold()) is not None


@cache
def _name_pattern(name: str) -> re.Pattern[str]:
    """A pattern for a class name and its plural in any spelling, as a word of its own."""
    words = words_of(display_name(name))
    if not words:
        return re.compile("(?!)")  # matches nothing

    # More spellings than English has do no harm: nobody writes "mouses" but for mice.
    *first, last = words
    last_words = {last, last + "s", last + "es", plural(last)}
    last_words |= {re.sub("y$", "ies", last), re.sub("fe?$", "ves", last)}
    spellings = [r"[\s_-]*".join((*first, word)) for word in sorted(last_words)]
    return re.compile(rf"(?<![^\W_])(?:{'|'.join(spellings)})(?![^\W\d_])")
