"""Masks of any system, from a file or a folder, score what a plain loop over pixels gives them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sample_records import to_records

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Dataset, Instance, Sample
from r2sm_jax.data.sources import load_json_split, open_source
from r2sm_jax.errors import InputError
from r2sm_jax.evaluate import main
from r2sm_jax.evaluation.iou import overlap
from r2sm_jax.evaluation.predictions import read_predictions, score_predictions
from r2sm_jax.evaluation.report import split_figures
from r2sm_jax.evaluation.scorer import truths
from r2sm_jax.query import Query
from r2sm_jax.tools.convert import write_json

HEIGHT, WIDTH = 24, 32


def block(x0: int, y0: int, x1: int, y1: int) -> np.ndarray:
    mask = np.zeros((HEIGHT, WIDTH), bool)
    mask[y0:y1, x0:x1] = True
    return mask


def make_dataset(folder: Path, ignore: bool = False) -> Dataset:
    """Two images: a mug behind a book, queries of all kinds; one that asks for a shape that nobody knows."""
    mug, book = block(2, 4, 18, 14), block(10, 2, 30, 20)
    instances = [Instance(1, "mug", mug & ~book, mug), Instance(2, "book", book, book)]
    if ignore:
        instances.append(Instance(3, "crowd", block(0, 0, 6, 24), None, ignore=True))
    queries = (
        Query(1, "the mug", "modal", (1,), {"task": "referring", "hard": False, "multi": False}),
        Query(
            2, "the whole mug", "amodal", (1,), {"task": "referring", "hard": False, "multi": False}
        ),
        Query(
            3, "both things", "modal", (1, 2), {"task": "reasoning", "hard": True, "multi": True}
        ),
        Query(4, "the elephant", "amodal", ()),
    )
    one = Sample(1, "a.png", np.zeros((HEIGHT, WIDTH, 3), np.uint8), tuple(instances), queries)
    unknown = (Instance(1, "cup", mug, None), Instance(2, "book", book & ~mug, book))
    others = (Query(1, "the whole cup", "amodal", (1,)), Query(2, "the whole book", "amodal", (2,)))
    two = Sample(2, "b.png", np.zeros((HEIGHT, WIDTH, 3), np.uint8), unknown, others)
    for sample in (one, two):
        Image.fromarray(sample.image).save(folder / sample.file_name)
    write_json(folder / "data.json", to_records([one, two]))
    return load_json_split(folder / "data.json", "all")


def entry(query: int, mask: np.ndarray, score: float = 1.0, **more) -> dict:
    return {"query_id": query, "segmentation": masks.encode(mask), "score": score} | more


def save(path: Path, entries: object) -> Path:
    path.write_text(json.dumps(entries))
    return path


def requested(dataset: Dataset) -> dict[int, tuple[Sample, Query]]:
    return {q.id: (s, q) for s in dataset for q in s.queries}


SCORED = [1, 2, 3, 4, 6]  # 5 asks for what nobody knows


def test_perfect_masks_score_one_in_everything(tmp_path):
    dataset = make_dataset(tmp_path)
    wanted = requested(dataset)
    entries = []
    for number in SCORED:
        sample, query = wanted[number]
        for i in (i for i in sample.instances if i.id in query.instance_ids):
            mask = i.amodal if query.mask_type == "amodal" else i.modal
            entries.append(entry(number, mask, 0.9, mask_type=query.mask_type))
    scored = score_predictions(save(tmp_path / "p.json", entries), dataset)
    assert [r.query_id for r in scored.results] == SCORED and scored.missing == [4]
    figures = split_figures(scored.results, scored.instances)
    for name in ("giou", "ciou", "occluded_iou", "occluded_ciou", "ap", "ap75", "ar"):
        assert figures["all"][name] == pytest.approx(1, abs=1e-6), name
    assert figures["mask_type"]["accuracy"] == 1 and figures["mask_type"]["ece"] is None
    assert (
        figures["variants"]["muse"]["giou"] == 1 and figures["all"]["interval"]["giou"] is not None
    )
    assert figures["references"]["always_modal"]["giou"] is None  # one mask is all there is
    # True masks of one type are wrong for the queries of the other that mean something hidden, and only for these.
    for reference in ("true_modal_for_all", "true_amodal_for_all"):
        assert 0.5 < figures["references"][reference]["giou"] < 1


@pytest.mark.parametrize("ignore", [False, True])
def test_random_masks_score_what_a_loop_over_pixels_gives(tmp_path, ignore):
    dataset, rng = make_dataset(tmp_path, ignore), np.random.default_rng(0)
    wanted, entries, unions = requested(dataset), [], {}
    for number in SCORED:
        drawn = rng.random((int(rng.integers(1, 4)), HEIGHT, WIDTH)) < 0.3
        entries += [entry(number, mask, float(rng.random())) for mask in drawn]
        unions[number] = drawn.any(0)
    entries.append(entry(2, fused := rng.random((HEIGHT, WIDTH)) < 0.5, fused=True))
    unions[2] = fused
    scored = score_predictions(save(tmp_path / "p.json", entries), dataset)
    for result in scored.results:
        sample, query = wanted[result.query_id]
        meant = [i for i in sample.instances if i.id in query.instance_ids]
        truth = [
            masks.union((getattr(i, t) for i in meant), (HEIGHT, WIDTH))
            for t in ("modal", "amodal")
        ]
        away = next((i.modal for i in sample.instances if i.ignore), None)
        kept = True if away is None else ~away
        drawn = unions[query.id] & kept
        for counts, mask in zip(result.chosen, truth, strict=True):
            assert counts == overlap(drawn, mask & kept)
        if query.id == 2:
            hidden, seen = truth[1] & ~truth[0], truth[0]
            keep = np.ones_like(hidden) if away is None else ~away
            outside = fused & ~seen & keep
            assert result.occluded is not None
            assert result.occluded[:2] == (
                (outside & hidden).sum(),
                (outside | (hidden & keep)).sum(),
            )


def test_an_answer_that_cannot_be_scored_is_read_and_left_out(tmp_path):
    dataset, entries = (
        make_dataset(tmp_path),
        [entry(number, block(2, 4, 18, 14)) for number in SCORED],
    )
    without = score_predictions(save(tmp_path / "p.json", entries), dataset)
    scored = score_predictions(
        save(tmp_path / "p.json", [*entries, entry(5, block(0, 0, 9, 9))]), dataset
    )
    assert scored.results == without.results and scored.data_sha256 == without.data_sha256
    assert [r.query_id for r in scored.results] == SCORED and not scored.missing


def test_a_fused_mask_is_the_one_detection_of_a_system_without_instances(tmp_path):
    dataset, drawn = make_dataset(tmp_path), block(2, 4, 10, 14)
    alone = [entry(number, drawn, fused=True) for number in SCORED]
    scored = score_predictions(save(tmp_path / "p.json", alone), dataset)
    assert [len(unit.scores) for unit in scored.instances.values()] == [1] * 5
    scored = score_predictions(save(tmp_path / "p.json", [*alone, entry(1, drawn, 0.5)]), dataset)
    assert {
        number: len(unit.scores) for number, unit in scored.instances.items() if len(unit.scores)
    } == {1: 1}


def test_folders_of_pngs_and_of_logits_score_alike(tmp_path):
    dataset, figures = make_dataset(tmp_path), []
    for form in ("png", "logits", "coco"):
        folder, entries = tmp_path / form, []
        folder.mkdir()
        for number in SCORED:
            logits = np.random.default_rng(number).normal(size=(HEIGHT, WIDTH)).astype(np.float32)
            Image.fromarray((logits > 0).astype(np.uint8)).save(
                folder / f"{number}.png"
            ) if form == "png" else None
            np.save(folder / f"{number}.npy", logits) if form == "logits" else None
            entries.append(entry(number, logits > 0))
        path = save(tmp_path / "p.json", entries) if form == "coco" else folder
        scored = score_predictions(path, dataset)
        figures.append(split_figures(scored.results, scored.instances))
    assert figures[0] == figures[1] == figures[2]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({}, ["no list of predictions"]),
        ([3], ["entry 0", "not an object"]),
        ([{"query_id": "1"}], ["entry 0", "query_id '1' is not a whole number"]),
        ([entry(99, block(0, 0, 1, 1))], ["entry 0", "the data have no query 99"]),
        ([entry(1, np.ones((3, 4), bool))], ["entry 0", "3 x 4", "24 x 32"]),
        (
            [entry(1, block(0, 0, 1, 1)), {"query_id": 1, "segmentation": "x"}],
            ["entry 1", "neither an RLE"],
        ),
        ([entry(1, block(0, 0, 1, 1), score="high")], ["score 'high' is not a number"]),
        ([entry(1, block(0, 0, 1, 1), fused=True)] * 2, ["entry 1", "has a fused mask already"]),
        ([entry(1, block(0, 0, 1, 1), mask_type="whole")], ["mask_type 'whole'"]),
        (
            [entry(1, block(0, 0, 1, 1), mask_type=t) for t in ("modal", "amodal")],
            ["called modal and amodal"],
        ),
        ([entry(1, block(0, 0, 1, 1), amodal_probability=2)], ["amodal_probability 2"]),
    ],
)
def test_a_bad_entry_is_named(tmp_path, refused, entries, words):
    make_dataset(tmp_path)
    path = save(tmp_path / "p.json", entries)
    message = refused(main, "--predictions", path, "--data", f"json:{tmp_path / 'data.json'}")
    assert "p.json" in message and all(word in message for word in words), message


def test_bad_folders_are_named(tmp_path):
    sizes = {1: (HEIGHT, WIDTH), 2: (HEIGHT, WIDTH)}
    folder = tmp_path / "masks"
    with pytest.raises(InputError, match="no predictions here"):
        read_predictions(folder, sizes)
    folder.mkdir()
    with pytest.raises(InputError, match=r"no \.npy file"):
        read_predictions(folder, sizes)
    with pytest.raises(InputError, match="are a file, but this is a folder"):
        read_predictions(folder, sizes, "coco")
    with pytest.raises(InputError, match="--format 'voc' is unknown"):
        read_predictions(folder, sizes, "voc")
    Image.fromarray(np.zeros((5, 6), np.uint8)).save(folder / "1.png")
    with pytest.raises(InputError, match=r"1\.png: .*the mask is 5 x 6.*24 x 32"):
        read_predictions(folder, sizes)
    (folder / "1.png").write_bytes(b"no png")
    with pytest.raises(InputError, match=r"1\.png: no masks can be read from it"):
        read_predictions(folder, sizes)
    (folder / "1.png").rename(folder / "first.png")
    with pytest.raises(InputError, match=r"first\.png: its name is not a query id"):
        read_predictions(folder, sizes)
    header = b"{'descr': '<f4', 'fortran_order': False, "  # numpy's own error for one cut short is tokenize.TokenError
    (folder / "2.npy").write_bytes(
        b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    )
    with pytest.raises(InputError, match=r"2\.npy: no masks can be read from it"):
        read_predictions(folder, sizes, "logits")
    np.save(folder / "2.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match=r"2\.npy: no masks can be read from it"):
        read_predictions(folder, sizes, "logits")


def test_the_command_writes_a_report_and_lists_what_is_missing(tmp_path, command):
    make_dataset(tmp_path)
    path = save(tmp_path / "p.json", [entry(1, block(2, 4, 10, 14), amodal_probability=0.2)])
    end = command(
        main,
        "--predictions",
        path,
        "--data",
        f"json:{tmp_path / 'data.json'}",
        "--out",
        tmp_path / "out",
    )
    assert end.code == 0, end.err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["meta"]["missing"] == [2, 3, 4, 6] and set(report["splits"]) == {"all"}
    assert (
        report["splits"]["all"]["all"]["queries"] == 5
        and report["splits"]["all"]["mask_type"]["ece"] is not None
    )
    page = (tmp_path / "out" / "report.md").read_text()
    assert "4 queries have no prediction" in page and "`p.json`" in page


def test_images_are_not_needed(tmp_path, command):
    """The figures are those with images; the page has no pictures and says so."""
    make_dataset(tmp_path)
    path = save(tmp_path / "p.json", [entry(number, block(2, 4, 10, 14)) for number in SCORED])
    reports = []
    for place in ("with", "without"):
        end = command(
            main,
            "--predictions",
            path,
            "--data",
            f"json:{tmp_path / 'data.json'}",
            "--out",
            tmp_path / place,
        )
        assert end.code == 0, end.err
        reports.append(json.loads((tmp_path / place / "report.json").read_text()))
        for image in tmp_path.glob("*.png"):
            image.unlink()
    assert reports[0] == reports[1]
    pages = [(tmp_path / place / "report.html").read_text() for place in ("with", "without")]
    assert ["<img" in page for page in pages] == [True, False]
    assert ["no answers are shown, since there are no images" in page for page in pages] == [
        False,
        True,
    ]


def test_scenes_have_query_ids_of_their_own(tmp_path):
    source = open_source("scenes", "val", count=6, size=48)
    asked = list(truths(source))
    assert len({truth.query.id for truth in asked}) == len(asked)
    wanted = {
        t.query.id: masks.decode(t.amodal if t.query.mask_type == "amodal" else t.modal)
        for t in asked
    }
    entries = [entry(number, mask) for number, mask in wanted.items()]
    scored = score_predictions(save(tmp_path / "p.json", entries), source)
    assert (
        split_figures(scored.results)["all"]["giou"] == pytest.approx(1, abs=1e-4)
        and not scored.missing
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["give one of them", "--predictions FILE"]),
        (["--predictions", "p.json"], ["--data json:FILE"]),
        (["runs/x", "--predictions", "p.json", "--data", "scenes"], ["one of them"]),
        (["--predictions", "p.json", "--data", "scenes", "--split", "val,dev"], ["for one split"]),
    ],
)
def test_bad_arguments(refused, arguments, words):
    message = refused(main, *arguments)
    assert all(word in message for word in words), message


def test_an_empty_mask_is_no_detection(tmp_path):
    """Neither beside the mask of another instance nor where nothing is meant."""
    dataset = make_dataset(tmp_path)
    kept = [entry(n, block(2, 4, 10, 14)) for n in (1, 2, 3, 6)]
    emptied = [entry(n, block(0, 0, 0, 0)) for n in SCORED]
    found = []
    for name, entries in {"without": kept, "with": [*kept, *emptied]}.items():
        scored = score_predictions(save(tmp_path / f"{name}.json", entries), dataset)
        found.append(split_figures(scored.results, scored.instances))
    for figures in found:
        assert (
            figures["all"]["ap"] == found[0]["all"]["ap"] > 0
            and figures["variants"] == found[0]["variants"]
        )


def test_the_mask_type_is_given_for_every_answer_or_for_none(tmp_path):
    dataset = make_dataset(tmp_path)
    entries = [entry(1, block(2, 4, 10, 14), mask_type="modal"), entry(2, block(2, 4, 10, 14))]
    with pytest.raises(
        InputError, match="query 2 has an answer without mask_type, others have one"
    ):
        score_predictions(save(tmp_path / "p.json", entries), dataset)


def test_the_hash_of_the_data_does_not_depend_on_their_order(tmp_path):
    dataset, path = (
        make_dataset(tmp_path),
        save(tmp_path / "p.json", [entry(1, block(2, 4, 10, 14))]),
    )
    hashes = {
        score_predictions(path, dataset.subset(order)).data_sha256 for order in ((0, 1), (1, 0))
    }
    assert (
        len(hashes) == 1 and score_predictions(path, dataset.subset([0])).data_sha256 not in hashes
    )


def test_queries_without_a_target_have_no_size(tmp_path):
    scored = score_predictions(save(tmp_path / "p.json", []), make_dataset(tmp_path))
    sizes = split_figures(scored.results)["breakdowns"]["size"]
    assert sum(figures["queries"] for figures in sizes.values()) == len(SCORED) - 1


@pytest.mark.parametrize(
    ("mode", "colour"),
    [
        ("RGB", (1, 0, 0)),
        ("RGB", (0, 0, 4)),
        ("RGBA", (255, 255, 255, 255)),
        ("P", (255, 255, 255)),
        ("P", (0, 255, 0)),
    ],
)
def test_a_png_mask_may_have_colours_and_transparency(tmp_path, mode, colour):
    make_dataset(tmp_path)
    (tmp_path / "masks").mkdir()
    ground = (255, 255, 255, 0) if mode == "RGBA" else (0, 0, 0)
    image = Image.new("RGB" if mode == "P" else mode, (WIDTH, HEIGHT), ground)
    image.paste(colour, (2, 4, 10, 14))
    image = image.quantize(2) if mode == "P" else image  # the palette begins with the colour
    image.save(tmp_path / "masks" / "1.PNG")  # as cameras and Windows write it
    answers = read_predictions(tmp_path / "masks", {1: (HEIGHT, WIDTH)})
    assert (masks.decode(answers[1].instances[0]) == block(2, 4, 10, 14)).all()
    image.save(tmp_path / "masks" / "01.png")
    with pytest.raises(InputError, match="query 1 is answered by another file already"):
        read_predictions(tmp_path / "masks", {1: (HEIGHT, WIDTH)})


def test_several_splits_are_named_and_a_report_is_not_put_beside_them(tmp_path, refused):
    make_dataset(tmp_path)
    path = save(tmp_path / "p.json", [entry(1, block(2, 4, 10, 14))])
    (tmp_path / "data").mkdir()
    for split in ("train", "test_a", "test_b"):
        shutil.copy(tmp_path / "data.json", tmp_path / "data" / f"{split}.json")
    words = ("--predictions", path, "--data", f"json:{tmp_path / 'data'}")
    assert "give one --split of test_a, test_b" in refused(main, *words)
    (tmp_path / "data" / "test_b.json").unlink()
    assert "would look like a split" in refused(main, *words, "--out", tmp_path / "data")


@pytest.mark.parametrize("score", [10**400, float("nan"), float("inf")])
def test_scores_that_are_no_numbers(tmp_path, score):
    with pytest.raises(InputError, match="is not a number"):
        score_predictions(
            save(tmp_path / "p.json", [entry(1, block(0, 0, 2, 2), score)]), make_dataset(tmp_path)
        )
