"""From a sample to the rows of a batch: prepared once, assembled at each visit, resumed exactly."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from r2sm_jax.config import Config, DataConfig, DecoderConfig, ModelConfig, VisionConfig
from r2sm_jax.data.batches import MAX_KEPT_BYTES, Batch, Examples, training_batches
from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.data.letterbox import Letterbox
from r2sm_jax.data.prepare import Prepared, Tokenize, prepare
from r2sm_jax.language.tokenizer import NO_TOKEN
from r2sm_jax.query import AMODAL, MODAL, Query
from r2sm_jax.sources import open_split
from r2sm_jax.synthetic.queries.sentences import write_text_only_queries
from r2sm_jax.synthetic.scenes.source import SceneSource

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


def lengths_of(texts: Sequence[str]) -> list[list[int]]:
    """Token ids that tell which sentence they are of."""
    return [[len(text)] * 3 for text in texts]


def prepared(one: Sample | None = None, tokenizer: Tokenize = lengths_of) -> Prepared:
    return prepare(
        one or sample(),
        image_size=SIZE,
        mask_size=CELLS,
        vocabulary=VOCABULARY,
        tokenizer=tokenizer,
    )


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
    for name in ("masks", "boxes", "pixel_weight"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def config(head: str = "none", **data) -> Config:
    data = {"queries": 4, "instances": 3, "mirror": False, "token_drop": 0.0} | data
    model = ModelConfig(
        vision=VisionConfig(image_size=SIZE, patch_size=8),
        decoder=DecoderConfig(slots=2),
        head=head,  # pyright: ignore[reportArgumentType]
    )
    return Config(model=model, data=DataConfig(**data))


def assemble(
    p: Prepared, seed: int = 0, text_only=(), type_text_length: int = 0, **changes
) -> Batch:
    """An example of a sample. The source does not matter."""
    made = Examples(
        open_split(DataConfig(), "train", count=1, size=SIZE),
        config(**changes),
        lengths_of,
        text_length=3,
        text_only=text_only,
        type_text_length=type_text_length,
    )
    return made.assemble(p, np.random.default_rng(seed))


def flipped(p: Prepared) -> Batch:
    """An assembled example that is mirrored."""
    made = (assemble(p, seed, mirror=True) for seed in range(50))
    return next(e for e in made if not np.array_equal(e.image, p.image))


# Prepared once.


def test_image_and_masks_stay_on_each_other_in_the_letterbox():
    p = prepared()
    assert (
        p.image.shape == (SIZE, SIZE, 3)
        and p.image_mask.sum() == SIZE * SIZE // 2
        and not p.image_mask[16:].any()
    )
    bright = (p.image[..., 0] > 200) & p.image_mask
    drawn = p.masks[0, MODAL].repeat(2, 0).repeat(2, 1) > 127
    assert np.count_nonzero(bright & drawn) / np.count_nonzero(bright | drawn) > 0.85
    assert (
        p.masks.dtype == np.uint8
        and not p.masks[..., 8:, :].any()
        and (p.pixel_weight[:8] == 255).all()
    )
    assert not p.pixel_weight[8:].any()


def test_modal_lies_within_amodal_and_only_the_hidden_part_differs():
    (mug_modal, mug_amodal), (book_modal, book_amodal) = prepared().masks
    assert (mug_modal <= mug_amodal).all() and mug_amodal.sum() > 1.8 * mug_modal.sum()
    assert (book_modal == book_amodal).all()


def test_boxes_names_and_members():
    p = prepared()
    np.testing.assert_allclose(p.boxes[1], [15 / 40, 0, 35 / 40, 20 / 40], atol=1 / SIZE)
    assert p.labels["category"].tolist() == [0, 1] and p.labels["colour"].tolist() == [0, -1]
    assert p.query_instances.tolist() == [
        [True, False],
        [True, False],
        [True, True],
        [False, False],
    ]
    assert p.is_amodal.tolist() == [False, True, False, False]


def test_ignored_regions_are_left_out_of_the_loss_and_their_queries_go():
    one = sample()
    ignored = replace(one.instances[1], ignore=True)
    p = prepared(replace(one, instances=(one.instances[0], ignored)))
    assert len(p.masks) == 1 and p.texts == (
        "the mug",
        "the whole mug on the left",
        "the elephant",
    )
    assert not p.pixel_weight[:8, 7:13].any() and (p.pixel_weight[:8, :5] == 255).all()


def test_an_unknown_amodal_mask_is_marked_so():
    one = sample()
    p = prepared(replace(one, instances=(replace(one.instances[0], amodal=None), one.instances[1])))
    assert p.is_known.tolist() == [[True, False], [True, True]]
    assert (p.masks[0, AMODAL] == p.masks[0, MODAL]).all()


# Assembled at every visit.


def test_the_example_has_the_documented_shapes_and_dtypes():
    e = assemble(prepared())
    expected = {
        "image": ("u1", (SIZE, SIZE, 3)),
        "image_mask": ("?", (SIZE, SIZE)),
        "masks": ("u1", (3, 2, CELLS, CELLS)),
        "is_known": ("?", (3, 2)),
        "boxes": ("f4", (3, 4)),
        "pixel_weight": ("u1", (CELLS, CELLS)),
        "query_instances": ("?", (4, 3)),
        "slot_targets": ("i4", (4, 2)),
        "is_amodal": ("?", (4,)),
        "query_mask": ("?", (4,)),
        "text": ("i4", (4, 3)),
        "text_mask": ("?", (4, 3)),
    }
    arrays = {k: v for k, v in e._asdict().items() if isinstance(v, np.ndarray)}
    actual = {k: (v.dtype, v.shape) for k, v in arrays.items()}
    assert actual == {k: (np.dtype(t), s) for k, (t, s) in expected.items()}
    assert {k: (v.dtype, v.shape) for k, v in e.labels.items()} == dict.fromkeys(
        VOCABULARY, (np.dtype("i4"), (3,))
    )


def test_the_head_does_not_see_dropped_tokens_and_always_sees_the_first():
    p = prepared()
    mask = assemble(p, head="attention").type_text_mask
    assert mask is not None and mask[:4].all()
    dropped = [assemble(p, seed, head="attention", token_drop=0.5) for seed in range(20)]
    some = np.stack([e.type_text_mask[:4] for e in dropped])
    assert some[:, :, 0].all() and 0.3 < some[:, :, 1:].mean() < 0.7


def test_the_head_learns_from_queries_and_from_sentences_about_anything():
    free = [
        ([len(one.text)] * 3, one.mask_type == "amodal")
        for one in write_text_only_queries(40, seed=0)
    ]
    possible = {ids[0]: {answer for other, answer in free if other == ids} for ids, _ in free}
    p, rows = prepared(), []
    is_amodal = dict(zip(map(len, p.texts), p.is_amodal.tolist(), strict=True))
    for seed in range(20):
        e = assemble(p, seed, head="attention", text_only=free)
        assert e.type_text.shape == (9, 3) and e.type_valid.all()
        rows += (lengths := e.type_text[:, 0].tolist())
        assert [is_amodal[n] for n in lengths[:3]] == e.type_is_amodal[:3].tolist()
        assert all(e.type_is_amodal[i] in possible[lengths[i]] for i in range(3, 9))
        longer = assemble(p, seed, head="attention", text_only=free, type_text_length=5)
        assert longer.type_text.shape == (9, 5) and longer.text.shape == (4, 3)
    assert set(is_amodal) <= set(rows) and len(set(rows)) > 10
    alone = assemble(p._replace(token_ids=p.token_ids[:3]), head="attention")
    assert alone.type_valid.tolist() == [True] * 3 + [False] * 6 and assemble(p).type_text is None


def test_queries_that_are_too_long_are_left_out():
    too_long = [query.text for query in sample().queries[1:3]]

    def tokenize(texts):
        return [[len(text)] * (9 if text in too_long else 3) for text in texts]

    p = prepared(tokenizer=tokenize)
    for seed in range(20):
        e = assemble(p, seed, head="attention")
        assert e.query_mask.tolist() == [True] * 2 + [False] * 2
        ids = {*e.text[:, 0], *e.type_text[:, 0]}
        assert ids.isdisjoint(map(len, too_long))
        assert e.type_valid.sum() == 2 and not e.query_instances[2:].any()
    p = prepared(tokenizer=lambda texts: [[1] * 9 for _ in texts])
    assert not assemble(p).query_mask.any()


def test_everything_beyond_the_sample_is_padding():
    e = assemble(prepared(), queries=6)
    assert e.query_mask.tolist() == [True] * 4 + [False] * 2
    assert (
        not e.query_instances[4:].any()
        and not e.query_instances[:, 2].any()
        and (e.slot_targets[4:] == -1).all()
    )
    assert e.labels["category"].tolist() == [0, 1, -1] and not e.masks[2].any()
    assert e.slot_targets.tolist()[:4] == [[0, -1], [0, -1], [0, 1], [-1, -1]]
    assert e.text[:, 0].tolist() == [7, 25, 11, 12, NO_TOKEN, NO_TOKEN]


def test_a_sample_without_instances_or_queries_is_all_padding():
    for one in (
        replace(sample(), instances=(), queries=(sample().queries[3],)),
        replace(sample(), queries=()),
    ):
        e = assemble(prepared(one), mirror=True)
        assert e.query_mask.sum() == len(one.queries) and not e.query_instances.any()


def test_fewer_queries_are_chosen_at_random_and_in_full():
    p, all_lengths = prepared(), set()
    for seed in range(20):
        e = assemble(p, seed, queries=2)
        lengths = e.text[:, 0].tolist()
        all_lengths.update(lengths)
        for row, length in enumerate(lengths):
            of = [len(t) for t in p.texts].index(length)
            assert (
                e.is_amodal[row] == p.is_amodal[of]
                and e.query_instances[row].sum() == p.query_instances[of].sum()
            )
    assert all_lengths == {len(t) for t in p.texts}


def test_a_query_whose_instances_do_not_all_fit_is_left_out():
    e = assemble(prepared(), instances=1)
    assert e.query_mask.tolist() == [True, True, False, True]


def test_mirroring_turns_everything_and_keeps_modal_within_amodal():
    p = prepared()
    e = flipped(p)
    for name in ("image", "image_mask", "pixel_weight"):
        np.testing.assert_array_equal(getattr(e, name), getattr(p, name)[:, ::-1])
    np.testing.assert_array_equal(e.masks[:2], p.masks[..., ::-1])
    np.testing.assert_allclose(
        e.boxes[:2],
        np.stack([1 - p.boxes[:, 2], p.boxes[:, 1], 1 - p.boxes[:, 0], p.boxes[:, 3]], 1),
    )
    columns = np.flatnonzero(e.masks[0, AMODAL].any(0))
    assert columns[0] / CELLS == pytest.approx(e.boxes[0, 0], abs=1.5 / CELLS)


def test_mirroring_leaves_out_queries_that_say_left_or_right():
    assert flipped(prepared()).query_mask.tolist() == [True, False, True, True]
    one = sample()
    texts = ("the LEFTmost mug", "right-hand mug", "the bright mug", "the mug that is left")
    queries = tuple(replace(q, text=t) for q, t in zip(one.queries, texts, strict=True))
    assert flipped(prepared(replace(one, queries=queries))).query_mask.tolist() == [
        False,
        False,
        True,
        False,
    ]


def test_what_its_source_has_mirrored_is_not_mirrored_again(monkeypatch):
    monkeypatch.setattr(SceneSource, "mirrors_itself", True)
    p = prepared()
    for seed in range(20):
        e = assemble(p, seed, mirror=True)
        assert np.array_equal(e.image, p.image) and e.query_mask.all()


# Batches.


def same(a: Batch, b: Batch) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def examples(count: int = 5, *, max_kept_bytes: int = MAX_KEPT_BYTES, **data) -> Examples:
    of = config(**{"queries": 3, "instances": 4, "mirror": True} | data)
    source = open_split(of.data, "train", count=count, size=SIZE)
    return Examples(source, of, lengths_of, text_length=3, max_kept_bytes=max_kept_bytes)


def numbers_of(batch: Batch, of: Examples) -> list[int]:
    """The positions in the source of the images of a batch."""
    images = [np.ascontiguousarray(of.source[i].image) for i in range(len(of.source))]
    return [
        next(i for i, one in enumerate(images) if (one == image).all()) for image in batch.image
    ]


def batches(of: Examples, seed: int = 0, **options):
    return training_batches(of, batch_size=2, seed=seed, **options)


VARIANTS = {
    "kept": {},
    "no room": {"max_kept_bytes": 0},
    "crops and colours": {"crop": 0.6, "colour_jitter": 0.3},
    "fresh": {"fresh": True},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_batches_go_on_exactly_wherever_they_start(options):
    one = batches(examples(**options))
    whole = [next(one) for _ in range(8)]
    for start in (0, 3, 7):
        again = batches(examples(**options), start=start)
        assert all(same(batch, next(again)) for batch in whole[start:])
    other = batches(examples(**options), seed=1)
    assert not all(same(batch, next(other)) for batch in whole)

    images = {image.tobytes() for batch in whole for image in batch.image}
    is_new = len(images) == 16
    assert is_new == (options.get("fresh", False) or "crop" in options)


def test_what_is_kept_is_what_is_prepared_anew():
    kept, anew = examples(), examples(max_kept_bytes=0)
    one, other = batches(kept), batches(anew)
    assert all(same(next(one), next(other)) for _ in range(8))
    assert len(kept._kept) == 5 and not anew._kept


def test_every_image_comes_once_before_any_comes_twice():
    of = examples(mirror=False)
    iterator = batches(of)
    order = [number for _ in range(10) for number in numbers_of(next(iterator), of)]
    for epoch in np.reshape(order, (4, 5)):
        assert sorted(epoch) == list(range(5))


def test_processes_share_every_epoch_out():
    of = examples(12, mirror=False)
    parts = [training_batches(of, batch_size=6, seed=0, shard=(i, 3)) for i in range(3)]
    for _ in range(3):  # epochs
        numbers = [n for part in parts for _ in range(2) for n in numbers_of(next(part), of)]
        assert sorted(numbers) == list(range(12))


def test_worker_processes_make_the_same_batches():
    here = batches(examples(fresh=True))
    expected = [next(here) for _ in range(5)]
    for workers, start in ((2, 0), (1, 3)):
        one = batches(examples(fresh=True), workers=workers, start=start)
        assert all(same(batch, next(one)) for batch in expected[start:])
        one.close()


@pytest.mark.slow
def test_worker_processes_end_with_a_killed_parent(tmp_path):
    code = """
import multiprocessing, sys, time
from test_batches import batches, examples
if __name__ == "__main__":
    one = batches(examples(), workers=2)
    next(one)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    time.sleep(60)
"""
    file = tmp_path / "parent.py"
    file.write_text(code)
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    parent = subprocess.Popen(
        [sys.executable, str(file)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert parent.stdout is not None
    workers = [int(word) for word in parent.stdout.readline().split()]
    assert workers
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    for _ in range(100):
        running = [pid for pid in workers if is_running(pid)]
        if not running:
            return
        time.sleep(0.1)
    pytest.fail(f"still running: {running}")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False
