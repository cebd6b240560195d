"""An answer in words, from what the model found and nothing else.

    "The black cat is found; about 35 % of it is hidden by the laptop; its complete shape is shown
    (IoU about 0.7)."

It names a thing only where the sentence is about one thing that the lexicon knows, so that number
and grammar are right. It does not say what the model does not know: how many there are beside those
that were found, or what hides them, unless the same call found that, too.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from r2sm_jax.data.masks import Mask
from r2sm_jax.query import MaskType
from r2sm_jax.synthetic.queries.nouns import is_plural, lexicon, plural

SURELY_ABSENT_BELOW = 0.1
"""A presence below this is called "no", a higher one "probably no"."""
HIDDEN_FROM = 0.01
"""Hidden shares below this are the rounding of two masks."""
ALMOST_ALL_FROM = 0.975
"""Hidden shares from this on would be rounded to 100 %."""
MIN_COVERED = 0.5
"""Share of a hidden part that the visible mask of another thing covers if that thing hides it."""
MAX_NAME_WORDS = 3
MAX_ADJECTIVES = 3
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

_LEAD_IN = re.compile(
    r"^(?:(?:please|kindly)\s+)?"
    r"(?:(?:show|segment|mark|find|select|highlight|outline|locate|draw|give)\s+(?:me\s+)?)?"
    r"(?:(?:the\s+)?(?:(?:complete|whole|entire|full|true|visible)\s+)?"
    r"(?:shape|outline|extent|form|mask)\s+of\s+)?",
    re.IGNORECASE,
)
_DETERMINER = re.compile(
    r"^(?:all\s+(?:of\s+)?(?:the\s+)?|both\s+(?:of\s+)?(?:the\s+)?|every|each|any|the|an?)\s*\b",
    re.IGNORECASE,
)
_TWO_TARGETS = re.compile(
    r"\b(?:and|or|nor|plus|along with|together with|as well as)\s+"
    r"(?!all\b|whatever\b|its\b|their\b)|[.;:!?&/]\s*\S",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"[\w'’-]+|[^\w\s]")
_ABOUT_THE_MASK = frozenset(
    "whole complete entire full true visible hidden covered unobstructed half half-hidden partly "
    "partially mostly completely fully occluded obscured cropped cut-off".split()
)
"""Adjectives that say which mask is meant; they are no part of a name."""
_LOOKS = frozenset(
    "black white grey gray red orange yellow green blue purple violet pink brown beige golden "
    "silver small big large little tall short long old new left right striped dotted checked "
    "spotted round wooden".split()
)
"""Without "the" or "a", only these may stand before a noun: another word could be a verb."""
_FOLLOWS_A_NAME = frozenset(
    "in on at under underneath beneath below above over behind beside besides near next by with "
    "without from of between inside outside around against to for that which who whose whom where "
    "as even if whether including hidden seen shown cut held worn partly partially half mostly "
    "peeking".split()
)
"""Words after a noun that end its name. A word that is not here could go on with it, as in "the mug
handle"."""
_FUNCTION_WORDS = _FOLLOWS_A_NAME | frozenset(
    "a an the i you he she it we they me him her us them my your his its our their this these "
    "those what how why when there here is are was were be do does did has have had can could "
    "would should will may might must not no and or but so than then only just".split()
)
_AFTER_A_COMMA = frozenset(
    "hidden even as whether including with without also not but please complete whole".split()
)


class Name(NamedTuple):
    """What a query calls its target, without an article: "red mug"."""

    adjectives: str
    singular: str
    plural: str
    is_plural: bool
    """Whether the query has the plural."""

    def __str__(self) -> str:
        return self.several if self.is_plural and not self.is_pair else self.one

    @property
    def is_pair(self) -> bool:
        """Whether one of them takes "are", as scissors do."""
        return is_plural(self.singular)

    @property
    def one(self) -> str:
        """The name of one of them."""
        return f"{self.adjectives} {self.singular}".strip()

    @property
    def several(self) -> str:
        """The name of several: "red mugs", "pairs of red scissors"."""
        head, of, rest = self.plural.partition(" of ")
        if of and not self.singular.startswith(head[:-1]):
            return f"{head} of {self.adjectives} {rest}".replace("  ", " ")
        return f"{self.adjectives} {self.plural}".strip()


