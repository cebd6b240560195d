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
from r2sm_jax.errors import InputError
from r2sm_jax.evaluate import main
from r2sm_jax.evaluation.iou import overlap
from r2sm_jax.evaluation.predictions import read_predictions, score_predictions
from r2sm_jax.evaluation.report import split_figures
from r2sm_jax.evaluation.scorer import query_truths
from r2sm_jax.query import Query
from r2sm_jax.synthetic.sources import load_json_split, open_source
from r2sm_jax.tools.records import write_json

HEIGHT, WIDTH = 24, 32


def block(x0: int, y0: int, x1: int, y1: int) -> np.ndarray:
    mask = np.zeros((HEIGHT, WIDTH), bool)
    mask[y0:y1, x0:x1] = True
    return mask


def make_dataset(folder: Path, ignore: bool = False) -> Dataset:
    """Two images: a mug behind a book, queries of all kinds; one that asks for a shape that nobody
    knows."""
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


def queries_of(dataset: Dataset) -> dict[int, tuple[Sample, Query]]:
    return {query.id: (sample, query) for sample in dataset for query in sample.queries}


SCORED = [1, 2, 3, 4, 6]  # the complete shape that query 5 asks for is not annotated


def test_perfect_masks_score_one_in_everything(tmp_path):
    dataset = make_dataset(tmp_path)
    queries = queries_of(dataset)
    entries = []
    for query_id in SCORED:
        sample, query = queries[query_id]
        for instance in sample.instances:
            if instance.id in query.instance_ids:
                mask = instance.amodal if query.mask_type == "amodal" else instance.modal
                entries.append(entry(query_id, mask, 0.9, mask_type=query.mask_type))
    results = score_predictions(save(tmp_path / "p.json", entries), dataset)
    assert [result.query_id for result in results.results] == SCORED
    assert results.missing == [4]

    figures = split_figures(results.results)
    for name in ("giou", "ciou", "occluded_iou", "occluded_ciou", "ap", "ap75", "ar"):
        assert figures["all"][name] == pytest.approx(1, abs=1e-6), name
    assert figures["mask_type"]["accuracy"] == 1 and figures["mask_type"]["ece"] is None
    assert figures["variants"]["muse"]["giou"] == 1
    assert figures["all"]["interval"]["giou"] is not None
    assert figures["references"]["always_modal"]["giou"] is None  # there is one mask only
    # True masks of one type are wrong for queries of the other type about something hidden.
    for reference in ("true_modal_for_all", "true_amodal_for_all"):
        assert 0.5 < figures["references"][reference]["giou"] < 1


@pytest.mark.parametrize("has_ignored", [False, True])
def test_random_masks_score_what_a_loop_over_pixels_gives(tmp_path, has_ignored):
    dataset = make_dataset(tmp_path, has_ignored)
    rng = np.random.default_rng(0)
    entries = []
    answers = {}
    for query_id in SCORED:
        instances = rng.random((int(rng.integers(1, 4)), HEIGHT, WIDTH)) < 0.3
        entries += [entry(query_id, mask, float(rng.random())) for mask in instances]
        answers[query_id] = instances.any(0)
    answers[2] = rng.random((HEIGHT, WIDTH)) < 0.5
    entries.append(entry(2, answers[2], fused=True))

    results = score_predictions(save(tmp_path / "p.json", entries), dataset)
    queries = queries_of(dataset)
    for result in results.results:
        sample, query = queries[result.query_id]
        counted = np.ones((HEIGHT, WIDTH), bool)
        for instance in sample.instances:
            if instance.ignore:
                counted = ~instance.modal
        targets = [i for i in sample.instances if i.id in query.instance_ids]
        modal = masks.union((i.modal for i in targets), (HEIGHT, WIDTH)) & counted
        amodal = masks.union((i.amodal for i in targets), (HEIGHT, WIDTH)) & counted
        answer = answers[query.id] & counted
        assert result.answer.with_modal == overlap(answer, modal)
        assert result.answer.with_amodal == overlap(answer, amodal)
        if query.id == 2:
            assert result.occluded_overlap == overlap(answer & ~modal, amodal & ~modal)


def test_an_answer_that_cannot_be_scored_is_left_out(tmp_path):
    dataset = make_dataset(tmp_path)
    entries = [entry(query_id, block(2, 4, 18, 14)) for query_id in SCORED]
    without = score_predictions(save(tmp_path / "p.json", entries), dataset)
    entries.append(entry(5, block(0, 0, 9, 9)))
    results = score_predictions(save(tmp_path / "p.json", entries), dataset)
    assert results.results == without.results
    assert results.data_sha256 == without.data_sha256
    assert [result.query_id for result in results.results] == SCORED and not results.missing


