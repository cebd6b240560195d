"""The query grammar: its sentences mean exactly their targets."""

import re
from collections import Counter

import numpy as np
import pytest
from query_samples import (
    ALL_CLASSES,
    CLASSES,
    COLOURS,
    PATTERNS,
    PHOTO_NAMES,
    SPLITS,
    has_words,
    layout,
    queries_of,
    written,
)

from r2sm_jax.query import keyword_mask_type
from r2sm_jax.synthetic.queries.grammar import phrasebook, read_sections
from r2sm_jax.synthetic.queries.nouns import clean_name, plural
from r2sm_jax.synthetic.queries.objects import ObjectFacts
from r2sm_jax.synthetic.queries.write import (
    SPLITS as ALL_SPLITS,
    write_absent_queries,
    write_queries,
)


@pytest.mark.parametrize("split", SPLITS)
def test_kinds_are_complete_types_balanced_and_ids_in_order(split):
    for things, queries in written(split):
        assert [query.id for query in queries] == list(range(1, 9))
        assert Counter(query.mask_type for query in queries) == {"modal": 4, "amodal": 4}
        assert len({query.text for query in queries}) == 8
        for query in queries:
            assert set(query.kind) == {"task", "hard", "multi", "wording", "form"}
            assert query.kind["task"] in ("referring", "reasoning")
            assert query.kind["form"] in ("noun phrase", "command", "question")
            assert query.kind["multi"] == (len(query.instance_ids) > 1)
            assert query.kind["hard"] == (keyword_mask_type(query.text) != query.mask_type)
            assert query.instance_ids == tuple(sorted(query.instance_ids)) != ()
            assert set(query.instance_ids) <= {thing.id for thing in things}
            assert not re.search(r"[{}\[\]<>|~]|  | ,|\.\.|\?\.", query.text), query.text


@pytest.mark.parametrize("split", SPLITS)
def test_same_seed_same_queries(split):
    assert queries_of(split, 10, seed=3) == queries_of(split, 10, seed=3)
    assert queries_of(split, 10, seed=3) != queries_of(split, 10, seed=4)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("photo", [(), PHOTO_NAMES])
def test_queries_for_absent_things_have_no_target_and_no_word_for_what_is_there(split, photo):
    rng, counts = np.random.default_rng(0), Counter()

    def nouns_of(names):
        meanings = [(name, ALL_CLASSES.get(clean_name(name))) for name in names]
        return {
            n
            for name, m in meanings
            for n in ((*m.nouns, *m.held_out_nouns) if m else (clean_name(name),))
        }

    for _ in range(40):
        things = layout(rng, photo)
        there = {thing.category for thing in things}
        absent = [name for name in photo or tuple(CLASSES) if name not in there]
        queries = write_absent_queries(things, absent, rng=rng, count=3, split=split, first_id=10)
        assert [query.id for query in queries] == [11, 12, 13][: len(queries)]
        assert len({query.text for query in queries}) == len(queries)
        names = nouns_of(absent) - nouns_of(there)
        for query in queries:
            assert query.instance_ids == () and not query.kind["multi"]
            assert query.kind["hard"] == (keyword_mask_type(query.text) != query.mask_type)
            assert query.kind["hard"] or split != "val_hard"
            assert any(has_words(query.text, name) for name in names), query.text
            counts[query.mask_type] += 1
    assert min(counts.values()) > (5 if split == "val_hard" else 20), counts
    assert write_absent_queries(things, [things[0].category], rng=rng, count=3, split=split) == ()
    assert write_absent_queries([], absent, rng=rng, count=3, split=split) == ()


def test_the_splits_keep_their_places():
    """A sample is rebuilt from the place of its split in this list."""
    assert list(ALL_SPLITS) == [
        "train",
        "val",
        "val_phrasing",
        "val_hard",
        "dev",
        "val_absent",
        "test",
    ]


def test_odd_counts_fall_to_either_type():
    extra = Counter()
    for _, queries in written("train", 60, count=3):
        counts = Counter(query.mask_type for query in queries)
        assert sorted(counts.values()) == [1, 2]
        extra[counts.most_common(1)[0][0]] += 1
    assert min(extra.values()) > 10


def test_few_things():
    rng = np.random.default_rng(0)
    assert write_queries([], rng=rng, count=4) == ()
    one = ObjectFacts(7, "odd thing", (0.0, 0.0, 9.0, 9.0), 81.0, 0.0, ())
    for split in SPLITS:
        queries = write_queries([one], rng=rng, count=6, split=split)
        assert len(queries) == 6 and all(query.instance_ids == (7,) for query in queries)
    nameless = ObjectFacts(7, " ", (0.0, 0.0, 9.0, 9.0), 81.0, 0.0, ())
    assert write_queries([nameless], rng=rng, count=2) == ()


