"""Sentences without an image, for the mask-type head: from the grammar and from written lists.

The drawn scenes know a few dozen classes. A head that reads only about those takes the noun for a
part of the wording, and fails when somebody asks for a lighthouse. So `write_text_only_queries`
fills the training wordings with hundreds of other nouns, with people, places and remarks that say
nothing about the mask type, and with spelling mistakes.

Of the lists in intent/, only `r2sm_train` and `rules_train` are trained on (docs/intent.md).
"""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec
import numpy as np

from r2sm_jax.errors import InputError
from r2sm_jax.query import MASK_TYPES, MaskType, Sentence
from r2sm_jax.synthetic.queries.grammar import (
    FIELDS,
    Phrasebook,
    Wording,
    agreement,
    expand_template,
    phrasebook,
    read_sections,
)
from r2sm_jax.synthetic.queries.nouns import lexicon, plural
from r2sm_jax.synthetic.random_choice import pick

# Of all draws, texts from which nobody can tell which mask is meant, sentences in the manner of
# R2SM, and short plain ones. The rest are from the grammar's wordings.
UNDECIDABLE_SHARE = 0.04
R2SM_SHARE = 0.6
PLAIN_SHARE = 0.12
# Of draws from wordings, those that give both halves of a minimal pair for one target.
PAIR_SHARE = 0.15

# Of plain sentences about things that cannot be full of something (amodal ones) and that can (modal
# ones), those in which they are "full". Which can is learned noun by noun.
FULL_SHARE = 0.35
FULL_VESSEL_SHARE = 0.7
# Of modal plain sentences, those that are a question for a use; of all, those with an adjective;
# their nouns.
PLAIN_QUESTION_SHARE = 0.08
PLAIN_ADJECTIVE_SHARE = 0.2
PLAIN_NOUNS = ("thing", "everyday", "person", "vessel", "vessel", "vessel")
# Plain wordings whose {x} is not what is meant begin so.
ABOUT_OTHERS = ("a full {vessel} beside", "the person hiding behind")

# Of targets, those that are named by a purpose, and those that are "it" after a question about
# their use. The rest are things and people.
PURPOSE_SHARE = 0.16
USE_QUESTION_SHARE = 0.08

# Of things, those like "a pile of books", and of all targets those like "a garden chair".
THINGS_OF_SHARE = 0.1
COMPOUND_SHARE = 0.1

# Of finished sentences, those with another beginning or end, and those with spelling mistakes.
FRAME_SHARE = 0.5
ENDING_SHARE = 0.08
OPENING_SHARE = 0.08
REMARK_SHARE = 0.12
MISSPELT_SHARE = 0.07

SentenceList = Literal[
    "development", "test", "calibration", "r2sm_train", "rules_train", "val_r2sm"
]
"""Lists of sentences in intent/. docs/intent.md says who wrote them, and from what."""


# Lists of sentences


@cache
def intent_sentences(name: SentenceList = "development") -> tuple[Sentence, ...]:
    """The sentences of intent/NAME.tsv."""
    path = files("r2sm_jax.synthetic.queries") / "intent" / f"{name}.tsv"
    return read_sentences(path.read_text(encoding="utf-8"), name)


