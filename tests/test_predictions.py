"""Masks of any system, from a file or a folder, score what a plain loop over pixels gives them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sample_records import to_records

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Dataset, Instance, Sample, write_records
from r2sm_jax.evaluate import main
from r2sm_jax.evaluation.counts import occluded_overlap
from r2sm_jax.evaluation.iou import overlap
from r2sm_jax.evaluation.predictions import score_predictions
from r2sm_jax.evaluation.report import split_figures
from r2sm_jax.query import Query
from r2sm_jax.sources import load_json_split

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
    write_records(folder / "data.json", to_records([one, two]), overwrite=True)
    return load_json_split(folder / "data.json", "all")


def entry(query: int, mask: np.ndarray, score: float = 1.0, **more) -> dict:
    return {"query_id": query, "segmentation": masks.encode(mask), "score": score} | more


def save(path: Path, entries: object) -> Path:
    """Writes entries, or a text as it is."""
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries), "utf-8")
    return path


def queries_of(dataset: Dataset) -> dict[int, tuple[Sample, Query]]:
    return {query.id: (sample, query) for sample in dataset for query in sample.queries}


SCORED = [1, 2, 3, 4, 6]  # the complete shape that query 5 asks for is not annotated
MUG, BOOK, PART = block(2, 4, 18, 14), block(10, 2, 30, 20), block(2, 4, 10, 14)
EMPTY = block(0, 0, 0, 0)


def score_entries(folder: Path, entries: list[dict], dataset: Dataset | None = None):
    """Scores a file of predictions. Returns results and figures."""
    path = save(folder / "p.json", entries)
    results = score_predictions(path, dataset or make_dataset(folder))
    return results, split_figures(results.rows)


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

    results, _ = score_entries(tmp_path, entries, dataset)
    assert results.rows["query_id"].tolist() == SCORED
    assert results.left_out.total() == 1
    queries = queries_of(dataset)
    for row, hidden in zip(results.rows, occluded_overlap(results.rows), strict=True):
        sample, query = queries[int(row["query_id"])]
        counted = np.ones((HEIGHT, WIDTH), bool)
        for instance in sample.instances:
            if instance.ignore:
                counted = ~instance.modal
        targets = [i for i in sample.instances if i.id in query.instance_ids]
        modal = masks.union((i.modal for i in targets), (HEIGHT, WIDTH)) & counted
        amodal = masks.union((i.amodal for i in targets), (HEIGHT, WIDTH)) & counted
        answer = answers[query.id] & counted
        assert row["predicted"] == answer.sum()
        assert row["truth"].tolist() == [modal.sum(), amodal.sum()]
        assert row["shared"].tolist() == [(answer & modal).sum(), (answer & amodal).sum()]
        if query.id == 2:
            assert tuple(hidden) == overlap(answer & ~modal, amodal & ~modal)


def change_mug(folder: Path, **changes) -> Dataset:
    """The data with other fields of the mug's annotation, or with a second one that has them."""
    make_dataset(folder)
    records = json.loads((folder / "data.json").read_text())
    mug = records["annotations"][0]
    if "id" in changes:
        records["annotations"].append(mug | changes)
    else:
        mug |= changes
    (folder / "data.json").write_text(json.dumps(records))
    return load_json_split(folder / "data.json", "all")


REGION = {"id": 99, "iscrowd": 1, "segmentation": masks.encode(MUG), "visible_mask": None}


@pytest.mark.parametrize("changes", [{"iscrowd": 1}, REGION])
def test_a_query_about_what_is_ignored_is_not_scored(tmp_path, changes):
    """An empty answer to it would be right."""
    dataset = change_mug(tmp_path, **changes)
    results, _ = score_entries(tmp_path, [entry(1, EMPTY), entry(2, EMPTY)], dataset)
    assert {1, 2}.isdisjoint(results.rows["query_id"])
    assert results.left_out["mean only regions to ignore"] == 2


