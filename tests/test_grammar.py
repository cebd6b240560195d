"""Wordings are read as their notation says, and held-out words stay held out."""

import re

import pytest
from query_samples import (
    ALL_CLASSES,
    CLASSES,
    COLOURS,
    GROUPS,
    clause_of,
    has_words,
    text_only,
    texts_of,
)

from r2sm_jax.synthetic.queries.grammar import Phrasebook, phrasebook
from r2sm_jax.synthetic.queries.nouns import lexicon, plural

BOOKS = [phrasebook(name) for name in ("wordings", "held_out", "test")]
HELD_OUT_SPLITS = ("val_phrasing", "val_hard", "test")
DRAWN = (*CLASSES.values(), *GROUPS.values())
EVERYTHING = (*ALL_CLASSES.values(), *lexicon().groups.values())


def wordings_of(book: Phrasebook, mask_type) -> set[str]:
    wordings = book.easy[mask_type] + book.hard[mask_type]
    return {text for wording in wordings for text in wording.texts}


def assert_no_held_out_wording(text: str) -> None:
    """The longest part without a field of every held-out wording, if it has five words or more."""
    for book in BOOKS[1:]:
        for wording in wordings_of(book, "modal") | wordings_of(book, "amodal"):
            longest = max(re.split(r"{\w+}", wording), key=len).lower().strip(" ,.?;:")
            assert len(longest.split()) <= 4 or longest not in text, wording


def test_wordings_are_many_and_disjoint():
    all_texts = [
        wordings_of(book, mask_type) for book in BOOKS for mask_type in ("modal", "amodal")
    ]
    assert len(set().union(*all_texts)) == sum(map(len, all_texts))
    for lists in ([b.commands for b in BOOKS], [b.questions for b in BOOKS]):
        assert len(set().union(*lists)) == sum(map(len, lists))

    train, *held_out = BOOKS
    assert train.pairs and all(len(pair) == 2 for pair in train.pairs)  # one of each type
    for mask_type in ("modal", "amodal"):
        assert len(train.easy[mask_type]) + len(train.hard[mask_type]) >= 150
        for book in held_out:
            assert len(wordings_of(book, mask_type)) >= 40 and len(book.hard[mask_type]) >= 25


def test_a_file_is_read_as_its_notation_says(tmp_path):
    path = tmp_path / "wordings.txt"
    path.write_text(
        "# A comment\n== modal: bare\n{x}\n[Mark|Show] {x}.\n\n== amodal: complete\n~<Whole> {n}\n"
        "== pairs\nmodal: half of {x}\namodal: all of {x}\n== commands\nGet {w}.\n== shared words\nwhole: whole|full\n"
    )
    book = Phrasebook(str(path))
    assert [wording.texts for wording in book.bare] == [("{x}",), ("Mark {x}.", "Show {x}.")]
    (easy,), (hard,) = book.easy["amodal"], book.hard["amodal"]
    assert easy.texts == ("Whole {n}", "Full {n}") and easy.needs == {"n", "hidden"}
    assert book.pairs == [{"modal": (book.easy["modal"][-1],), "amodal": (hard,)}]
    assert book.commands == ["Get {w}."]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("== modal: bare\n[a|b {x}", "bracket"),
        ("== modal: bare\n{x}, <only> this", "'<only>'"),
        ("== modal: bare\n{z}", "'{z}'"),
        ("== questions\nWhere is {x}?", "'{x}'"),
        ("== pairs\nmodal: {x}", "shorter"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, content, message):
    path = tmp_path / "wordings.txt"
    path.write_text(content + "\n")
    with pytest.raises(ValueError, match=message):
        Phrasebook(str(path))


def frames_of(texts) -> set[str]:
    """Texts without the words that name things."""
    nouns = [noun for entry in DRAWN for noun in (*entry.nouns, *entry.held_out_nouns)]
    patterns = "plain striped dotted spotted checked checkered the"
    names = " ".join((*COLOURS, *nouns, *map(plural, nouns), patterns))
    named = set(re.findall(r"\w+", names.lower()))
    return {
        " ".join(word for word in re.findall(r"[\w']+", text.lower()) if word not in named)
        for text in texts
    }


def test_training_and_held_out_queries_share_no_text_and_no_frame():
    train = texts_of("train")
    held_out = [text for split in HELD_OUT_SPLITS for text in texts_of(split, 80)]
    assert not set(train) & set(held_out)
    assert not frames_of(train) & frames_of(held_out)
    assert len(frames_of(train)) > 800


PHOTOGRAPHED = sorted(ALL_CLASSES.keys() - (CLASSES.keys() - {"car", "cat", "book", "bottle"}))


# Where the texts that are trained on come from -> these, and the entries of what they name.
TRAINED = {
    "drawn scenes": lambda: (texts_of("train"), DRAWN),
    "photographs": lambda: (
        texts_of("train", 150, photo_names=tuple(PHOTOGRAPHED)),
        map(ALL_CLASSES.get, PHOTOGRAPHED),
    ),
    "text only": lambda: (text_only(), EVERYTHING),
}


@pytest.mark.parametrize("origin", TRAINED)
def test_nothing_held_out_occurs_in_training(origin):
    texts, entries = TRAINED[origin]()
    text = "\n".join(texts).lower()
    assert_no_held_out_wording(text)
    for entry in entries:
        nouns = (*entry.held_out_nouns, *map(plural, entry.held_out_nouns))
        for words in (*nouns, *map(clause_of, entry.held_out_functions)):
            # A plain search first: the text is long.
            assert words.lower() not in text or not has_words(text, words), words


def test_held_out_splits_use_no_training_noun_or_function():
    for split in HELD_OUT_SPLITS:
        for sentence in texts_of(split, 80):
            for entry in DRAWN:
                allowed = " ".join((*entry.held_out_nouns, *entry.held_out_functions))
                for words in map(clause_of, entry.functions):
                    assert not has_words(sentence, words) or words in allowed

            text = sentence.lower()
            for entry in CLASSES.values():
                for noun in entry.held_out_nouns:
                    forms = f"{re.escape(plural(noun))}|{re.escape(noun)}"
                    text = re.sub(rf"\b(?:{forms})\b", "X", text)
            nouns = [noun for entry in CLASSES.values() for noun in entry.nouns]
            assert not [noun for noun in nouns if has_words(text, noun)], sentence
