"""Names and functions of classes, and plurals."""

from itertools import pairwise

from query_samples import ALL_CLASSES, CLASSES, GROUPS, has_words, written

from r2sm_jax.synthetic.queries.nouns import clean_name, is_plural, lexicon, plural


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


def test_names_and_functions_of_photographed_things():
    """Held-out words never occur in training, and a query without a name does not say one."""
    coco = tuple(ALL_CLASSES.keys() - (CLASSES.keys() - {"car", "cat", "book", "bottle"}))
    texts = {"train": "", "val_phrasing": ""}
    reasoning = 0
    for split in texts:
        for things, queries in written(split, 150, photo=tuple(sorted(coco))):
            category = {thing.id: thing.category for thing in things}
            texts[split] += "\n".join(query.text.lower() for query in queries) + "\n"
            for query in (
                q for q in queries if q.kind["task"] == "reasoning" and not q.kind["multi"]
            ):
                reasoning += 1
                clauses = [
                    f.rpartition(" | ")[2]
                    for m in (ALL_CLASSES[category[query.instance_ids[0]]],)
                    for f in (*m.functions, *m.held_out_functions)
                ]
                for clause in clauses:
                    for noun in ALL_CLASSES[category[query.instance_ids[0]]].nouns:
                        assert not has_words(clause, noun), (clause, noun)
    assert reasoning > 50
    for name in coco:
        for words in (*ALL_CLASSES[name].held_out_nouns, *ALL_CLASSES[name].held_out_functions):
            assert not has_words(texts["train"], words.removeprefix("that ")), words
        for words in ALL_CLASSES[name].functions:
            assert not has_words(texts["val_phrasing"], words.rpartition(" | ")[2]), words


def test_lexicon_is_whole():
    drawn = {category for meaning in CLASSES.values() for category in meaning.classes}
    grouped = [
        c
        for name, group in GROUPS.items()
        if name != "fruit"
        for c in group.classes
        if c in CLASSES
    ]
    assert len(drawn) == 24 and sorted(grouped) == sorted(drawn) and len(ALL_CLASSES) == 482
    for meaning in (*ALL_CLASSES.values(), *lexicon().groups.values()):
        assert {*meaning.classes, *meaning.unless} <= ALL_CLASSES.keys()
        assert meaning.held_out_functions and len(meaning.functions) > 1
        assert all(a != b for a, b in pairwise(sorted((*meaning.nouns, *meaning.held_out_nouns))))