def test_what_is_wholly_hidden_is_nothing_to_detect(tmp_path):
    """An empty answer to a modal query about it is right by every figure."""
    dataset = change_mug(tmp_path, visible_mask=masks.encode(EMPTY))
    right = [entry(3, BOOK), entry(6, BOOK), entry(4, EMPTY), entry(2, MUG), entry(1, EMPTY)]
    _, figures = score_entries(tmp_path, right, dataset)
    for name in ("giou", "ap"):
        assert figures["modal"][name] == pytest.approx(1, abs=1e-5)
    assert figures["cgf1"]["cgf1"] == 1


def test_a_fused_mask_is_the_one_detection_of_a_query_without_instances(tmp_path):
    entries = [entry(query_id, PART, 0.1 * query_id, fused=True) for query_id in SCORED]
    entries += [entry(1, PART, 0.5), entry(1, MUG, 0.7)]
    results, _ = score_entries(tmp_path, entries)
    scores = [one.scores.tolist() for one in results.rows["detections"]]
    assert scores == [[0.7, 0.5], [0.2], [pytest.approx(0.3)], [0.4], [pytest.approx(0.6)]]
    assert results.results[0].said.predicted_iou == 0.1
    # A fused mask beside instances may have no predicted IoU.
    entries[0]["score"] = None
    results, _ = score_entries(tmp_path, entries)
    assert results.results[0].said.predicted_iou is None


@pytest.mark.parametrize("nothing", [masks.encode(EMPTY), None, []])
def test_an_empty_mask_is_no_detection(tmp_path, nothing):
    """Neither beside the mask of another instance nor where the query has no target."""
    entries = [entry(query_id, PART) for query_id in (1, 2, 3, 6)]
    empty = [{"query_id": query_id, "segmentation": nothing, "score": 1.0} for query_id in SCORED]
    _, expected = score_entries(tmp_path, entries)
    _, figures = score_entries(tmp_path, entries + empty)
    assert figures["all"]["ap"] == expected["all"]["ap"] > 0
    assert figures["variants"] == expected["variants"]
    assert figures["cgf1"]["presence_mcc"] > 0


def test_answers_that_stand_twice_count_once(tmp_path):
    entries = [entry(n, BOOK, 0.5 + n / 10, mask_type="modal") for n in SCORED]
    entries += [entry(1, MUG, 0.9), entry(2, MUG, 0.8, fused=True)]
    _, expected = score_entries(tmp_path, entries)
    _, figures = score_entries(tmp_path, [*entries, *entries])
    assert figures == expected and 0 < figures["all"]["ap"] < 1


def test_a_query_without_a_prediction_is_decided_wrongly(tmp_path):
    """Whoever leaves hard sentences out has no better figures for it."""
    right = {1: "modal", 2: "amodal", 3: "modal", 4: "amodal", 6: "amodal"}
    full = [entry(n, MUG, mask_type=right[n], presence=0.9, amodal_probability=0.5) for n in SCORED]
    _, figures = score_entries(tmp_path, full)
    assert figures["mask_type"]["accuracy"] == figures["mask_type"]["mcc"] == 1
    assert (figures["pairs"]["both_right"], figures["pairs"]["pairs"]) == (1, 1)

    results, figures = score_entries(tmp_path, full[2:])
    assert results.missing == [1, 2]
    decisions = figures["mask_type"]
    assert decisions["accuracy"] == 3 / 5 and decisions["f1"] == 2 * 2 / (2 * 2 + 1 + 1)
    wrong = [decisions["confusion"][name] for name in ("modal_as_amodal", "amodal_as_modal")]
    assert wrong == [1, 1]
    assert decisions["ece"] is not None  # of those that have a probability
    assert (figures["pairs"]["swapped"], figures["pairs"]["pairs"]) == (1, 1)
    assert results.rows["presence"].tolist() == [0, 0, 0.9, 0.9, 0.9]