def read_sentences(text: str, name: str) -> tuple[Sentence, ...]:
    """Reads labelled sentences: tab-separated columns, `mask_type` and `text` among them. Lines
    that begin with # are comments.

    Raises InputError, which names the list, for a missing column and an unknown mask type.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    try:
        sentences = msgspec.convert(list(rows), tuple[Sentence, ...])
    except msgspec.ValidationError as error:
        raise InputError(f"{name}: {error}; see docs/intent.md") from error
    if not sentences:
        raise InputError(f"{name}: there is no sentence in it; see docs/intent.md")
    return sentences


@cache
def target_sentences(name: Literal["target_train", "target_test"]) -> tuple[Sentence, ...]:
    """Sentences whose words that name what is meant (`Sentence.target`) were labelled by reading;
    those of "target_test" have the family "named" or "described"."""
    path = files("r2sm_jax.synthetic.queries") / "intent" / f"{name}.tsv"
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    sentences = []
    for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
        target = "" if row["target"] == "-" else row["target"]
        sentences.append(Sentence(row["text"], "modal", row.get("kind", ""), target=target))
    return tuple(sentences)


def written_sentences() -> tuple[Sentence, ...]:
    """The sentences in the manner of R2SM that are trained on; `family` is the author."""
    return intent_sentences("r2sm_train") + intent_sentences("rules_train")


@cache
def text_only_templates() -> dict[str, tuple[str, ...]]:
    """All texts of words.txt, text_only_queries.txt and nothing.txt by section."""
    words = read_sections("words.txt")
    fields = FIELDS | words.keys()
    shared_words = phrasebook("wordings").shared_words
    templates = {}
    for title, lines in (words | read_sections("text_only_queries.txt")).items():
        expanded = [expand_template(line, fields, shared_words) for line in lines]
        templates[title] = tuple(text for texts in expanded for text in texts)
    return templates | {"nothing": tuple(read_sections("nothing.txt")["nothing"])}


# Sentences for training


def write_text_only_queries(
    count: int, *, seed: int, without: Sequence[str] = ()
) -> list[Sentence]:
    """Writes `count` different sentences, half of them modal.

    The keyword rule gets 0.3 to 0.6 of either type wrong. Those in the manner of R2SM are written
    `without` some of their authors, such as "author a". What says nothing at all (nothing.txt) is
    there as modal and as amodal, so that a head learns to be undecided.
    """
    rng = np.random.default_rng(seed)
    book = phrasebook("wordings")
    r2sm_sentences = _r2sm_sentences(rng, without)
    by_text: dict[str, Sentence] = {}

    # A text that has come before changes nothing; another one is drawn in its place.
    while len(by_text) < count:
        draw = rng.random()
        if draw < UNDECIDABLE_SHARE:
            text = _pick_text(rng, "nothing")
            mask_type = pick(rng, MASK_TYPES)
            sentence = Sentence(text, mask_type, f"{mask_type}: nothing", target="")
            # The key has the type, since the same text may come once with each.
            by_text.setdefault(f"{mask_type}: {text}", sentence)
        elif draw < UNDECIDABLE_SHARE + R2SM_SHARE:
            sentence = next(r2sm_sentences)
            text = _finish(rng, book, None, sentence.text)
            by_text.setdefault(text, replace(sentence, text=text))
        elif draw < UNDECIDABLE_SHARE + R2SM_SHARE + PLAIN_SHARE:
            sentence = _plain_sentence(rng, book)
            by_text.setdefault(sentence.text, sentence)
        else:
            for sentence in _sentences_from_wordings(rng, book):
                by_text.setdefault(sentence.text, sentence)
    return list(by_text.values())[:count]


def _r2sm_sentences(rng: np.random.Generator, without: Sequence[str]) -> Iterator[Sentence]:
    """Yields random written sentences without end, some with a second one behind.

    The second one may change which mask they ask for. Of sentences with the same
    `Sentence.reason`, all are used before any comes again.
    """
    texts: dict[str, list[str]] = {}
    for sentence in written_sentences():
        if sentence.family not in without:
            texts.setdefault(sentence.reason, []).append(sentence.text)
    unused: dict[str, list[str]] = {reason: [] for reason in texts}
    targets = {sentence.text: sentence.target for sentence in target_sentences("target_train")}

    while True:
        mask_type: MaskType = pick(rng, MASK_TYPES)
        # A form is a reason, perhaps with the section of a second sentence: "plain, hiding
        # follow-ups".
        form = pick(rng, text_only_templates()[f"{mask_type}: forms"])
        reason, _, second_section = form.partition(", ")
        if not unused[reason]:
            unused[reason] = rng.permutation(texts[reason]).tolist()
        text = unused[reason].pop()
        target = targets.get(text)
        if second_section:
            first = text if text[-1] in ".?!" else text + "."
            text = f"{first} {_pick_text(rng, second_section)}"
        yield Sentence(text, mask_type, f"{mask_type}: r2sm {form}", target=target)


def _plain_sentence(rng: np.random.Generator, book: Phrasebook) -> Sentence:
    """A short request for one thing, in plain words: "the whole bench", "the full glass".

    What "the full X" asks for depends on the noun: of a vessel it is one that is full.
    """
    noun = _pick_text(rng, pick(rng, PLAIN_NOUNS))
    is_vessel = noun in text_only_templates()["vessel"]
    mask_type = pick(rng, MASK_TYPES)
    if mask_type == "modal" and rng.random() < PLAIN_QUESTION_SHARE:
        question = _question(rng)
        text = _finish(rng, book, None, question)
        return Sentence(text, mask_type, "modal: plain: use", target=question.rstrip("?"))
    section = f"plain: {mask_type}"
    full_share = FULL_VESSEL_SHARE if is_vessel else FULL_SHARE
    if rng.random() < full_share and (mask_type == "modal") == is_vessel:
        section = "plain: full"
        if is_vessel and rng.random() < 0.5:
            section = "plain: full of something"

    if rng.random() < PLAIN_ADJECTIVE_SHARE:
        noun = f"{_pick_text(rng, 'adjective')} {noun}"
    fields = _make_fields(rng, f"the {noun}", noun) | {"ns": plural(noun)}
    template = pick(rng, text_only_templates()[section])
    target = None if template.startswith(ABOUT_OTHERS) else fields["name"]
    text = _finish(rng, book, None, _fill(rng, template, fields))
    return Sentence(text, mask_type, f"{mask_type}: {section}", target=target)


def _sentences_from_wordings(rng: np.random.Generator, book: Phrasebook) -> Iterator[Sentence]:
    """A sentence about a random target, or both halves of a minimal pair."""
    fields = _make_target(rng)
    wordings: dict[MaskType, Wording] = {}
    if rng.random() < PAIR_SHARE:
        pair = pick(rng, book.pairs)
        wordings = {mask_type: pick(rng, pair[mask_type]) for mask_type in MASK_TYPES}
    else:
        mask_type = pick(rng, MASK_TYPES)
        wordings[mask_type] = _choose_wording(rng, book, mask_type)

    for mask_type, wording in wordings.items():
        if wording.needs <= fields.keys():
            text = _fill(rng, pick(rng, wording.texts), fields)
            text = _finish(rng, book, fields.get("lead"), text)
            family = f"{mask_type}: {wording.family}"
            yield Sentence(text, mask_type, family, target=fields.get("name"))


def _choose_wording(rng: np.random.Generator, book: Phrasebook, mask_type: MaskType) -> Wording:
    """A random wording of a type: a bare or casual one, or one of the grammar's lists."""
    templates = text_only_templates()
    if mask_type == "modal" and rng.random() < 0.4:
        text = pick(rng, templates["modal: casual"] + templates["questions about use"])
        casual = Wording((text,), "bare")
        return pick(rng, (casual, pick(rng, book.plain), pick(rng, book.bare)))

    if rng.random() < 0.12:
        section = "amodal: casual" if mask_type == "amodal" else "modal: nothing guessed"
        return Wording((pick(rng, templates[section]),), "casual")

    wordings = (book.hard if rng.random() < 0.5 else book.easy)[mask_type]
    # Half of the draws take every family of meaning equally often, however many wordings it has.
    if rng.random() < 0.5:
        family = pick(rng, list(dict.fromkeys(wording.family for wording in wordings)))
        wordings = [wording for wording in wordings if wording.family == family]
    return pick(rng, wordings)


