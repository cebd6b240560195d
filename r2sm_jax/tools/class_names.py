"""What a class is called for people, and whether a text says its name."""

import re
from functools import lru_cache

from r2sm_jax.queries.nouns import plural

_WORD = re.compile(r"[^\W_]+")


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
    pattern = _name_pattern(name)
    return pattern is not None and pattern.search(text.casefold()) is not None


@lru_cache(maxsize=4096)
def _name_pattern(name: str) -> re.Pattern[str] | None:
    *first, last = words_of(display_name(name)) or ("",)
    if not last:
        return None
    # More spellings than English has do no harm: nobody writes "mouses" but for mice.
    lasts = {last, last + "s", last + "es", plural(last)}
    lasts |= {re.sub(ending, several, last) for ending, several in (("y$", "ies"), ("fe?$", "ves"))}
    spellings = "|".join(r"[\s_-]*".join(map(re.escape, (*first, word))) for word in sorted(lasts))
    return re.compile(rf"(?<![^\W_])(?:{spellings})(?![^\W\d_])")