def ignore_mug(folder: Path, region: np.ndarray | None = None) -> Dataset:
    """The data with the mug ignored, or with an ignored region."""
    make_dataset(folder)
    records = json.loads((folder / "data.json").read_text())
    mug = records["annotations"][0]
    if region is None:
        mug["iscrowd"] = 1
    else:
        more = {"id": 99, "iscrowd": 1, "segmentation": masks.encode(region)}
        records["annotations"].append({**mug, **more, "visible_mask": None})
    (folder / "data.json").write_text(json.dumps(records))
    return load_json_split(folder / "data.json", "all")


@pytest.mark.parametrize("region", [None, block(2, 4, 18, 14)])
def test_a_query_about_what_is_ignored_is_not_scored(tmp_path, region):
    """An empty answer to it would be right."""
    dataset = ignore_mug(tmp_path, region)
    entries = [entry(1, block(0, 0, 0, 0)), entry(2, block(0, 0, 0, 0))]
    results = score_predictions(save(tmp_path / "p.json", entries), dataset)
    assert {1, 2}.isdisjoint(result.query_id for result in results.results)
    assert results.num_ignored == 2 and results.num_not_annotated == 1


def test_a_fused_mask_is_the_one_detection_of_a_system_without_instances(tmp_path):
    dataset = make_dataset(tmp_path)
    mask = block(2, 4, 10, 14)
    entries = [entry(query_id, mask, fused=True) for query_id in SCORED]

    def num_detections():
        results = score_predictions(save(tmp_path / "p.json", entries), dataset).results
        return [len(result.detections.scores) for result in results]

    assert num_detections() == [1, 1, 1, 1, 1]
    entries.append(entry(1, mask, 0.5))
    assert num_detections() == [1, 0, 0, 0, 0]


def test_a_folder_of_pngs_scores_as_a_file_does(tmp_path):
    dataset = make_dataset(tmp_path)
    (tmp_path / "masks").mkdir()
    entries = []
    for query_id in SCORED:
        mask = np.random.default_rng(query_id).random((HEIGHT, WIDTH)) < 0.5
        Image.fromarray(mask.astype(np.uint8)).save(tmp_path / "masks" / f"{query_id}.png")
        entries.append(entry(query_id, mask))
    of_folder = score_predictions(tmp_path / "masks", dataset)
    of_file = score_predictions(save(tmp_path / "p.json", entries), dataset)
    assert split_figures(of_folder.results) == split_figures(of_file.results)


def test_an_empty_mask_is_no_detection(tmp_path):
    """Neither beside the mask of another instance nor where the query has no target."""
    dataset = make_dataset(tmp_path)
    entries = [entry(query_id, block(2, 4, 10, 14)) for query_id in (1, 2, 3, 6)]
    empty = [entry(query_id, block(0, 0, 0, 0)) for query_id in SCORED]
    without = score_predictions(save(tmp_path / "p.json", entries), dataset)
    results = score_predictions(save(tmp_path / "p.json", entries + empty), dataset)
    figures = split_figures(results.results)
    expected = split_figures(without.results)
    assert figures["all"]["ap"] == expected["all"]["ap"] > 0
    assert figures["variants"] == expected["variants"]


def test_the_hash_of_the_data_does_not_depend_on_their_order(tmp_path):
    dataset = make_dataset(tmp_path)
    path = save(tmp_path / "p.json", [entry(1, block(2, 4, 10, 14))])

    def hash_of(*order):
        return score_predictions(path, dataset.subset(order)).data_sha256

    assert hash_of(0, 1) == hash_of(1, 0) != hash_of(0)


def test_queries_without_a_target_have_no_size(tmp_path):
    entries = [entry(1, block(0, 0, 0, 0))]
    results = score_predictions(save(tmp_path / "p.json", entries), make_dataset(tmp_path))
    sizes = split_figures(results.results)["breakdowns"]["size"]
    assert sum(figures["queries"] for figures in sizes.values()) == len(SCORED) - 1


def test_scenes_have_query_ids_of_their_own(tmp_path):
    source = open_source("scenes", "val", count=6, size=48)
    truths = list(query_truths(source))
    assert len({truth.query.id for truth in truths}) == len(truths)
    entries = []
    for truth in truths:
        rle = truth.amodal if truth.query.mask_type == "amodal" else truth.modal
        entries.append(entry(truth.query.id, masks.decode(rle)))
    results = score_predictions(save(tmp_path / "p.json", entries), source)
    assert split_figures(results.results)["all"]["giou"] == pytest.approx(1, abs=1e-4)
    assert not results.missing


