"""Wordings are read as their notation says, and held-out ones stay held out."""

import re

import pytest
from query_samples import ALL_CLASSES, CLASSES, COLOURS, GROUPS, has_words, queries_of

from r2sm_jax.synthetic.queries.grammar import Phrasebook, phrasebook
from r2sm_jax.synthetic.queries.nouns import lexicon, plural
from r2sm_jax.synthetic.queries.sentences import (
    text_only_templates,
    write_text_only_queries,
    written_sentences,
)


def all_wordings(book, mask_type):
    return frozenset(text for w in book.easy[mask_type] + book.hard[mask_type] for text in w.texts)


def held_out_wordings():
    books = phrasebook("held_out"), phrasebook("test")
    return frozenset().union(
        *(all_wordings(book, mask_type) for book in books for mask_type in ("modal", "amodal"))
    )


def test_wordings_are_many_and_disjoint():
    train, *others = phrasebook("wordings"), phrasebook("held_out"), phrasebook("test")
    sets = [
        all_wordings(book, mask_type)
        for book in (train, *others)
        for mask_type in ("modal", "amodal")
    ]
    assert len(frozenset().union(*sets)) == sum(map(len, sets))
    for mask_type in ("modal", "amodal"):
        # Templates, before their choices of words.
        assert len(train.easy[mask_type]) + len(train.hard[mask_type]) >= 150
        for book in others:
            assert len(all_wordings(book, mask_type)) >= 40 and len(book.hard[mask_type]) >= 25
    for name in ("commands", "questions"):
        lists = [getattr(book, name) for book in (train, *others)]
        assert len(set().union(*lists)) == sum(map(len, lists))


def test_a_wordings_file_is_read_as_its_notation_says(tmp_path):
    path = tmp_path / "wordings.txt"
    path.write_text(
        "# A comment\n== modal: bare\n{x}\n[Mark|Show] {x}.\n\n== amodal: complete\n~<Whole> {n}\n"
        "== pairs\nmodal: half of {x}\namodal: all of {x}\n== commands\nGet {w}.\n== shared words\nwhole: whole|full\n"
    )
    book = Phrasebook(str(path))
    assert [wording.texts for wording in book.bare] == [("{x}",), ("Mark {x}.", "Show {x}.")]
    (whole,), (hard,) = book.easy["amodal"], book.hard["amodal"]
    assert whole.texts == ("Whole {n}", "Full {n}") and whole.needs == {"n", "hidden"}
    assert book.pairs == [((book.easy["modal"][-1],), (hard,))] and book.commands == ["Get {w}."]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{x}", "begin a section"),
        ("== visible\n{x}", "expected 'modal or amodal: …'"),
        ("== modal: bare\n[a|b {x}", "a bracket lacks its partner"),
        ("== modal: bare\n{x}, <only> this", "'<only>' is unknown"),
        ("== modal: bare\n{z}", "'{z}' is unknown"),
        ("== questions\nWhere is {x}?", "'{x}' is unknown"),
        ("== shared words\nonly", "expected 'NAME: …'"),
        ("== pairs\nmodal: {x}", "a pair lacks its second line"),
        ("== pairs\nmodal: {x}\nmodal: {x}", "expected 'amodal: …'"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, content, message):
    path = tmp_path / "wordings.txt"
    path.write_text(content + "\n")
    with pytest.raises(ValueError, match=message) as caught:
        Phrasebook(str(path))
    assert str(path) in str(caught.value)


def _frames(texts):
    """Texts without the words that name things."""
    nouns = [
        n for m in (*CLASSES.values(), *GROUPS.values()) for n in (*m.nouns, *m.held_out_nouns)
    ]
    patterns = "plain striped dotted spotted checked checkered the"
    names = " ".join((*COLOURS, *nouns, *map(plural, nouns), patterns))
    vocabulary = set(re.findall(r"\w+", names.lower()))
    return {
        " ".join(w for w in re.findall(r"[\w']+", text.lower()) if w not in vocabulary)
        for text in texts
    }


def test_nothing_held_out_occurs_in_training():
    train = [q.text for q in queries_of("train", 250)]
    held_out = [
        q.text for split in ("val_phrasing", "val_hard", "test") for q in queries_of(split, 80)
    ]
    assert not set(train) & set(held_out)
    assert not _frames(train) & _frames(held_out)
    assert len(_frames(train)) > 800
    joined = "\n".join(train).lower()
    meanings = (*CLASSES.values(), *GROUPS.values())
    for words in [w for m in meanings for w in (*m.held_out_nouns, *m.held_out_functions)]:
        assert not has_words(joined, words.removeprefix("that ")), words
    for text in held_out_wordings():
        longest = max(re.split(r"{\w+}", text), key=len).lower().strip(" ,.?;:")
        if len(longest.split()) > 4:
            assert longest not in joined, text


def test_nothing_held_out_occurs_in_the_sentences_about_anything():
    """They are trained on too: every text that they are made of is read, not a sample, for nouns of all classes."""
    texts = [text for texts in text_only_templates().values() for text in texts]
    texts += [row.text for row in written_sentences()]
    texts += [sentence.text for sentence in write_text_only_queries(1000, seed=0)]
    joined = "\n".join(texts).lower()
    for meaning in (*ALL_CLASSES.values(), *lexicon().groups.values()):
        nouns = [form for noun in meaning.held_out_nouns for form in (noun, plural(noun))]
        clauses = [
            clause.split(" | ")[-1].removeprefix("that ") for clause in meaning.held_out_functions
        ]
        assert not [words for words in (*nouns, *clauses) if has_words(joined, words)]
    for text in held_out_wordings():
        longest = max(re.split(r"{\w+}", text), key=len).lower().strip(" ,.?;:")
        assert len(longest.split()) <= 4 or longest not in joined, text


def test_held_out_splits_use_no_training_noun_or_function():
    for split in ("val_phrasing", "val_hard", "test"):
        for query in queries_of(split, 80):
            for meaning in (*CLASSES.values(), *GROUPS.values()):
                allowed = " ".join((*meaning.held_out_nouns, *meaning.held_out_functions))
                for clause in meaning.functions:
                    words = clause.split(" | ")[-1].removeprefix("that ")
                    assert not has_words(query.text, words) or words in allowed
            text = query.text.lower()
            for meaning in CLASSES.values():
                for noun in meaning.held_out_nouns:
                    text = re.sub(
                        rf"\b(?:{re.escape(plural(noun))}|{re.escape(noun)})\b", "X", text
                    )
            named = [noun for m in CLASSES.values() for noun in m.nouns if has_words(text, noun)]
            assert not named, (query.text, named)