@dataclass(frozen=True)
class Facts:
    """What is known of an answer."""

    query: str
    """Empty where a prompt stands in its place."""
    mask_type: MaskType | None
    """None where the system makes no decision."""
    score: float | None
    """Predicted IoU; None where none is predicted."""
    presence: float
    has_mask: bool
    num_instances: int
    hidden_share: float | None
    """Share of the complete shape that is hidden; None where it is not known."""
    is_unsure: bool = False
    is_undecided: bool = False
    is_given: bool = False
    """The visible mask was given."""
    is_like_example: bool = False
    """Whether it was found by the example of a taught name."""
    hidden_by: str = ""
    """The name of what hides it, without an article."""


def describe(facts: Facts) -> str:
    """The answer: one English sentence."""
    name = find_name(facts.query)
    if not facts.has_mask:
        return _describe_nothing(facts, name)

    subject, takes_are = _name_target(facts, name)
    clauses = [_describe_target(facts, subject, takes_are)]
    hidden = _describe_hidden(facts, takes_are)
    if hidden:
        clauses.append(hidden)
    clauses.append(_describe_mask(facts, takes_are))
    sentence = "; ".join(clauses) + "."
    return sentence[0].upper() + sentence[1:]


def _describe_nothing(facts: Facts, name: Name | None) -> str:
    if facts.presence >= 0.5:
        what = "it" if name is None else f"the {name}"
        return f"No mask of {what} is found, though something of the kind may be in this picture."
    no = "no" if facts.presence < SURELY_ABSENT_BELOW else "probably no"
    if name is not None:
        verb = "are" if name.is_plural else "is"
        return f"There {verb} {no} {name} in this picture."
    if not facts.query:
        return f"There is {no} object at the place that is pointed at."
    return f"There is {no} object in this picture that fits the sentence."


def _name_target(facts: Facts, name: Name | None) -> tuple[str, bool]:
    """What is found, and whether it takes "are"."""
    count = facts.num_instances
    number = NUMBERS[count] if count < len(NUMBERS) else str(count)
    if name is not None:
        if count > 1:
            return f"{number} {name.several}", True
        # "The", also for "a mug": how many others there are is not known.
        if count == 1:
            return f"the {name.one}", name.is_pair
        return f"the {name}", name.is_plural
    if facts.is_like_example:
        if count > 1:
            return f"{number} things that look like the example", True
        return "something that looks like the example", False
    if count > 1:
        return f"{number} things that fit the sentence", True
    if facts.is_given:
        return "an object", False
    if not facts.query:
        return "what the prompt points at", False
    return "something that fits the sentence", False


def _describe_target(facts: Facts, subject: str, takes_are: bool) -> str:
    """That it is found, and how sure that is."""
    if facts.is_given:
        return f"the visible mask of {subject} is given"
    if facts.is_unsure:
        return f"{subject} may be here, but the mask is unsure"
    return f"{subject} {'are' if takes_are else 'is'} found"


def _describe_hidden(facts: Facts, many: bool) -> str:
    """How much is hidden, and by what; empty where that is not known."""
    share = facts.hidden_share
    if share is None:
        return ""
    if share < HIDDEN_FROM:
        return f"no hidden part of {'them' if many else 'it'} is found"

    # "20 % of them" would be a number of things.
    whole = "their area" if many else "it"
    by = f" by the {facts.hidden_by}" if facts.hidden_by else ""
    if share >= ALMOST_ALL_FROM:
        return f"{'all' if share == 1 else 'almost all'} of {whole} is hidden{by}"
    # A large share is not known to a percent.
    step = 5 if share >= 0.1 else 1
    return f"about {step * round(100 * share / step)} % of {whole} is hidden{by}"