@pytest.mark.parametrize(
    ("mode", "colour"),
    [
        ("RGB", (1, 0, 0)),
        ("RGBA", (255, 255, 255, 255)),
        ("P", (255, 255, 255)),
        ("P", (0, 255, 0)),
    ],
)
def test_a_png_mask_may_have_colours_and_transparency(tmp_path, mode, colour):
    (tmp_path / "masks").mkdir()
    background = (255, 255, 255, 0) if mode == "RGBA" else (0, 0, 0)
    image = Image.new("RGB" if mode == "P" else mode, (WIDTH, HEIGHT), background)
    image.paste(colour, (2, 4, 10, 14))
    if mode == "P":
        image = image.quantize(2)  # the palette begins with the colour
    image.save(tmp_path / "masks" / "1.PNG")  # as cameras and Windows write it
    predicted = read_predictions(tmp_path / "masks", {1: (HEIGHT, WIDTH)})
    assert (masks.decode(predicted[1].instances[0].mask) == block(2, 4, 10, 14)).all()


# What is refused


BOX = block(0, 0, 1, 1)


@pytest.mark.parametrize(
    ("entries", "word"),
    [
        ({}, "list of predictions"),
        ([3], "entry 0"),
        ([], "no predictions"),
        ([{"image_id": 1, "segmentation": None}], "image_id in place of query_id"),
        ([{"query_id": "1"}], "query_id '1'"),
        ([entry(99, BOX)], "query 99"),
        ([entry(1, np.ones((3, 4), bool))], "3 x 4"),
        ([entry(1, BOX), {"query_id": 1, "segmentation": "x"}], "entry 1"),
        ([entry(1, BOX, score="high")], "score 'high'"),
        ([entry(1, BOX, score=10**400)], "score 1"),
        ([entry(1, BOX, score=float("nan"))], "score nan"),
        ([entry(1, BOX, fused=True), entry(1, BOX, fused=True)], "fused mask already"),
        ([entry(1, BOX, mask_type="whole")], "mask_type 'whole'"),
        ([entry(1, BOX, mask_type=t) for t in ("modal", "amodal")], "modal and amodal"),
        ([entry(1, BOX, mask_type="modal"), entry(2, BOX)], "query 2"),
        ([entry(1, BOX, amodal_probability=2)], "amodal_probability 2"),
    ],
)
def test_bad_entries_are_refused(tmp_path, entries, word):
    dataset = make_dataset(tmp_path)
    with pytest.raises(InputError, match=r"p\.json") as refused:
        score_predictions(save(tmp_path / "p.json", entries), dataset)
    assert word in str(refused.value)


def test_bad_folders_are_refused(tmp_path):
    sizes = {1: (HEIGHT, WIDTH), 2: (HEIGHT, WIDTH)}
    folder = tmp_path / "masks"

    def refused(match, form="auto"):
        with pytest.raises(InputError, match=match):
            read_predictions(folder, sizes, form)

    refused("no predictions here")
    folder.mkdir()
    refused(r"no \.png file")
    refused("--format", "coco")
    refused("--format 'voc' is unknown", "voc")
    Image.fromarray(np.zeros((5, 6), np.uint8)).save(folder / "1.png")
    refused(r"1\.png: .*the mask is 5 x 6.*24 x 32")
    (folder / "1.png").write_bytes(b"no png")
    refused(r"1\.png: no mask can be read")
    Image.new("L", (WIDTH, HEIGHT)).save(folder / "1.png")
    (folder / "01.png").write_bytes((folder / "1.png").read_bytes())
    refused("query 1 is answered by another file")
    (folder / "01.png").rename(folder / "first.png")
    refused(r"first\.png: its name is not a query id")


# The command


def test_the_command_writes_a_report_and_lists_what_is_missing(tmp_path, command):
    make_dataset(tmp_path)
    path = save(tmp_path / "p.json", [entry(1, block(2, 4, 10, 14), amodal_probability=0.2)])
    data = f"json:{tmp_path / 'data.json'}"
    end = command(main, "--predictions", path, "--data", data, "--out", tmp_path / "out")
    assert end.code == 0, end.err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["meta"]["missing"] == [2, 3, 4, 6] and set(report["splits"]) == {"all"}
    assert report["splits"]["all"]["all"]["queries"] == 5
    assert report["splits"]["all"]["mask_type"]["ece"] is not None
    text = (tmp_path / "out" / "report.md").read_text()
    assert "4 queries have no prediction" in text and "`p.json`" in text


