"""The written report: figures, tables beside the published ones, pictures, and a page that needs
nothing else."""

import base64
import csv
import html
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sample_records import to_records

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Dataset, Instance, Sample, write_records
from r2sm_jax.evaluation.page import example_rows, sample_queries, select_examples, write_report
from r2sm_jax.evaluation.predictions import score_predictions
from r2sm_jax.evaluation.report import PAPER, find_benchmark, make_report
from r2sm_jax.evaluation.tables import percent, report_markdown
from r2sm_jax.query import Query
from r2sm_jax.synthetic.sources import load_json_split

IMAGES = 14
HOSTILE = "the <script>alert(1)</script> | mug & `co`"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    """Images with a mug half behind a book, a modal and an amodal query each; the answers get worse
    from one to the next, one image is lost."""
    folder = tmp_path_factory.mktemp("report")
    samples = []
    for n in range(IMAGES):
        mug, book = np.zeros((2, 24, 32), bool)
        mug[4:14, 2:18], book[2:20, 10:30] = True, True
        instances = (Instance(1, "mug", mug & ~book, mug), Instance(2, "book", book, book))
        kind = {"task": "referring", "hard": bool(n % 2), "multi": False}
        queries = (
            Query(2 * n + 1, HOSTILE, "modal", (1,), kind),
            Query(2 * n + 2, "the whole mug", "amodal", (1,)),
        )
        image = np.full((24, 32, 3), 10 * n, np.uint8)
        samples.append(Sample(n + 1, f"{n}.png", image, instances, queries))
        Image.fromarray(image).save(folder / f"{n}.png")
    write_records(folder / "data.json", to_records(samples))
    entries = []
    for n, sample in enumerate(samples):
        for query in sample.queries:
            mask = np.roll(sample.instances[0].amodal, n, axis=1)
            decision = {"mask_type": "amodal", "amodal_probability": 0.9}
            entries.append(
                {"query_id": query.id, "segmentation": masks.encode(mask), "score": 1.0} | decision
            )
    (folder / "p.json").write_text(json.dumps(entries))
    source = load_json_split(folder / "data.json", "all")
    (folder / "5.png").unlink()
    return source


@pytest.fixture(scope="module")
def results(dataset):
    return score_predictions(dataset.path.parent / "p.json", dataset)


def write(dataset, results, folder: Path, **meta) -> dict:
    evaluated = {"all": (dataset, results)}
    meta = {"source": "json:data.json", "predictions": "p.json"} | meta
    report = make_report(evaluated, **meta)
    write_report(report, evaluated, folder)
    return report


