"""From a sample to the rows of a batch: prepared once, assembled at each visit, resumed exactly."""

import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from r2sm_jax.data import prepare as prepare_module
from r2sm_jax.data.batches import ExampleBuilder, training_batches
from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.data.letterbox import Letterbox
from r2sm_jax.data.prepare import Prepared, PreparedSource, prepare
from r2sm_jax.query import Query
from r2sm_jax.synthetic.queries.sentences import write_text_only_queries
from r2sm_jax.synthetic.sources import open_source

HEIGHT, WIDTH, SIZE, CELLS = 20, 40, 32, 16
VOCABULARY = {"category": ("mug", "book"), "colour": ("red", "blue")}


def block(x0: int, y0: int, x1: int, y1: int) -> np.ndarray:
    mask = np.zeros((HEIGHT, WIDTH), bool)
    mask[y0:y1, x0:x1] = True
    return mask


def sample() -> Sample:
    """A white mug whose right half stands behind a grey book, and queries of all kinds."""
    mug, book = block(5, 5, 25, 15), block(15, 0, 35, 20)
    image = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    image[mug], image[book] = 255, 128
    return Sample(
        7,
        "a.png",
        image,
        (
            Instance(1, "mug", mug & ~book, mug, {"colour": "red"}),
            Instance(2, "book", book, book, {"colour": "green"}),
        ),
        (
            Query(1, "the mug", "modal", (1,)),
            Query(2, "the whole mug on the left", "amodal", (1,)),
            Query(3, "both things", "modal", (1, 2)),
            Query(4, "the elephant", "modal", ()),
        ),
    )


def prepared(one: Sample | None = None) -> Prepared:
    return prepare(one or sample(), image_size=SIZE, mask_size=CELLS, vocabulary=VOCABULARY)


def test_an_object_that_is_fully_visible_is_pooled_once(monkeypatch):
    book = block(15, 0, 35, 20)
    hidden = Instance(1, "mug", block(5, 5, 15, 15), block(5, 5, 25, 15))
    visible = Instance(2, "book", book, book.copy())
    shared = Instance(2, "book", book, book)
    pooled = []
    coverage = Letterbox.coverage

    def count(self, mask, cells):
        pooled.append(mask)
        return coverage(self, mask, cells)

    one = prepared(replace(sample(), instances=(hidden, visible)))
    monkeypatch.setattr(Letterbox, "coverage", count)
    other = prepared(replace(sample(), instances=(hidden, shared)))
    assert sum(mask is book for mask in pooled) == 1
    for name in ("modal", "amodal", "boxes", "pixel_weight"):
        np.testing.assert_array_equal(one[name], other[name])


