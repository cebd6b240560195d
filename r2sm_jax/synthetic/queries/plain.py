"""The table of plain wordings and nouns: "the whole bench", "the full glass", "what shows of the
cat".

The lists of written sentences have few plain short ones, and a head that is right on all lists may
take "the full bench" for modal. So every plain wording is crossed with several hundred nouns. Some
wordings and some nouns are those of plain_held_out.txt, from which nothing is trained.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from r2sm_jax.query import MaskType, Sentence
from r2sm_jax.synthetic.queries.grammar import FIELDS, expand_template, read_sections
from r2sm_jax.synthetic.queries.nouns import plural

HELD_OUT = "plain_held_out.txt"
ROWS: tuple[tuple[str, MaskType, str], ...] = (
    ("plain: modal", "modal", "thing, vessel"),
    ("plain: amodal", "amodal", "thing, vessel"),
    ("plain: full", "amodal", "thing"),
    ("plain: full", "modal", "vessel"),
    ("plain: full of something", "modal", "vessel"),
)
"""Sections of wordings, what they ask for, and of which nouns."""
WORDS = {
    "y": "the tree",
    "thing": "stone",
    "vessel": "bucket",
    "person": "woman",
    "adjective": "big",
}
"""What stands for other things, always the same."""
MEETS = 4
"""A wording meets every fourth noun, each wording others; one with "full" meets all of its own."""
EVERY_THING = 4
"""Every fourth thing of words.txt is in the table; all vessels and all everyday nouns are."""


@dataclass(frozen=True)
class PlainSentence(Sentence):
    """A plain wording with a noun. Its `family` is the wording, such as "the whole X" or "the full
    VESSEL"."""

    noun: str = ""
    is_new_wording: bool = False
    """Nothing was trained on the wording."""
    is_new_noun: bool = False
    """Nothing was trained on the noun."""


@cache
def plain_sentences() -> tuple[PlainSentence, ...]:
    """Every sentence of the table, wording by wording."""
    sentences = []
    nouns = plain_nouns()
    for number, (template, mask_type, kinds, is_new_wording) in enumerate(_read_wordings()):
        own = [(noun, is_new) for noun, kind, is_new in nouns if kind in kinds]
        chosen = own[number % MEETS :: MEETS] if "," in kinds else own
        wording = _fill(template, "X" if "thing" in kinds else "VESSEL")
        for noun, is_new in chosen:
            text = _fill(template, noun)
            about = PlainSentence(
                text,
                mask_type,
                family=wording,
                noun=noun,
                is_new_wording=is_new_wording,
                is_new_noun=is_new,
            )
            sentences.append(about)
    return tuple(sentences)


def plain_nouns() -> list[tuple[str, str, bool]]:
    """The nouns of the table, whether each is a "thing" or a "vessel", and whether it is new."""
    words, held_out = read_sections("words.txt"), read_sections(HELD_OUT)
    vessels = set(words["vessel"])
    things = dict.fromkeys([*words["everyday"], *words["thing"][::EVERY_THING]])
    nouns = [(noun, "thing", False) for noun in things if noun not in vessels]
    nouns += [(noun, "vessel", False) for noun in words["vessel"]]
    for kind in ("thing", "vessel"):
        nouns += [(noun, kind, True) for noun in held_out[kind]]
    return nouns


def _read_wordings() -> Iterator[tuple[str, MaskType, str, bool]]:
    """Yields each template, what it asks for, of which kinds of nouns, and whether it is new."""
    for section, mask_type, kinds in ROWS:
        for file_name in ("text_only_queries.txt", HELD_OUT):
            lines = read_sections(file_name).get(section, ())
            expanded = [expand_template(line, FIELDS | WORDS.keys(), {}) for line in lines]
            # A wording that is trained on more often stands in its section more often.
            for template in dict.fromkeys(text for texts in expanded for text in texts):
                yield template, mask_type, kinds, file_name == HELD_OUT


def _fill(template: str, noun: str) -> str:
    """A wording about one noun."""
    fields = {"x": f"the {noun}", "n": noun, "ns": plural(noun), "poss": f"the {noun}'s"}
    return template.format_map(WORDS | fields)