def test_a_report_is_written_in_four_forms(dataset, results, tmp_path):
    folder = tmp_path / "new" / "folder"
    report = write(dataset, results, folder, threshold=0.0)
    assert json.loads((folder / "report.json").read_text()) == report

    text = (folder / "report.md").read_text()
    assert text == report_markdown(report)
    for words in ("json:data.json", "`lisa`", "threshold 0.0"):
        assert words in text
    assert f"{IMAGES} images, {2 * IMAGES} queries (`{results.data_sha256[:12]}`)" in text
    (row,) = [line for line in text.splitlines() if line.startswith(f"| all, modal | {IMAGES} |")]
    assert "–" in row  # no occluded part is asked for: a dash, not a nought
    assert percent(0.12345) == "12.35" and percent(None) == "–"

    with (folder / "queries.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    giou = np.mean([int(line["intersection"]) / (int(line["union"]) + 1e-5) for line in lines])
    assert len(lines) == 2 * IMAGES
    assert report["splits"]["all"]["all"]["giou"] == pytest.approx(giou, abs=1e-9)


def test_amodal_figures_are_what_a_loop_over_pixels_gives(dataset, results):
    report = make_report({"all": (dataset, results)}, source="json:x", predictions="p")
    figures = report["splits"]["all"]
    mug = dataset[0].instances[0]
    hidden = mug.amodal & ~mug.modal
    ious = []
    hidden_ious = []
    for n in range(IMAGES):
        predicted = np.roll(mug.amodal, n, axis=1)
        outside = predicted & ~mug.modal
        ious.append((predicted & mug.amodal).sum() / (predicted | mug.amodal).sum())
        hidden_ious.append((outside & hidden).sum() / (outside | hidden).sum())
    assert figures["amodal"]["complete_iou"] == pytest.approx(np.mean(ious), abs=1e-5)
    assert figures["amodal"]["occluded_iou"] == pytest.approx(np.mean(hidden_ious), abs=1e-5)
    by_occlusion = figures["breakdowns"]["occlusion"]["0.40-1"]
    assert by_occlusion["occluded_iou"] == pytest.approx(np.mean(hidden_ious), abs=1e-5)
    # There is one mask, and for modal queries it is not the complete one.
    assert figures["modal"]["complete_iou"] is None
    # Every image has one right and one wrong decision.
    assert figures["mask_type"]["interval"]["accuracy"] == [0.5, 0.5]


def test_the_page_is_whole_and_needs_nothing_else(dataset, results, tmp_path):
    write(dataset, results, tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert not re.search("<(script|link|iframe)", text)
    assert html.escape(HOSTILE) in text  # as words, not as markup
    pictures = re.findall('src="data:image/webp;base64,([^"]*)"', text)
    assert len(pictures) == 3 * 12  # best, median and worst: four queries each, three pictures
    for picture in pictures:
        assert max(Image.open(io.BytesIO(base64.b64decode(picture))).size) == 288
    addresses = re.findall(r'(?:href|src|url)\s*[=(]\s*"?(?!data:|#)([^")\s>]+)', text)
    assert not addresses, addresses
    for words in ("Median", "gIoU, amodal", "ECE", "<svg"):
        assert words in text


def test_examples_are_of_different_images_and_none_is_shown_twice(results):
    def iou(result):
        return result.overlap.intersection / result.overlap.union

    examples = select_examples(results.results, count=3)
    ious = {title: [iou(result) for result in group] for title, group in examples.items()}
    assert min(ious["Best"]) > max(ious["Median"]) > min(ious["Median"]) > max(ious["Worst"])
    assert all(len({result.truth.image_id for result in group}) == 3 for group in examples.values())
    assert len({result.query.id for group in examples.values() for result in group}) == 9
    in_order = sorted(iou(result) for result in results.results)
    assert ious["Best"][0] == in_order[-1] and ious["Worst"][0] == in_order[0]

    more_than_there_are = select_examples(results.results, count=100)
    assert sum(len(group) for group in more_than_there_are.values()) <= len(results.results)
    assert len(more_than_there_are["Worst"]) == IMAGES
    assert [r.truth.image_id for r in sample_queries(results.results, 3)] == [1, 2, 3]


def test_an_image_that_is_lost_is_left_blank(dataset, results):
    (row, _) = example_rows(dataset, [r for r in results.results if r.truth.image_id == 6])
    assert (row[0].picture == row[0].picture[0, 0]).all()
    assert (row[1].picture != row[0].picture).any()


def test_published_rows_stand_beside_the_benchmark_alone(dataset, results, tmp_path, monkeypatch):
    text = report_markdown(write(dataset, results, tmp_path))
    assert "R2SM, Table 2" in text and "GLaMM" not in text and "PSALM" not in text

    counts = (IMAGES, 2 * IMAGES, IMAGES, IMAGES, 2 * IMAGES)
    monkeypatch.setitem(PAPER["table_1"]["cocoa-cls"], "val", counts)
    report = write(dataset, results, tmp_path)
    assert report["meta"]["benchmark"] == {"all": "cocoa-cls"}
    lines = report_markdown(report).splitlines()
    table = lines[lines.index("## R2SM, Table 2") :]
    assert table[2] == "|  | All gIoU | All cIoU | Amodal gIoU | Amodal cIoU |"
    assert "| cocoa-cls, GLaMM † | 70.73 | 75.56 | 71.88 | 77.14 |" in table
    assert any(line.startswith("| cocoa-cls, PSALM †, amodal | 18.66 |") for line in table)
    # Never beside drawn data.
    monkeypatch.setattr(type(dataset), "is_procedural", True)
    assert not write(dataset, results, tmp_path)["meta"]["benchmark"]


def test_published_figures_agree_with_the_papers_totals():
    def find(images, modal, amodal):
        return find_benchmark(images, {"modal": {"queries": modal}, "amodal": {"queries": amodal}})

    assert find(images=3600, modal=17999, amodal=18000) == "d2sa"
    assert find(images=3600, modal=17999, amodal=18001) is None
    # Nobody reports a score of all three together.
    assert find(images=7823, modal=39109, amodal=39095) is None
    # gIoU is a mean, so what all and amodal queries leave for the modal ones must be a share, too.
    for split, systems in PAPER["table_2"].items():
        _, _, num_amodal, num_modal, num_all = PAPER["table_1"][split]["val"]
        for system, (both, _, amodal, _) in systems.items():
            modal = (num_all * both - num_amodal * amodal) / num_modal
            assert 0 < modal < 100 and abs(modal - amodal) < 8, (split, system)


def test_a_system_that_decides_nothing_has_no_table_of_decisions(dataset, tmp_path):
    entries = json.loads((dataset.path.parent / "p.json").read_text())
    for entry in entries:
        del entry["mask_type"], entry["amodal_probability"]
    (tmp_path / "p.json").write_text(json.dumps(entries))
    write(dataset, score_predictions(tmp_path / "p.json", dataset), tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    page = (tmp_path / "out" / "report.html").read_text()
    assert "## Mask type" not in text and "always modal" not in text
    assert "true modal for all" in text
    assert "mask type right" not in page and "<svg" not in page and "IoU 1.00" in page