def test_an_answer_may_hold_both_masks(tmp_path):
    entries = []
    for query_id, mask_type in zip(SCORED, 3 * ("modal", "amodal"), strict=False):
        both = {"modal": masks.encode(PART), "amodal": masks.encode(MUG)}
        asked = PART if mask_type == "modal" else MUG
        entries.append(entry(query_id, asked, mask_type=mask_type) | both)
    _, figures = score_entries(tmp_path, entries)
    giou = {name: scores["giou"] for name, scores in figures["references"].items()}
    assert giou["always_modal"] < giou["oracle_type"] and figures["modal"]["complete_iou"] > 0.2
    # A query that is left out has no part in what another decision would give.
    _, fewer = score_entries(tmp_path, entries[1:])
    assert fewer["references"]["oracle_type"]["giou"] < giou["oracle_type"]


def test_a_folder_of_pngs_scores_as_a_file_does(tmp_path):
    (tmp_path / "masks").mkdir()
    entries = []
    for query_id in SCORED:
        mask = np.random.default_rng(query_id).random((HEIGHT, WIDTH)) < 0.5
        Image.fromarray(mask.astype(np.uint8)).save(tmp_path / "masks" / f"{query_id}.PNG")
        entries.append(entry(query_id, mask))
    _, of_file = score_entries(tmp_path, entries)
    of_folder = score_predictions(tmp_path / "masks", make_dataset(tmp_path))
    assert split_figures(of_folder.rows) == of_file


def test_the_hash_of_the_data_is_of_their_content(tmp_path):
    """Neither the order of the images nor the spelling of an RLE changes it."""
    path = save(tmp_path / "p.json", [entry(1, PART)])
    dataset = make_dataset(tmp_path)
    runs = [2 * HEIGHT + 4, 0, 0, 10, WIDTH * HEIGHT - 2 * HEIGHT - 14]
    first_column = np.zeros_like(MUG)
    first_column[4:14, 2] = True
    spelt = change_mug(tmp_path, visible_mask={"size": [HEIGHT, WIDTH], "counts": runs})
    plain = change_mug(tmp_path, visible_mask=masks.encode(first_column))

    def hash_of(source):
        return score_predictions(path, source).data_sha256

    # Regions to ignore count in every figure.
    assert hash_of(make_dataset(tmp_path)) != hash_of(make_dataset(tmp_path, ignore=True))
    assert hash_of(dataset) == hash_of(dataset.subset([1, 0]))
    assert hash_of(spelt) == hash_of(plain)
    assert len({hash_of(dataset), hash_of(dataset.subset([0])), hash_of(plain)}) == 3


# The command


