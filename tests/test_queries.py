"""The query grammar: its sentences mean exactly their targets."""

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from query_samples import (
    ALL_CLASSES,
    CLASSES,
    COLOURS,
    GROUPS,
    PATTERNS,
    PHOTO_NAMES,
    SPLITS,
    has_words,
    random_objects,
    samples_of,
)

from r2sm_jax.query import keyword_mask_type
from r2sm_jax.synthetic.queries.grammar import phrasebook, read_sections
from r2sm_jax.synthetic.queries.nouns import clean_name, is_plural, lexicon, lexicon_entry, plural
from r2sm_jax.synthetic.queries.objects import ObjectFacts
from r2sm_jax.synthetic.queries.write import (
    SPLITS as ALL_SPLITS,
    write_absent_queries,
    write_queries,
)


def make_object(number: int, category: str, x: float = 0.0) -> ObjectFacts:
    return ObjectFacts(number, category, (x, 0.0, x + 20, 20.0), 400.0, 0.0, ())


@pytest.mark.parametrize("split", SPLITS)
def test_queries_are_complete_balanced_and_a_third_is_hard_for_a_keyword_rule(split):
    is_hard = {"modal": [], "amodal": []}
    for objects, queries in samples_of(split, 100):
        assert Counter(query.mask_type for query in queries) == {"modal": 4, "amodal": 4}
        assert len({query.text for query in queries}) == 8
        for query in queries:
            assert query.instance_ids == tuple(sorted(query.instance_ids)) != ()
            assert set(query.instance_ids) <= {facts.id for facts in objects}
            assert not re.search(r"[{}\[\]<>|~]|  | ,|\.\.|\?\.", query.text), query.text
            kind = query.kind
            assert set(kind) == {"task", "hard", "multi", "wording", "form"}
            assert kind["task"] in ("referring", "reasoning")
            assert kind["form"] in ("noun phrase", "command", "question")
            assert kind["multi"] == (len(query.instance_ids) > 1)
            assert kind["hard"] == (keyword_mask_type(query.text) != query.mask_type)
            is_hard[query.mask_type].append(kind["hard"])
    for of_type in is_hard.values():
        assert all(of_type) if split == "val_hard" else 0.25 < np.mean(of_type) < 0.5


def test_val_hard_asks_for_every_target_in_both_types():
    for _, queries in samples_of("val_hard", 60):
        counts = Counter((query.instance_ids, query.mask_type) for query in queries)
        assert all(counts[ids, "modal"] == counts[ids, "amodal"] for ids, _ in counts)


def test_the_splits_keep_their_order():
    """A sample is rebuilt from the position of its split in this list."""
    order = ["train", "val", "val_phrasing", "val_hard", "dev", "val_absent", "test"]
    assert list(ALL_SPLITS) == order


def test_few_objects():
    rng = np.random.default_rng(0)
    assert write_queries([], rng=rng, count=4) == ()
    assert write_queries([make_object(7, " ")], rng=rng, count=2) == ()
    for split in SPLITS:
        queries = write_queries([make_object(7, "odd thing")], rng=rng, count=6, split=split)
        assert [query.instance_ids for query in queries] == [(7,)] * 6


def test_forbidden_targets_are_never_meant():
    rng = np.random.default_rng(0)
    objects = [make_object(k, f"thing {k}", 50.0 * k) for k in range(3)]
    queries = write_queries(objects, rng=rng, count=8, forbidden={"modal": {2}, "amodal": {1, 2}})
    assert Counter(query.mask_type for query in queries) == {"modal": 4, "amodal": 4}
    for query in queries:
        assert set(query.instance_ids) <= ({0, 1} if query.mask_type == "modal" else {0})

    no_amodal = {"modal": {2}, "amodal": {0, 1, 2}}
    queries = write_queries(objects, rng=rng, count=8, forbidden=no_amodal)
    assert [query.mask_type for query in queries] == ["modal"] * 8
    nothing = {"modal": {0, 1, 2}, "amodal": {0, 1, 2}}
    assert write_queries(objects, rng=rng, count=8, forbidden=nothing) == ()

    no_modal = {"modal": {facts.id for facts in objects}}
    queries = write_queries(objects, rng=rng, count=8, forbidden=no_modal)
    assert {query.mask_type for query in queries} == {"amodal"}


def test_what_is_never_meant_counts_in_no_number_and_no_order():
    """Three dogs side by side, one of them ignored: no sentence counts dogs, and positions are true
    with and without it."""
    sides = {1: 20.0, 2: 30.0, 3: 44.0}
    objects = []
    for number, side in sides.items():
        box = (60.0 * number, 40.0, 60.0 * number + side, 40.0 + side)
        objects.append(ObjectFacts(number, "dog", box, side * side, 0.0, ()))
    targets = set()
    for ignored in sides:
        forbidden = {"modal": {ignored}, "amodal": {ignored}}
        rng = np.random.default_rng(ignored)
        for _ in range(20):
            for query in write_queries(objects, rng=rng, count=8, forbidden=forbidden):
                (target,) = query.instance_ids
                targets.add((ignored, target))
                assert not re.search(r"\b(two|three|2|3|pair|second|third)\b", query.text)
    # Of two outer dogs both can be told apart; beside an ignored outer one only the other one can.
    assert targets == {(1, 3), (2, 1), (2, 3), (3, 1)}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("photo_names", [(), PHOTO_NAMES])