@pytest.mark.parametrize("split", ("train", "val_phrasing"))
def test_names_pick_exactly_their_targets(split):
    """Read "the red mug", "the biggest mug" and "the mug behind the book" back, without the grammar."""
    nouns = {
        noun: name
        for name, meaning in CLASSES.items()
        for noun in (meaning.held_out_nouns if split == "val_phrasing" else meaning.nouns)
    }
    patterns = {word: name for name, words in PATTERNS.items() for word in words["before"]}
    name = (
        rf"the (?P<size>biggest |smallest |bigger |smaller )?(?P<pattern>(?:{'|'.join(patterns)}) )?"
        rf"(?P<colour>(?:{'|'.join(COLOURS)}) )?(?P<noun>{'|'.join(sorted(nouns, key=len, reverse=True))})"
    )
    other = name.replace("P<", "P<other_")
    whole = rf"{name}(?: (?P<link>behind|in front of) {other})?"
    held_out = split == "val_phrasing"
    frames = (
        []
        if held_out
        else ["{w}", *phrasebook("wordings").commands, *phrasebook("wordings").questions]
    )
    bare_wordings = read_sections("held_out.txt" if held_out else "wordings.txt")["modal: bare"]
    frames += [
        wording.format(x="{w}", **{"is": "is"}) for wording in bare_wordings if "[" not in wording
    ]
    shells = [
        re.compile(re.escape(frame.lower().rstrip(".?")).replace(r"\{w\}", whole) + "[.?]?")
        for frame in frames
    ]
    seen = Counter()

    def read(found, things, prefix=""):
        noun, colour, pattern, size = (
            found[prefix + key] for key in ("noun", "colour", "pattern", "size")
        )
        ids = [
            thing
            for thing in things
            if thing.category == nouns[noun]
            and (not colour or thing.colour == colour.strip())
            and (not pattern or thing.pattern == patterns[pattern.strip()])
        ]
        if size and ids:
            ids = [(max if size.startswith("bigg") else min)(ids, key=lambda thing: thing.area)]
        return ids

    for things, queries in written(split, 250):
        for query in queries:
            bare = next(
                (found for shell in shells if (found := shell.fullmatch(query.text.lower()))), None
            )
            if bare is None or query.kind["multi"]:
                continue
            targets = read(bare, things)
            if bare["link"]:
                (anchor,) = read(bare, things, "other_")
                behind = bare["link"] == "behind"
                targets = [
                    thing
                    for thing in targets
                    if (anchor.id in thing.hidden_by if behind else thing.id in anchor.hidden_by)
                ]
            seen["link" if bare["link"] else "size" if bare["size"] else "name"] += 1
            assert [thing.id for thing in targets] == list(query.instance_ids), query.text
            assert query.mask_type == "modal"
    assert seen["name"] > 20 and (split != "train" or seen["link"] > 0), seen


def test_plurals_pick_all():
    seen = 0
    for things, queries in written("train", 250):
        for query in queries:
            found = re.search(r"\b(all the|both the|all|both) (\w+ )?(\w+)s\b", query.text.lower())
            if found and found[3] in CLASSES and (found[2] is None or found[2].strip() in COLOURS):
                if " and " in query.text or not query.kind["multi"]:
                    continue
                colour = found[2] and found[2].strip()
                ids = [
                    t.id for t in things if t.category == found[3] and colour in (None, t.colour)
                ]
                if colour or not re.search(r"with|covered", query.text):
                    assert ids == list(query.instance_ids), query.text
                    seen += 1
    assert seen > 2


def test_places_have_a_clear_margin():
    seen = 0
    for things, queries in written("train", 300):
        by_id = {thing.id: thing for thing in things}
        for query in queries:
            found = re.search(r"\bthe (leftmost|rightmost) ([a-z]+)\b", query.text.lower())
            if not found or query.kind["multi"] or found[2] not in CLASSES:
                continue
            sign = -1 if found[1] == "leftmost" else 1
            centre = {t.id: sign * (t.box[0] + t.box[2]) / 2 for t in things}
            rest = [t for t in things if t.category == found[2] and t.id != query.instance_ids[0]]
            assert by_id[query.instance_ids[0]].category == found[2]
            assert all(centre[query.instance_ids[0]] > centre[t.id] + 10 for t in rest) and rest
            seen += 1
    assert seen > 3