def test_predictions_are_scored_without_images_jax_and_synthetic_data(tmp_path, command):
    """The figures are those with images; the page has no pictures and says so."""
    make_dataset(tmp_path)
    path = save(tmp_path / "p.json", [entry(1, PART, amodal_probability=0.2)])
    flags = ["--predictions", path, "--data", f"json:{tmp_path / 'data.json'}", "--out"]
    assert command(main, *flags, tmp_path / "with").code == 0
    for image in tmp_path.glob("*.png"):
        image.unlink()
    code = """
import sys
from r2sm_jax.evaluate import main
main()
print("loaded", *(name for name in sys.modules if name in ("jax", "flax") or "synthetic" in name))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code, *map(str, flags), str(tmp_path / "without")],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = ran.stdout.splitlines()[-1].split()[1:]
    assert "jax" not in loaded and "flax" not in loaded

    reports = []
    for name in ("with", "without"):
        reports.append(json.loads((tmp_path / name / "report.json").read_text()))
    assert reports[0] == reports[1]
    assert reports[0]["meta"]["missing"] == [2, 3, 4, 6]
    assert reports[0]["splits"]["all"]["mask_type"]["ece"] is not None
    text = (tmp_path / "with" / "report.md").read_text()
    assert "4 queries have no prediction" in text and "`p.json`" in text
    assert "<img" in (tmp_path / "with" / "report.html").read_text()
    page = (tmp_path / "without" / "report.html").read_text()
    assert "<img" not in page and "there are no images" in page


def test_a_report_of_another_system_is_not_overwritten(tmp_path, command, refused):
    make_dataset(tmp_path)
    out = tmp_path / "out"
    flags = ["--data", f"json:{tmp_path / 'data.json'}", "--out", out, "--predictions"]
    one, other = (save(tmp_path / name, [entry(1, m)]) for name, m in (("a", MUG), ("b", PART)))
    assert command(main, *flags, one).code == command(main, *flags, one).code == 0
    before = (out / "report.json").read_bytes()
    assert "of another system" in refused(main, *flags, other)
    assert (out / "report.json").read_bytes() == before


BOX = block(0, 0, 1, 1)
REFUSED_ENTRIES = [
    ("\ufeff\n", "the file is empty"),
    ({}, "query_id"),
    ([{"query_id": "1", "segmentation": None}], "$[0].query_id"),
    ([entry(99, BOX)], "entry 0: the data have no query 99"),
    ([entry(1, BOX), entry(1, np.ones((3, 4), bool))], "entry 1: the RLE's size 3 x 4"),
    ([entry(1, BOX), entry(2, BOX) | {"score": None}], "1 of 2 entries have no score"),
    ([entry(1, BOX, fused=True), entry(1, PART, fused=True)], "query 1 has several"),
    ([entry(1, BOX, mask_type=t) for t in ("modal", "amodal")], "query 1 has several"),
    ([entry(1, BOX, amodal_probability=p) for p in (0.8, 0.9)], "query 1 has several"),
    ([entry(1, BOX, amodal_probability=True)], "$[0].amodal_probability"),
    ([entry(1, BOX, mask_type="modal"), entry(2, BOX)], "1 of 2 answers have no mask_type"),
    ([entry(1, BOX, occlude_rate=15)], "$[0].occlude_rate"),
    ([entry(1, BOX, presence=0.5), entry(2, BOX)], "1 of 2 answers have no presence"),
    ([entry(1, BOX, modal=masks.encode(BOX))], "entry 0: it has one of modal and amodal"),
]


@pytest.mark.parametrize(("entries", "words"), REFUSED_ENTRIES)
def test_bad_entries_are_refused(tmp_path, refused, entries, words):
    make_dataset(tmp_path)
    path = save(tmp_path / "p.json", entries)
    message = refused(main, "--predictions", path, "--data", f"json:{tmp_path / 'data.json'}")
    assert "p.json" in message and words in message


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("1.png", (6, 5), "its image's [24, 32]"),
        ("first.png", (WIDTH, HEIGHT), "no such query"),
        ("02.png", (WIDTH, HEIGHT), "another file answers it"),
    ],
)
def test_bad_folders_are_refused(tmp_path, refused, name, size, words):
    make_dataset(tmp_path)
    folder = tmp_path / "masks"
    folder.mkdir()
    Image.new("L", (WIDTH, HEIGHT)).save(folder / "2.png")
    Image.new("L", size).save(folder / name)
    data = f"json:{tmp_path / 'data.json'}"
    assert words in refused(main, "--predictions", folder, "--data", data)


SCORING = ["--predictions", "p.json", "--data"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--predictions FILE"),
        (["--predictions", "p.json"], "--data json:FILE"),
        (["runs/x", "--compare", "a", "b"], "one of them"),
        (["runs/x", *SCORING, "scenes"], "one of them"),
        (["--predictions", "nowhere.json", "--data", "json:data"], "nowhere.json"),
        ([*SCORING, "json:data", "--split", "a,b"], "one split"),
    ],
)
def test_wrong_flags_are_refused(tmp_path, refused, monkeypatch, flags, words):
    make_dataset(tmp_path)
    save(tmp_path / "p.json", [entry(1, PART)])
    (tmp_path / "data").mkdir()
    shutil.copy(tmp_path / "data.json", tmp_path / "data" / "val.json")
    monkeypatch.chdir(tmp_path)
    assert words in refused(main, *flags)