# Targets


def _make_target(rng: np.random.Generator) -> dict[str, str]:
    """The fields of a random target and of the thing in front of it."""
    draw = rng.random()
    if draw < PURPOSE_SHARE:
        text = _pick_text(rng, "purposes") if rng.random() < 0.3 else _description(rng)
        fields = _make_fields(rng, text, _pick_text(rng, "nouns of purposes"))
        return fields | {"name": re.sub("^(?:the|a|an|any|some|all the|all) ", "", text)}
    if draw < PURPOSE_SHARE + USE_QUESTION_SHARE:
        fields = _make_fields(rng, "it", "thing")
        if rng.random() < 0.3:
            del fields["name"]
            return fields | {"lead": _pick_text(rng, "questions about use")}
        question = _question(rng)
        return fields | {"lead": question, "name": question.rstrip("?")}
    return _make_thing_or_person(rng)


def _make_thing_or_person(rng: np.random.Generator) -> dict[str, str]:
    """The fields of one or several things or people, perhaps with adjective and place."""
    is_person = rng.random() < 0.25
    is_several = rng.random() < 0.25
    bare = _pick_text(rng, "person" if is_person else "thing")
    if not is_person and not is_several and rng.random() < THINGS_OF_SHARE:
        bare = _pick_text(rng, "things of")
    elif rng.random() < COMPOUND_SHARE:
        bare = f"{_pick_text(rng, 'thing')} {bare}"
    if is_several:
        bare += "es" if bare.endswith(("s", "sh", "ch", "x")) else "s"
    if rng.random() < 0.35:
        bare = f"{_pick_text(rng, 'adjective')} {bare}"

    is_group = rng.random() < 0.05
    determiner = "the"
    if rng.random() >= 0.65:
        determiner = _pick_text(rng, f"determiners of {'several' if is_several else 'one'}")
    text = _pick_text(rng, "groups") if is_group else f"{determiner} {bare}".strip()

    num_places = int(rng.random() < 0.5) + int(rng.random() < 0.12)
    for _ in range(num_places):
        text += " " + _pick_text(rng, "places")

    # A group of people or things ("the crowd") is one, whatever it consists of.
    pronoun = "it"
    if is_person and (is_group or not is_several):
        pronoun = pick(rng, ("him", "her", "it"))
    elif is_several and not is_group:
        pronoun = "them"
    fields = _make_fields(rng, text, bare, pronoun)
    if is_group:
        del fields["name"]
    return fields