def test_images_are_not_needed(tmp_path, command):
    """The figures are those with images; the page has no pictures and says so."""
    make_dataset(tmp_path)
    path = save(tmp_path / "p.json", [entry(n, block(2, 4, 10, 14)) for n in SCORED])
    data = f"json:{tmp_path / 'data.json'}"
    reports = []
    pages = []
    for out in (tmp_path / "with", tmp_path / "without"):
        end = command(main, "--predictions", path, "--data", data, "--out", out)
        assert end.code == 0, end.err
        reports.append(json.loads((out / "report.json").read_text()))
        pages.append((out / "report.html").read_text())
        for image in tmp_path.glob("*.png"):
            image.unlink()
    assert reports[0] == reports[1]
    assert ["<img" in page for page in pages] == [True, False]
    assert ["there are no images" in page for page in pages] == [False, True]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "--predictions FILE"),
        (["--predictions", "p.json"], "--data json:FILE"),
        (["runs/x", "--predictions", "p.json", "--data", "scenes"], "one of them"),
        (["--predictions", "p.json", "--data", "scenes", "--split", "val,dev"], "one split"),
    ],
)
def test_wrong_flags_are_refused(refused, arguments, word):
    assert word in refused(main, *arguments)


def test_several_splits_and_a_report_beside_the_data_are_refused(tmp_path, refused):
    make_dataset(tmp_path)
    path = save(tmp_path / "p.json", [entry(1, block(2, 4, 10, 14))])
    (tmp_path / "data").mkdir()
    for split in ("train", "test_a", "test_b"):
        shutil.copy(tmp_path / "data.json", tmp_path / "data" / f"{split}.json")
    flags = ("--predictions", path, "--data", f"json:{tmp_path / 'data'}")
    assert "test_a, test_b" in refused(main, *flags)
    (tmp_path / "data" / "test_b.json").unlink()
    assert "--out" in refused(main, *flags, "--out", tmp_path / "data")


def test_ap_by_occlusion_needs_the_rates_of_all_instances(tmp_path):
    dataset = make_dataset(tmp_path)
    mug, book = block(2, 4, 18, 14), block(10, 2, 30, 20)
    both = [entry(3, mug & ~book, occlude_rate=0.5), entry(3, book, occlude_rate=0)]
    figures = score_figures(tmp_path, dataset, [entry(2, mug, occlude_rate=0.5), *both])
    assert figures["amodal"]["ap_occluded_40"] == pytest.approx(1)
    assert figures["modal"]["ap_occluded_15"] == pytest.approx(0.5, abs=0.01)  # query 1 is missing

    figures = score_figures(tmp_path, dataset, [entry(2, mug), *both])
    assert figures["all"]["ap_occluded_15"] is None
    with pytest.raises(InputError, match="entry 0: occlude_rate 15"):
        score_figures(tmp_path, dataset, [entry(2, mug, occlude_rate=15)])


def score_figures(folder: Path, dataset: Dataset, entries: list[dict]) -> dict:
    path = save(folder / "p.json", entries)
    return split_figures(score_predictions(path, dataset).results)


def test_what_the_author_of_predictions_may_not_have_meant(tmp_path):
    dataset = make_dataset(tmp_path)
    right = [entry(query_id, block(2, 4, 10, 14), 0.5) for query_id in SCORED]

    def oddities(entries):
        return score_predictions(save(tmp_path / "p.json", entries), dataset).oddities

    assert oddities(right) == oddities([*right, entry(1, block(2, 4, 10, 14), 0.4)]) == []
    (doubled,) = oddities(right * 2)
    assert "5 of 10 entries repeat another one" in doubled and "p.json" in doubled
    (inverted,) = oddities([entry(query_id, ~block(2, 4, 10, 14)) for query_id in SCORED])
    assert "5 of 5 masks cover all corners" in inverted
    (empty,) = oddities([entry(query_id, block(0, 0, 0, 0)) for query_id in SCORED])
    assert "all masks are empty" in empty
    del right[1]["score"]
    with pytest.raises(InputError, match="1 of 5 entries have no score"):
        oddities(right)


def test_the_flag_of_fused_masks_in_any_spelling(tmp_path):
    dataset = make_dataset(tmp_path)
    mask = block(2, 4, 10, 14)
    sizes = {1: (HEIGHT, WIDTH)}
    for flag, num_instances in (("false", 1), (0, 1), ("true", 1), (True, 1)):
        path = save(tmp_path / "p.json", [entry(1, mask, fused=flag)])
        predicted = read_predictions(path, sizes)[1]
        assert (predicted.fused is None) == (flag in ("false", 0))
        assert len(predicted.instances) == num_instances
    with pytest.raises(InputError, match="fused 'maybe' is neither"):
        score_predictions(save(tmp_path / "p.json", [entry(1, mask, fused="maybe")]), dataset)