def test_targets_do_not_tell_the_type():
    hidden = {"modal": [], "amodal": []}
    for things, queries in written("train", 250):
        occlusion = {thing.id: thing.occlusion for thing in things}
        for query in queries:
            if not query.kind["multi"]:
                hidden[query.mask_type].append(occlusion[query.instance_ids[0]] > 0.05)
    modal, amodal = np.mean(hidden["modal"]), np.mean(hidden["amodal"])
    assert 0.35 < modal < 0.75 and abs(modal - amodal) < 0.1


@pytest.mark.parametrize("split", ("train", "val", "val_phrasing", "test"))
def test_a_quarter_is_hard_for_a_keyword_rule(split):
    queries = queries_of(split)
    for mask_type in ("modal", "amodal"):
        assert 0.25 < np.mean([q.kind["hard"] for q in queries if q.mask_type == mask_type]) < 0.5


def test_val_hard_is_all_hard_in_pairs():
    for _, queries in written("val_hard"):
        assert all(query.kind["hard"] for query in queries)
        targets = Counter((query.instance_ids, query.mask_type) for query in queries)
        assert all(targets[ids, "modal"] == targets[ids, "amodal"] for ids, _ in targets)


@pytest.mark.parametrize("split", SPLITS)
def test_reasoning_does_not_name_the_class(split):
    seen = 0
    for things, queries in written(split, 70):
        category = {thing.id: thing.category for thing in things}
        for query in queries:
            if query.kind["task"] == "reasoning":
                seen += 1
                # The thing in front may be named: "…, with the mug out of the way".
                front = {c for t in things for c in [t.category] if t.id not in query.instance_ids}
                for i in query.instance_ids:
                    for noun in CLASSES[category[i]].nouns + CLASSES[category[i]].held_out_nouns:
                        if category[i] not in front:
                            assert not has_words(query.text, noun), query.text
    assert seen > 50


@pytest.mark.parametrize("split", SPLITS)
def test_free_text_categories(split):
    texts = []
    for things, queries in written(split, 40, photo=PHOTO_NAMES):
        assert len(queries) == 8
        names = {thing.id: clean_name(thing.category) for thing in things}
        for query in queries:
            assert query.kind["task"] == "referring"
            assert not any(has_words(query.text, colour) for colour in COLOURS)
            texts.append(query.text)
            if "scissors" not in names.values():
                assert any(
                    names[i] in query.text.lower() or plural(names[i]) in query.text.lower()
                    for i in query.instance_ids
                )
    assert any("dougnut" in text for text in texts)


def test_shared_names_are_not_used_alone():
    """ "The box" could be the cat litter box as well, "the person" also the man."""
    for names, forbidden in ((("box", "cat litter box"), "box"), (("person", "man"), "person")):
        boxes = ((0.0, 0.0, 20.0, 20.0), (40.0, 0.0, 60.0, 20.0))
        things = [ObjectFacts(i, n, boxes[i], 400.0, 0.0, ()) for i, n in enumerate(names)]
        queries = write_queries(things, rng=np.random.default_rng(0), count=30)
        single = [q.text.lower() for q in queries if q.instance_ids == (0,)]
        assert not any(
            re.search(rf"(?<!litter )\b{forbidden}\b(?! (?:on|at|furthest|to|left|right))", text)
            and not re.search(r"leftmost|bigger|larger", text)
            for text in single
        )


def test_some_objects_get_modal_queries_only():
    rng, boxes = np.random.default_rng(0), [(float(x), 0.0, x + 30.0, 30.0) for x in (0, 50, 100)]
    things = [ObjectFacts(i, f"thing {i}", box, 900.0, 0.0, ()) for i, box in enumerate(boxes)]
    unknown = {"modal": {2}, "amodal": {1, 2}}
    queries = write_queries(things, rng=rng, count=8, forbidden=unknown)
    assert Counter(query.mask_type for query in queries) == {"modal": 4, "amodal": 4}
    assert {i for q in queries if q.mask_type == "modal" for i in q.instance_ids} == {0, 1}
    assert all(query.instance_ids == (0,) for query in queries if query.mask_type == "amodal")
    queries = write_queries(things, rng=rng, count=8, forbidden={"modal": {2}, "amodal": {0, 1, 2}})
    assert [query.mask_type for query in queries] == ["modal"] * 8
    assert (
        write_queries(things, rng=rng, count=8, forbidden={"modal": {0, 1, 2}, "amodal": {0, 1, 2}})
        == ()
    )