@cache
def _clauses() -> list[str]:
    """What things of the lexicon do or are for: "that tells the time", "you would sit on"."""
    entries = (*lexicon().classes.values(), *lexicon().groups.values())
    clauses = dict.fromkeys(clause for entry in entries for clause in entry.functions)
    # Others are said after a remark of their own, or after a few heads alone.
    return [clause for clause in clauses if re.match(r"(?:that|you would) (?!.* \| )", clause)]


def _description(rng: np.random.Generator) -> str:
    """A thing that is told by its use alone: "the object that tells the time"."""
    head = _pick_text(rng, "heads of descriptions")
    clause = pick(rng, _clauses())
    return f"{head} {clause.removeprefix('that ') if 'what' in head else clause}"


def _question(rng: np.random.Generator) -> str:
    """A question for a thing by its use: "What tells the time?", "What would you sit on?"."""
    clause = pick(rng, [c for c in _clauses() if not re.match("that (?:you|people|one|an?) ", c)])
    if clause.startswith("that "):
        return f"What {clause.removeprefix('that ')}?"
    return f"What would {clause.replace(' would', '', 1)}?"


def _make_fields(
    rng: np.random.Generator, text: str, bare: str, pronoun: str = "it"
) -> dict[str, str]:
    """The fields of a target that is called `text`, or `bare` without its article.

    "name" is no field of a wording: it is what a text with these fields says of its target
    (`Sentence.target`), and is not there where that is not known.
    """
    is_several = pronoun == "them"
    fields = agreement(pronoun) | {
        "x": text,
        "pl": "s" if is_several else "",
        "poss": text + ("'" if is_several else "'s"),
        "n": bare,
        "name": re.sub("^(?:hidden|covered) ", "", bare),
        "y": "the " + _pick_text(rng, "front"),
        "hidden": "",
    }
    return fields | {"ns": bare} if is_several else fields


def _pick_text(rng: np.random.Generator, section: str) -> str:
    """A random text of a section, with its fields filled."""
    return _fill(rng, pick(rng, text_only_templates()[section]))


def _fill(rng: np.random.Generator, text: str, fields: Mapping[str, str] | None = None) -> str:
    """Fills in the fields of a target, and for {thing}, {person}, ... a random word of its list."""
    target_fields = fields or {}

    def word(match: re.Match[str]) -> str:
        name = match[1]
        if name in target_fields:
            return target_fields[name]
        return pick(rng, text_only_templates()[name])

    while "{" in text:  # words may have fields themselves
        text = re.sub(r"{(\w+)}", word, text)
    return text


# What surrounds a sentence


def _finish(rng: np.random.Generator, book: Phrasebook, lead: str | None, text: str) -> str:
    """Puts a noun phrase into a command or question, adds remarks, and makes slips of the pen."""
    if text[-1] not in ".?!" and rng.random() < FRAME_SHARE:
        frames = book.commands if rng.random() < 0.6 else book.questions
        text = pick(rng, frames).format(w=text)
    if rng.random() < ENDING_SHARE:
        end = text[-1] if text[-1] in ".?" else ""
        text = f"{text.removesuffix(end)}, {_pick_text(rng, 'endings')}{end}"
    if rng.random() < OPENING_SHARE:
        text = f"{_pick_text(rng, 'openings')}, {text[0].lower()}{text[1:]}"
    if lead or rng.random() < REMARK_SHARE:
        remark = lead or _pick_text(rng, "remarks before")
        text = f"{remark} {text[0].upper()}{text[1:]}"

    # A quarter is all lower case, a quarter begins with a capital, the rest stays as it is.
    casing = rng.random()
    if casing < 0.25:
        text = text.lower().removesuffix(".")
    elif casing < 0.5:
        text = text[0].upper() + text[1:]
    return _misspell(rng, text) if rng.random() < MISSPELT_SHARE else text


def _misspell(rng: np.random.Generator, text: str) -> str:
    """One to three letters dropped, doubled or swapped."""
    letters = list(text)
    num_mistakes = rng.integers(1, 4)
    for position in rng.integers(1, max(2, len(letters) - 2), num_mistakes):
        at = int(min(position, len(letters) - 2))  # each dropped letter makes the text shorter
        draw = rng.random()
        if draw < 0.4:
            del letters[at]
        elif draw < 0.7:
            letters.insert(at, letters[at])
        else:
            letters[at], letters[at + 1] = letters[at + 1], letters[at]
    return "".join(letters)