def test_absent_queries_have_no_target_and_no_word_for_what_is_there(split, photo_names):
    rng, counts = np.random.default_rng(0), Counter()

    def nouns_of(names) -> set[str]:
        entries = [lexicon_entry(clean_name(name)) for name in names]
        return {noun for e in entries for noun in (*e.nouns, *e.held_out_nouns)}

    for _ in range(40):
        objects = random_objects(rng, photo_names)
        present = {facts.category for facts in objects}
        absent = [name for name in photo_names or CLASSES if name not in present]
        queries = write_absent_queries(objects, absent, rng=rng, count=3, split=split)
        assert len({query.text for query in queries}) == len(queries)
        nouns = nouns_of(absent) - nouns_of(present)
        for query in queries:
            assert query.instance_ids == () and not query.kind["multi"]
            assert query.kind["hard"] or split != "val_hard"
            assert any(has_words(query.text, noun) for noun in nouns), query.text
            counts[query.mask_type] += 1
    assert min(counts.values()) > (5 if split == "val_hard" else 20), counts

    options = {"rng": rng, "count": 3, "split": split}
    assert write_absent_queries(objects, [objects[0].category], **options) == ()
    assert write_absent_queries([], absent, **options) == ()


@pytest.mark.parametrize("split", ["train", "val_phrasing"])
def test_names_pick_exactly_their_targets(split):
    """Reads "the red mug", "the biggest mug" and "the mug behind the book" back, without the
    grammar."""
    held_out = split == "val_phrasing"
    nouns = {}
    for name, entry in CLASSES.items():
        nouns |= dict.fromkeys(entry.held_out_nouns if held_out else entry.nouns, name)
    patterns = {word: name for name, words in PATTERNS.items() for word in words["before"]}
    name = (
        r"the (?P<size>biggest |smallest |bigger |smaller )?"
        rf"(?P<pattern>(?:{'|'.join(patterns)}) )?(?P<colour>(?:{'|'.join(COLOURS)}) )?"
        rf"(?P<noun>{'|'.join(sorted(nouns, key=len, reverse=True))})"
    )
    related = rf"{name}(?: (?P<link>behind|in front of) {name.replace('P<', 'P<other_')})?"

    # The sentences around a name that say nothing about the mask.
    book_name = "held_out" if held_out else "wordings"
    frames = [
        wording.format(x="{w}", **{"is": "is"})
        for wording in read_sections(f"{book_name}.txt")["modal: bare"]
        if "[" not in wording
    ]
    if not held_out:
        frames += ["{w}", *phrasebook("wordings").commands, *phrasebook("wordings").questions]
    sentences = [
        re.compile(re.escape(frame.lower().rstrip(".?")).replace(r"\{w\}", related) + "[.?]?")
        for frame in frames
    ]

    def find_objects(match, objects, prefix="") -> list[ObjectFacts]:
        noun, colour, pattern, size = (
            match[prefix + group] for group in ("noun", "colour", "pattern", "size")
        )
        matching = [
            facts
            for facts in objects
            if facts.category == nouns[noun]
            and (not colour or facts.colour == colour.strip())
            and (not pattern or facts.pattern == patterns[pattern.strip()])
        ]
        if size and matching:
            extreme = max if size.startswith("bigg") else min
            return [extreme(matching, key=lambda facts: facts.area)]
        return matching

    counts = Counter()
    for objects, queries in samples_of(split):
        for query in queries:
            matches = [sentence.fullmatch(query.text.lower()) for sentence in sentences]
            match = next(filter(None, matches), None)
            if match is None or query.kind["multi"]:
                continue
            targets = find_objects(match, objects)
            if match["link"]:
                (anchor,) = find_objects(match, objects, "other_")
                if match["link"] == "behind":
                    targets = [facts for facts in targets if anchor.id in facts.hidden_by]
                else:
                    targets = [facts for facts in targets if facts.id in anchor.hidden_by]
            counts["link" if match["link"] else "name"] += 1
            assert [facts.id for facts in targets] == list(query.instance_ids), query.text
            assert query.mask_type == "modal"
    assert counts["name"] > 20 and (held_out or counts["link"] > 0), counts


def test_targets_do_not_tell_the_type():
    is_hidden = {"modal": [], "amodal": []}
    for objects, queries in samples_of("train"):
        occlusion = {facts.id: facts.occlusion for facts in objects}
        for query in queries:
            if not query.kind["multi"]:
                is_hidden[query.mask_type].append(occlusion[query.instance_ids[0]] > 0.05)
    modal, amodal = np.mean(is_hidden["modal"]), np.mean(is_hidden["amodal"])
    assert 0.35 < modal < 0.75 and abs(modal - amodal) < 0.1