def states(texts: list[str], tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Text states that tell which text they are of."""
    lengths = np.array([len(t) for t in texts])
    return np.tile(lengths[:, None, None, None], (1, tokens, 2, 4)).astype(np.float16), np.ones(
        (len(texts), tokens), bool
    )


def assemble(p: Prepared, seed: int = 0, **changes) -> dict:
    options = {"tokens": 3, "queries": 4, "instances": 3, "slots": 2, "mirror": False} | changes
    return ExampleBuilder(states, **options)(5, p, np.random.default_rng(seed))


def flipped(p: Prepared, **changes) -> dict:
    """An assembled example that is mirrored."""
    examples = (assemble(p, seed, mirror=True, **changes) for seed in range(50))
    return next(e for e in examples if not np.array_equal(e["image"], p["image"]))


# Prepared once.


def test_image_and_masks_stay_on_each_other_in_the_letterbox():
    p = prepared()
    assert (
        p["image"].shape == (SIZE, SIZE, 3)
        and p["image_mask"].sum() == SIZE * SIZE // 2
        and not p["image_mask"][16:].any()
    )
    bright = (p["image"][..., 0] > 200) & p["image_mask"]
    drawn = p["modal"][0].repeat(2, 0).repeat(2, 1) > 127
    assert np.count_nonzero(bright & drawn) / np.count_nonzero(bright | drawn) > 0.85
    assert (
        p["modal"].dtype == np.uint8
        and not p["modal"][:, 8:].any()
        and (p["pixel_weight"][:8] == 255).all()
    )
    assert not p["pixel_weight"][8:].any()


def test_modal_lies_within_amodal_and_only_the_hidden_part_differs():
    p = prepared()
    assert (p["modal"] <= p["amodal"]).all()
    assert (p["modal"][1] == p["amodal"][1]).all() and p["amodal"][0].sum() > 1.8 * p["modal"][
        0
    ].sum()


def test_boxes_names_and_members():
    p = prepared()
    np.testing.assert_allclose(p["boxes"][1], [15 / 40, 0, 35 / 40, 20 / 40], atol=1 / SIZE)
    assert p["labels"]["category"].tolist() == [0, 1] and p["labels"]["colour"].tolist() == [0, -1]
    assert p["query_instances"].tolist() == [
        [True, False],
        [True, False],
        [True, True],
        [False, False],
    ]
    assert p["is_amodal"].tolist() == [False, True, False, False]


def test_ignored_regions_are_left_out_of_the_loss_and_their_queries_go():
    one = sample()
    ignored = replace(one.instances[1], ignore=True)
    p = prepared(replace(one, instances=(one.instances[0], ignored)))
    assert len(p["modal"]) == 1 and p["texts"] == (
        "the mug",
        "the whole mug on the left",
        "the elephant",
    )
    assert not p["pixel_weight"][:8, 7:13].any() and (p["pixel_weight"][:8, :5] == 255).all()


def test_an_unknown_amodal_mask_is_marked_so():
    one = sample()
    p = prepared(replace(one, instances=(replace(one.instances[0], amodal=None), one.instances[1])))
    assert p["has_amodal"].tolist() == [False, True] and (p["amodal"][0] == p["modal"][0]).all()


# Assembled at every visit.


def test_the_example_has_the_documented_shapes_and_dtypes():
    e = assemble(prepared())
    expected = {
        "image": ("u1", (SIZE, SIZE, 3)),
        "image_mask": ("?", (SIZE, SIZE)),
        "modal": ("u1", (3, CELLS, CELLS)),
        "amodal": ("u1", (3, CELLS, CELLS)),
        "has_amodal": ("?", (3,)),
        "boxes": ("f4", (3, 4)),
        "pixel_weight": ("u1", (CELLS, CELLS)),
        "query_instances": ("?", (4, 3)),
        "slot_targets": ("i4", (4, 2)),
        "is_amodal": ("?", (4,)),
        "query_mask": ("?", (4,)),
        "text": ("f2", (4, 3, 2, 4)),
        "text_mask": ("?", (4, 3)),
        "index": ("i4", ()),
    }
    actual = {k: (v.dtype, v.shape) for k, v in e.items() if k != "labels"}
    assert actual == {k: (np.dtype(t), s) for k, (t, s) in expected.items()}
    assert {k: (v.dtype, v.shape) for k, v in e["labels"].items()} == dict.fromkeys(
        VOCABULARY, (np.dtype("i4"), (3,))
    )


def test_the_head_does_not_see_dropped_tokens_and_always_sees_the_first():
    assert assemble(prepared(), has_text_head=True)["type_text_mask"].all()
    some = np.stack(
        [
            assemble(prepared(), seed=seed, has_text_head=True, token_drop=0.5)["type_text_mask"]
            for seed in range(20)
        ]
    )
    assert some[:, :, 0].all() and 0.3 < some[:, :, 1:].mean() < 0.7


def test_the_head_learns_from_queries_and_from_sentences_about_anything():
    free = write_text_only_queries(40, seed=0)
    possible = {
        len(s.text): {t.mask_type == "amodal" for t in free if len(t.text) == len(s.text)}
        for s in free
    }
    p, rows = prepared(), []
    is_amodal = dict(zip(map(len, p["texts"]), p["is_amodal"].tolist(), strict=True))
    for seed in range(20):
        e = assemble(p, seed, has_text_head=True, text_only=free)
        assert e["type_text"].shape == (9, 3, 2, 4) and e["type_valid"].all()
        rows += (lengths := e["type_text"][:, 0, 0, 0].astype(int).tolist())
        assert [is_amodal[n] for n in lengths[:3]] == e["type_is_amodal"][:3].tolist()
        assert all(e["type_is_amodal"][i] in possible[lengths[i]] for i in range(3, 9))
        longer = assemble(p, seed, has_text_head=True, text_only=free, type_tokens=5)
        assert longer["type_text"].shape == (9, 5, 2, 4) and longer["text"].shape == (4, 3, 2, 4)
    assert set(is_amodal) <= set(rows) and len(set(rows)) > 10
    alone = assemble(p | {"texts": p["texts"][:3]}, has_text_head=True)
    assert alone["type_valid"].tolist() == [True] * 3 + [False] * 6 and "type_text" not in assemble(
        p
    )


def test_queries_that_are_too_long_are_left_out():
    p = prepared()

    def count_tokens(texts):
        return [9 * (text in p["texts"][1:3]) for text in texts]

    for seed in range(20):
        e = assemble(p, seed, has_text_head=True, count_tokens=count_tokens)
        assert e["query_mask"].tolist() == [True] * 2 + [False] * 2
        assert {len(p["texts"][1]), len(p["texts"][2])}.isdisjoint(
            {*e["text"][:, 0, 0, 0], *e["type_text"][:, 0, 0, 0]}
        )
        assert e["type_valid"].sum() == 2 and not e["query_instances"][2:].any()
    assert not assemble(p, count_tokens=lambda texts: [9] * len(texts))["query_mask"].any()


def test_everything_beyond_the_sample_is_padding():
    e = assemble(prepared(), queries=6)
    assert e["query_mask"].tolist() == [True] * 4 + [False] * 2
    assert (
        not e["query_instances"][4:].any()
        and not e["query_instances"][:, 2].any()
        and (e["slot_targets"][4:] == -1).all()
    )
    assert e["labels"]["category"].tolist() == [0, 1, -1] and not e["modal"][2].any()
    assert e["slot_targets"].tolist()[:4] == [[0, -1], [0, -1], [0, 1], [-1, -1]]
    assert e["text"][:, 0, 0, 0].tolist() == [7, 25, 11, 12, 0, 0]


def test_a_sample_without_instances_or_queries_is_all_padding():
    for one in (
        replace(sample(), instances=(), queries=(sample().queries[3],)),
        replace(sample(), queries=()),
    ):
        e = assemble(prepared(one), mirror=True)
        assert e["query_mask"].sum() == len(one.queries) and not e["query_instances"].any()


def test_fewer_queries_are_chosen_at_random_and_in_full():
    p, all_lengths = prepared(), set()
    for seed in range(20):
        e = assemble(p, seed, queries=2)
        lengths = e["text"][:, 0, 0, 0].astype(int).tolist()
        all_lengths.update(lengths)
        for row, length in enumerate(lengths):
            of = [len(t) for t in p["texts"]].index(length)
            assert (
                e["is_amodal"][row] == p["is_amodal"][of]
                and e["query_instances"][row].sum() == p["query_instances"][of].sum()
            )
    assert all_lengths == {len(t) for t in p["texts"]}


def test_a_query_whose_instances_do_not_all_fit_is_left_out():
    e = assemble(prepared(), instances=1)
    assert e["query_mask"].tolist() == [True, True, False, True]


def test_mirroring_turns_everything_and_keeps_modal_within_amodal():
    p = prepared()
    e = flipped(p)
    for name in ("image", "image_mask", "pixel_weight"):
        np.testing.assert_array_equal(e[name], p[name][:, ::-1])
    for name in ("modal", "amodal"):
        np.testing.assert_array_equal(e[name][:2], p[name][:, :, ::-1])
    assert (e["modal"] <= e["amodal"]).all()
    np.testing.assert_allclose(
        e["boxes"][:2],
        np.stack(
            [1 - p["boxes"][:, 2], p["boxes"][:, 1], 1 - p["boxes"][:, 0], p["boxes"][:, 3]], 1
        ),
    )
    columns = np.flatnonzero(e["amodal"][0].any(0))
    assert columns[0] / CELLS == pytest.approx(e["boxes"][0, 0], abs=1.5 / CELLS)


def test_mirroring_leaves_out_queries_that_say_left_or_right():
    assert flipped(prepared())["query_mask"].tolist() == [True, False, True, True]
    one = sample()
    texts = ("the LEFTmost mug", "right-hand mug", "the bright mug", "the mug that is left")
    queries = tuple(replace(q, text=t) for q, t in zip(one.queries, texts, strict=True))
    assert flipped(prepared(replace(one, queries=queries)))["query_mask"].tolist() == [
        False,
        False,
        True,
        False,
    ]


def test_half_of_the_examples_are_mirrored_and_none_if_unwanted():
    p = prepared()
    turned = [
        not np.array_equal(assemble(p, seed, mirror=True)["image"], p["image"])
        for seed in range(100)
    ]
    assert 30 < sum(turned) < 70
    assert all(np.array_equal(assemble(p, seed)["image"], p["image"]) for seed in range(20))


# Batches.


@pytest.fixture(scope="module")
def source():
    source = PreparedSource(open_source("scenes", "train", count=5, size=SIZE), SIZE, CELLS)
    source.cache()
    return source


def test_worker_processes_get_the_source_once(monkeypatch, tmp_path):
    """A copy of it in every piece of work would read and keep its photos anew."""

    class Pool:
        def __init__(self, initializer, initargs):
            initializer(*initargs)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def imap(self, work, items, chunksize):
            assert len(pickle.dumps(work)) < 100
            return map(work, items)

    monkeypatch.setattr(prepare_module, "_worker_source", [])
    monkeypatch.setattr("multiprocessing.get_context", lambda method: SimpleNamespace(Pool=Pool))
    monkeypatch.setattr(prepare_module, "MIN_SAMPLES_FOR_POOL", 4)
    source = PreparedSource(open_source("scenes", "train", count=5, size=16), 16, 8)
    one = source[3]
    assert source.cache(str(tmp_path))
    assert np.array_equal(source[3]["image"], one["image"]) and source[3]["texts"] == one["texts"]


def test_worker_processes_prepare_what_this_process_does(monkeypatch, tmp_path):
    monkeypatch.setattr(prepare_module, "MIN_SAMPLES_FOR_POOL", 4)
    source = PreparedSource(open_source("scenes", "train", count=5, size=16), 16, 8)
    here = [source[index] for index in range(5)]
    assert source.cache(str(tmp_path))
    assert all(same(source[index], one) for index, one in enumerate(here))


def batches(source, seed: int = 0):
    return training_batches(
        source,
        ExampleBuilder(states, 3, queries=3, instances=4, slots=2, mirror=True),
        batch_size=2,
        seed=seed,
    )


def same(a: dict, b: dict) -> bool:
    return all(
        same(a[k], b[k]) if isinstance(a[k], dict) else np.array_equal(a[k], b[k]) for k in a
    )


def test_batches_depend_on_the_seed_alone(source):
    one, again, other = batches(source), batches(source), batches(source, seed=1)
    first = [next(one) for _ in range(6)]
    assert all(same(batch, next(again)) for batch in first)
    assert not all(same(batch, next(other)) for batch in first)


def test_every_image_comes_once_before_any_comes_twice(source):
    iterator = batches(source)
    order = np.concatenate([next(iterator)["index"] for _ in range(10)])
    for epoch in order.reshape(4, 5):
        assert sorted(epoch) == list(range(5))


@pytest.mark.parametrize("position", [0, 1, 7])
def test_resumed_batches_go_on_exactly(source, position):
    one = batches(source)
    for _ in range(position):
        next(one)
    state = one.get_state()
    expected = [next(one) for _ in range(5)]
    fresh = batches(source)
    next(fresh)
    fresh.set_state(state)
    assert all(same(batch, next(fresh)) for batch in expected)


def test_preparing_when_asked_or_before_gives_the_same(source):
    lazy = PreparedSource(source.source, SIZE, CELLS)
    for index in range(5):
        a, b = lazy[index], source[index]
        assert (
            a["texts"] == b["texts"]
            and np.array_equal(a["modal"], b["modal"])
            and np.array_equal(a["image"], b["image"])
        )