def _describe_mask(facts: Facts, many: bool) -> str:
    """Which mask is shown, and how good it is."""
    their = "their" if many else "its"
    shape = "complete shape" if facts.mask_type == "amodal" else "visible part"
    verb = "is"
    if many:
        shape += "s"
        verb = "are"
    shown = f"{their} {shape} {verb} shown"
    if facts.mask_type is None:
        # The mask of such a system may be of either type.
        shown = "one mask is shown"
    quality = "" if facts.score is None else f" (IoU about {max(0.0, facts.score):.1f})"
    doubt = ", but the sentence may mean the other mask" if facts.is_undecided else ""
    return f"{shown}{quality}{doubt}"


def find_name(query: str) -> Name | None:
    """What a query calls its target; None if it means several things, or is not sure to name one.

    The name is the first noun phrase, so far as the lexicon knows its noun: "the whole red mug that
    the book hides" has "red mug".
    """
    text = query.strip().rstrip(" .!?").strip()
    if _TWO_TARGETS.search(text):
        return None
    text = _LEAD_IN.sub("", text, count=1)
    without_determiner = _DETERMINER.sub("", text, count=1)
    has_determiner = without_determiner != text

    words = _TOKEN.findall(without_determiner)
    adjectives: list[str] = []
    for start in range(min(len(words), MAX_ADJECTIVES + 1)):
        name = _name_at(words, start, adjectives)
        if name is not None:
            return name
        word = words[start].lower()
        if word in _ABOUT_THE_MASK:
            continue
        if not _is_adjective(word, has_determiner):
            return None
        adjectives.append(words[start])
    return None


def _name_at(words: Sequence[str], start: int, adjectives: Sequence[str]) -> Name | None:
    """The name whose noun begins at this word; None if there is no noun, or the phrase goes on
    after it. The longest noun counts."""
    for end in range(min(start + MAX_NAME_WORDS, len(words)), start, -1):
        noun = " ".join(words[start:end]).lower()
        forms = _forms().get(noun)
        if forms is not None and _ends_name(words[end:]):
            return Name(" ".join(adjectives), *forms, noun != forms[0] or is_plural(noun))
    return None


def _is_adjective(word: str, has_determiner: bool) -> bool:
    if not has_determiner:
        return word in _LOOKS
    return word.replace("-", "").isalpha() and word not in _FUNCTION_WORDS


def _ends_name(rest: Sequence[str]) -> bool:
    """Whether a noun phrase ends before these words: "the mug" does in "the mug behind the jug",
    but not in "the mug handle"."""
    if not rest:
        return True
    first = rest[0].lower()
    if first == ",":
        return len(rest) > 1 and rest[1].lower() in _AFTER_A_COMMA
    return first in _FOLLOWS_A_NAME or bool(re.fullmatch(r"[a-z]{2,}(?:ing|ed)", first))


@cache
def _forms() -> dict[str, tuple[str, str]]:
    """The singular and the plural of the lexicon's nouns, by either of them."""
    nouns: set[str] = set()
    for entry in (*lexicon().classes.values(), *lexicon().groups.values()):
        nouns.update(entry.nouns, entry.held_out_nouns)
    nouns.update(lexicon().nouns["people"], lexicon().nouns["anyone"])

    forms = {plural(noun): (noun, plural(noun)) for noun in sorted(nouns)}
    return forms | {noun: (noun, plural(noun)) for noun in nouns}


def find_hiders(
    queries: Sequence[str], modal: Sequence[Mask], amodal: Sequence[Mask], sure: Sequence[bool]
) -> list[str]:
    """For each query about one image the name of another one's target that hides it.

    Args:
        modal: the visible mask for each query.
        amodal: the complete mask for each query.
        sure: whether the masks of a query are good enough to say so.

    Returns "" where none of the others covers half of the hidden part with its visible mask.
    """
    names = [find_name(query) for query in queries]
    hiders = []
    for index in range(len(queries)):
        hidden = amodal[index] & ~modal[index]
        best = ""
        covered = MIN_COVERED * max(1, np.count_nonzero(hidden))
        for other, name in enumerate(names):
            if name is None or name == names[index] or not sure[other]:
                continue
            count = np.count_nonzero(hidden & modal[other])
            if count >= covered:
                best, covered = str(name), count
        hiders.append(best)
    return hiders