@pytest.mark.parametrize("split", SPLITS)
def test_reasoning_does_not_name_the_class(split):
    count = 0
    for objects, queries in samples_of(split, 70):
        category = {facts.id: facts.category for facts in objects}
        for query in queries:
            if query.kind["task"] != "reasoning":
                continue
            count += 1
            # The object in front may be named: "…, with the mug out of the way".
            others = {name for i, name in category.items() if i not in query.instance_ids}
            for name in {category[i] for i in query.instance_ids} - others:
                for noun in (*CLASSES[name].nouns, *CLASSES[name].held_out_nouns):
                    assert not has_words(query.text, noun), query.text
    assert count > 50


@pytest.mark.parametrize("split", ["train", "val_phrasing"])
def test_of_several_on_a_photo_those_that_are_counted_are_meant(split):
    """Both of two that stand at one place, and nothing else, have no number from the left."""
    objects = [make_object(k, "dog", x) for k, x in enumerate((0, 40, 80, 81, 300), start=1)]
    objects.append(make_object(6, "bench", 20))
    number = {"second": 2, "third": 3}
    seen = set()
    for seed in range(40):
        rng = np.random.default_rng(seed)
        for query in write_queries(objects, rng=rng, count=8, split=split, of_photo=True):
            counted = re.search(r"(second|third) .* from the (left|right)", query.text.lower())
            if counted and len(query.instance_ids) == 1:
                seen.add(counted.groups())
                place = number[counted[1]] if counted[2] == "left" else 6 - number[counted[1]]
                assert query.instance_ids == (place,), query.text
                assert place == 2
    assert seen == {("second", "left")}


def test_half_of_the_phrases_about_a_photo_choose_among_things_of_a_kind():
    objects = [make_object(k, "cat", 40 * k) for k in (1, 2)]
    objects += [make_object(k, name, 40 * k) for k, name in enumerate(PHOTO_NAMES[:4], start=3)]
    shares = {}
    for of_photo in (False, True):
        rng = np.random.default_rng(0)
        queries = write_queries(objects, rng=rng, count=60, of_photo=of_photo)
        shares[of_photo] = np.mean([len({1, 2} & {*q.instance_ids}) == 1 for q in queries])
    assert shares[True] > 0.4 > shares[False]


def test_the_colour_of_a_person_is_that_of_the_clothes():
    people = [replace(make_object(1, "person"), colour="red"), make_object(2, "dog", 40)]
    texts = [
        query.text.lower()
        for seed in range(20)
        for query in write_queries(people, rng=np.random.default_rng(seed), count=8, of_photo=True)
    ]
    with_colour = [text for text in texts if "red" in text.split()]
    assert with_colour and all(re.search(r"(in|wearing) red", text) for text in with_colour)


def test_shared_names_are_not_used_alone():
    """ "The box" could be the cat litter box as well, "the person" also the man."""
    for names, shared in ((("box", "cat litter box"), "box"), (("person", "man"), "person")):
        objects = [make_object(k, name, 40.0 * k) for k, name in enumerate(names)]
        alone = rf"(?<!litter )\b{shared}\b(?! (?:on|at|furthest|to|left|right))"
        for query in write_queries(objects, rng=np.random.default_rng(0), count=30):
            text = query.text.lower()
            if query.instance_ids == (0,) and re.search(alone, text):
                assert re.search(r"leftmost|bigger|larger", text), text


@pytest.mark.parametrize("nameless", ["object", "item", "thing"])
def test_objects_without_a_name_are_no_target_and_no_anchor(nameless):
    objects = [
        make_object(0, "teapot", 0.0),
        make_object(1, nameless, 40.0),
        make_object(2, nameless, 80.0),
    ]
    queries = write_queries(objects, rng=np.random.default_rng(0), count=40)
    assert queries and all(query.instance_ids == (0,) for query in queries)
    assert not any(has_words(query.text.lower(), nameless) for query in queries)
    assert write_queries(objects[1:], rng=np.random.default_rng(0), count=8) == ()


def test_nouns():
    plurals = {
        "mug": "mugs",
        "butterfly": "butterflies",
        "wine glass": "wine glasses",
        "fish": "fish",
        "box": "boxes",
        "piece of fruit": "pieces of fruit",
        "people": "people",
        "scissors": "pairs of scissors",
    }
    assert {noun: plural(noun) for noun in plurals} == plurals
    assert all(map(is_plural, ("people", "scissors", "wooden chairs")))
    assert not any(map(is_plural, ("bus", "glass", "row of trees", "cat")))
    assert clean_name("  A Cat_litter box. ") == "cat litter box"


def test_the_lexicon_is_complete():
    assert CLASSES.keys() == {name for entry in CLASSES.values() for name in entry.classes}
    grouped = [c for name, g in GROUPS.items() if name != "fruit" for c in g.classes]
    assert sorted(c for c in grouped if c in CLASSES) == sorted(CLASSES)
    for entry in (*ALL_CLASSES.values(), *lexicon().groups.values()):
        assert {*entry.classes, *entry.unless} <= ALL_CLASSES.keys()
        assert entry.held_out_functions and len(entry.functions) > 1
        nouns = sorted((*entry.nouns, *entry.held_out_nouns))
        assert all(a != b for a, b in pairwise(nouns))
