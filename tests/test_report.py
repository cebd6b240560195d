"""The written report: four files, tables beside the published ones, and a page that needs nothing
else."""

import csv
import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sample_records import to_records

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Dataset, Instance, Sample, write_records
from r2sm_jax.evaluation.page import (
    answer_iou,
    example_rows,
    sample_queries,
    select_examples,
    training_curves,
    write_report,
)
from r2sm_jax.evaluation.predictions import score_predictions
from r2sm_jax.evaluation.report import PAPER, find_benchmark, make_report
from r2sm_jax.evaluation.tables import report_markdown
from r2sm_jax.query import Query
from r2sm_jax.synthetic.sources import load_json_split

IMAGES = 14
HOSTILE = "the <script>alert(1)</script> | mug & `co`"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    """Images with a mug half behind a book, a modal and an amodal query each; the answers get worse
    from one to the next, one image is lost."""
    folder = tmp_path_factory.mktemp("report")
    samples, entries = [], []
    mug, book = np.zeros((2, 24, 32), bool)
    mug[4:14, 2:18], book[2:20, 10:30] = True, True
    instances = (Instance(1, "mug", mug & ~book, mug), Instance(2, "book", book, book))
    for n in range(IMAGES):
        queries = (
            Query(2 * n + 1, HOSTILE, "modal", (1,)),
            Query(2 * n + 2, "the whole mug", "amodal", (1,)),
        )
        image = np.full((24, 32, 3), 10 * n, np.uint8)
        samples.append(Sample(n + 1, f"{n}.png", image, instances, queries))
        Image.fromarray(image).save(folder / f"{n}.png")
        for query in queries:
            answer = {"query_id": query.id, "mask_type": "amodal", "amodal_probability": 0.9}
            entries.append(answer | {"segmentation": masks.encode(np.roll(mug, n, axis=1))})
    write_records(folder / "data.json", to_records(samples))
    (folder / "p.json").write_text(json.dumps(entries))
    source = load_json_split(folder / "data.json", "all")
    (folder / "5.png").unlink()
    return source


@pytest.fixture(scope="module")
def results(dataset):
    return score_predictions(dataset.path.parent / "p.json", dataset)


def write(results, folder: Path) -> dict:
    evaluated = {"all": results}
    report = make_report(evaluated, source="json:data.json", predictions="p.json")
    write_report(report, evaluated, folder)
    return report


def test_a_report_is_written_in_four_forms(dataset, results, tmp_path):
    folder = tmp_path / "new" / "folder"
    report = write(results, folder)
    assert json.loads((folder / "report.json").read_text()) == report

    text = (folder / "report.md").read_text()
    assert text == report_markdown(report)
    assert f"{IMAGES} images, {2 * IMAGES} queries (`{results.data_sha256[:12]}`)" in text
    (row,) = [line for line in text.splitlines() if line.startswith(f"| all, modal | {IMAGES} |")]
    assert "–" in row  # no occluded part is asked for: a dash, not a nought

    with (folder / "queries.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    giou = np.mean([int(line["intersection"]) / (int(line["union"]) + 1e-5) for line in lines])
    assert len(lines) == 2 * IMAGES
    assert report["splits"]["all"]["all"]["giou"] == pytest.approx(giou, abs=1e-9)

    page = (folder / "report.html").read_text()
    assert html.escape(HOSTILE) in page and not re.search("<(script|link|iframe)", page)
    # Best, median and worst: four queries each, three pictures.
    assert page.count('src="data:image/webp;base64,') == 3 * 12
    addresses = re.findall(r'(?:href|src|url)\s*[=(]\s*"?(?!data:|#)([^")\s>]+)', page)
    assert not addresses, addresses
    assert "ECE" in page and "<svg" in page


def test_examples_are_of_different_images(dataset, results):
    examples = select_examples(results.results)
    ious = {title: [answer_iou(result) for result in rows] for title, rows in examples.items()}
    assert min(ious["Best"]) > max(ious["Median"]) > min(ious["Median"]) > max(ious["Worst"])
    assert len({row.truth.image_id for rows in examples.values() for row in rows}) == 12
    assert [r.query.id for r in sample_queries(results.results, 3)] == [1, 4, 5]
    assert len(select_examples(results.results[:1])["Worst"]) == 1

    # An image that is lost is blank.
    (row, _) = example_rows(dataset, [r for r in results.results if r.truth.image_id == 6])
    assert (row[0].picture == row[0].picture[0, 0]).all()
    assert (row[1].picture != row[0].picture).any()


def test_the_curves_of_a_run_are_those_of_its_last_steps(tmp_path):
    log = tmp_path / "metrics.jsonl"
    assert training_curves(log) == {}
    rows = [{"step": 1, "train/loss": 3}, {"step": 2, "train/loss": 2}]
    rows += [{"step": 2, "dev/giou": 0.5}, {"step": 2, "train/loss": 1}]
    log.write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 3, "tra')
    expected = {"loss": {"train/loss": [(1, 3), (2, 1)]}, "dev": {"dev/giou": [(2, 0.5)]}}
    assert training_curves(log) == expected


def test_published_rows_stand_beside_the_benchmark_alone(dataset, results, tmp_path, monkeypatch):
    text = report_markdown(write(results, tmp_path))
    assert "R2SM, Table 2" in text and "GLaMM" not in text and "PSALM" not in text

    counts = (IMAGES, 2 * IMAGES, IMAGES, IMAGES, 2 * IMAGES)
    monkeypatch.setitem(PAPER["table_1"]["cocoa-cls"], "val", counts)
    report = write(results, tmp_path)
    assert report["meta"]["benchmark"] == {"all": "cocoa-cls"}
    lines = report_markdown(report).splitlines()
    table = lines[lines.index("## R2SM, Table 2") :]
    assert table[2] == "|  | All gIoU | All cIoU | Amodal gIoU | Amodal cIoU |"
    assert "| cocoa-cls, GLaMM † | 70.73 | 75.56 | 71.88 | 77.14 |" in table
    assert any(line.startswith("| cocoa-cls, PSALM †, amodal | 18.66 |") for line in table)
    # Never beside drawn data.
    monkeypatch.setattr(type(dataset), "is_procedural", True)
    assert not write(results, tmp_path)["meta"]["benchmark"]


def test_published_figures_agree_with_the_papers_totals():
    figures = {"modal": {"queries": 17999}, "amodal": {"queries": 18000}}
    assert find_benchmark(3600, figures) == "d2sa" and find_benchmark(3601, figures) is None
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
    write(score_predictions(tmp_path / "p.json", dataset), tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    page = (tmp_path / "out" / "report.html").read_text()
    assert "## Mask type" not in text and "always modal" not in text
    assert "true modal for all" in text
    assert "<svg" not in page and "no decision, IoU" in page
