"""The written report: four files, tables beside the published ones, a page that needs nothing else,
and reports side by side."""

import csv
import html
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sample_records import to_records

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Instance, Sample, write_records
from r2sm_jax.evaluate import main
from r2sm_jax.evaluation.compare import compare_reports
from r2sm_jax.evaluation.counts import overlap_of_rows, read_tables, write_tables
from r2sm_jax.evaluation.iou import lisa_iou
from r2sm_jax.evaluation.page import (
    example_rows,
    sample_queries,
    select_examples,
    training_curves,
    write_report,
)
from r2sm_jax.evaluation.predictions import score_predictions
from r2sm_jax.evaluation.report import PAPER, find_benchmark, make_report
from r2sm_jax.evaluation.scorer import EvalResults
from r2sm_jax.evaluation.tables import report_markdown
from r2sm_jax.query import Query
from r2sm_jax.sources import load_json_split

IMAGES = 14
HOSTILE = "the <script>alert(1)</script> | mug & `co`"


@pytest.fixture(scope="module")
def scored(tmp_path_factory) -> dict[str, EvalResults]:
    """The answers of systems about a mug half behind a book, a modal and an amodal query an image.

    `a` gets worse from one image to the next, `b` draws all right and always says amodal, `half`
    answers as `a` but modal queries only, and `silent` decides nothing. One image is lost.
    """
    folder = tmp_path_factory.mktemp("report")
    samples, entries = [], {"a": [], "b": [], "half": [], "silent": []}
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
            rolled = {"query_id": query.id, "segmentation": masks.encode(np.roll(mug, n, axis=1))}
            right = mug if query.mask_type == "amodal" else mug & ~book
            probability = 0.9 if query.mask_type == "amodal" else 0.1
            a = rolled | {"amodal_probability": probability}
            entries["a"].append(a)
            entries["half"] += [a] if query.mask_type == "modal" else []
            entries["silent"].append(rolled)
            b = rolled | {"segmentation": masks.encode(right), "mask_type": "amodal"}
            entries["b"].append(b)
    write_records(folder / "data.json", to_records(samples))
    source = load_json_split(folder / "data.json", "all")
    (folder / "5.png").unlink()
    results = {}
    for name, answers in entries.items():
        (folder / f"{name}.json").write_text(json.dumps(answers))
        results[name] = score_predictions(folder / f"{name}.json", source)
    return results


def write(results: EvalResults, folder: Path) -> dict:
    evaluated = {"all": results}
    report = make_report(evaluated, source="json:data.json", predictions="p.json")
    write_report(report, evaluated, folder)
    return report


@pytest.fixture(scope="module")
def reports(scored, tmp_path_factory) -> Path:
    """The written reports of all systems."""
    folder = tmp_path_factory.mktemp("reports")
    for name, results in scored.items():
        write(results, folder / name)
    return folder


def read(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def test_a_report_is_written_in_four_forms(scored, tmp_path):
    folder = tmp_path / "new" / "folder"
    report = write(scored["a"], folder)
    assert read(folder) == report

    text = (folder / "report.md").read_text()
    assert text == report_markdown(report)
    assert f"{IMAGES} images, {2 * IMAGES} queries (`{scored['a'].data_sha256[:12]}`)" in text
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


def test_examples_are_the_best_and_the_worst_answers(scored):
    results = scored["a"]
    iou = lisa_iou(overlap_of_rows(results.rows))
    examples = select_examples(results)
    ious = {title: sorted(iou[chosen].tolist()) for title, chosen in examples.items()}
    assert ious["Worst"] == sorted(iou)[:4] and ious["Best"] == sorted(iou)[-4:]
    assert max(ious["Worst"]) < min(ious["Median"]) < max(ious["Median"]) < min(ious["Best"])
    # No answer stands in two groups, however few there are.
    for count in range(6):
        few = select_examples(EvalResults(results.source, results.results[:count]))
        shown = [index for chosen in few.values() for index in chosen]
        assert len(shown) == len(set(shown)) and bool(few["Worst"]) == bool(count)
    assert [results.results[i].truth.query.id for i in sample_queries(results, 3)] == [1, 4, 5]

    # An image that is lost is blank.
    lost = [i for i, result in enumerate(results.results) if result.truth.image_id == 6]
    (row, _) = example_rows(results, lost)
    assert (row[0].picture == row[0].picture[0, 0]).all()
    assert (row[1].picture != row[0].picture).any()


def test_the_curves_of_a_run_are_those_of_its_last_steps(tmp_path):
    log = tmp_path / "metrics.jsonl"
    assert training_curves(log) == {}
    rows = [{"step": 1, "train/loss": 3}, {"step": 2, "train/loss": 2}]
    rows += [{"step": 2, "val/giou": 0.5, "val/modal": 0.6}, {"step": 2, "train/loss": 1}]
    log.write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 3, "tra')
    expected = {"loss": {"train/loss": [(1, 3), (2, 1)]}, "val": {"val/giou": [(2, 0.5)]}}
    assert training_curves(log) == expected


def test_published_rows_stand_beside_the_benchmark_alone(scored, reports, tmp_path, monkeypatch):
    text = (reports / "a" / "report.md").read_text()
    assert "R2SM, Table 2" in text and "GLaMM" not in text and "PSALM" not in text

    counts = (IMAGES, 2 * IMAGES, IMAGES, IMAGES, 2 * IMAGES)
    monkeypatch.setitem(PAPER["table_1"]["cocoa-cls"], "val", counts)
    report = write(scored["a"], tmp_path)
    assert report["meta"]["benchmark"] == {"all": "cocoa-cls"}
    lines = report_markdown(report).splitlines()
    table = lines[lines.index("## R2SM, Table 2") :]
    assert table[2] == "|  | All gIoU | All cIoU | Amodal gIoU | Amodal cIoU |"
    assert "| cocoa-cls, GLaMM † | 70.73 | 75.56 | 71.88 | 77.14 |" in table
    assert any(line.startswith("| cocoa-cls, PSALM †, amodal | 18.66 |") for line in table)
    # Never beside drawn data.
    monkeypatch.setattr(type(scored["a"].source), "is_procedural", True)
    assert not write(scored["a"], tmp_path)["meta"]["benchmark"]


def test_published_figures_agree_with_the_papers_totals():
    figures = {"modal": {"queries": 17999}, "amodal": {"queries": 18000}}
    assert find_benchmark(3600, figures) == "d2sa" and find_benchmark(3601, figures) is None
    # gIoU is a mean, so what all and amodal queries leave for the modal ones must be a share, too.
    for split, systems in PAPER["table_2"].items():
        _, _, num_amodal, num_modal, num_all = PAPER["table_1"][split]["val"]
        for system, (both, _, amodal, _) in systems.items():
            modal = (num_all * both - num_amodal * amodal) / num_modal
            assert 0 < modal < 100 and abs(modal - amodal) < 8, (split, system)


def test_a_system_that_decides_nothing_has_no_table_of_decisions(reports):
    text = (reports / "silent" / "report.md").read_text()
    page = (reports / "silent" / "report.html").read_text()
    assert "## Mask type" not in text and "always modal" not in text
    assert "true modal for all" in text
    assert "<svg" not in page and "no decision, IoU" in page


# Reports side by side


def test_compared_values_are_those_of_the_reports(reports):
    compared = compare_reports([reports / "a", reports / "b"])["splits"]["all"]
    for i, name in enumerate("ab"):
        report = read(reports / name)["splits"]["all"]
        for kind, figures in compared.items():
            for key in set(figures) - {"accuracy"}:
                expected = report[kind][key]
                value = figures[key]["values"][i]
                assert value == (expected and pytest.approx(expected, abs=1e-9))
        accuracy = report["mask_type"]["accuracy"]
        assert compared["all"]["accuracy"]["values"][i] == accuracy


def test_a_difference_has_a_paired_interval(reports):
    figures = compare_reports([reports / "a", reports / "b"])["splits"]["all"]["all"]
    (difference,) = figures["giou"]["differences"]
    a, b = figures["giou"]["values"]
    low, high = difference["interval"]
    assert difference["value"] == pytest.approx(b - a)
    assert 0 < low < b - a < high < 1
    assert figures["accuracy"]["differences"] == [{"value": -0.5, "interval": [-0.5, -0.5]}]
    same = compare_reports([reports / "a", reports / "a"])["splits"]["all"]["all"]["ciou"]
    assert same["differences"] == [{"value": 0, "interval": [0, 0]}]
    # Missing answers count as empty, and as decided wrongly.
    half = compare_reports([reports / "a", reports / "half"])["splits"]["all"]["amodal"]
    assert half["giou"]["values"][1] == 0 and half["accuracy"]["values"][1] == 0
    silent = compare_reports([reports / "a", reports / "silent"])["splits"]["all"]["all"]
    assert silent["accuracy"]["values"] == [1, None]


def test_the_command_shows_and_writes_the_comparison(reports, command, tmp_path):
    folders = [reports / "a", reports / "b", reports / "half"]
    end = command(main, "--compare", *folders, "--out", tmp_path / "out")
    assert end.code == 0 and "side by side" in end.out
    assert json.loads((tmp_path / "out" / "compare.json").read_text()) == compare_reports(folders)
    text = (tmp_path / "out" / "compare.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("| gIoU, all |")]
    assert line.count("|") == 7 and "*" in line
    assert "<table>" in (tmp_path / "out" / "compare.html").read_text()


def test_queries_are_read_back_as_written_and_compared_by_their_ids(scored, reports, tmp_path):
    rows = scored["b"].rows
    (read_back,) = read_tables(reports / "b" / "queries.csv").values()
    for name in set(rows.dtype.names) - {"detections"}:
        np.testing.assert_array_equal(read_back[name], rows[name], name)
    write_tables(tmp_path / "two.csv", {"a split without a scored query": rows[:0], "val": rows})
    assert list(read_tables(tmp_path / "two.csv")) == ["val"]

    turned = shutil.copytree(reports / "b", tmp_path / "b")
    header, *lines = (turned / "queries.csv").read_text().splitlines(keepends=True)
    (turned / "queries.csv").write_text(header + "".join(reversed(lines)))
    compared = [compare_reports([reports / "a", folder]) for folder in (reports / "b", turned)]
    assert compared[0]["splits"] == compared[1]["splits"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (",", ";", "'query_id'"),  # as spreadsheets write it
        (",boundary_union", "", "'boundary_union'"),  # of an earlier version
        (",modal,", ",visible,", "neither modal nor amodal"),
        ("\nall,12,", "\nall,99,", "other queries"),
        ("\nall,12,", "\nall,twelve,", "twelve"),
        ("\nall,12,", "\nall,12\nall,12,", "of another version"),
    ],
)
def test_queries_that_were_changed_are_refused(reports, refused, tmp_path, old, new, words):
    changed = shutil.copytree(reports / "b", tmp_path / "b")
    text = (changed / "queries.csv").read_text()
    (changed / "queries.csv").write_text(text.replace(old, new))
    message = refused(main, "--compare", reports / "a", changed)
    assert "queries.csv" in message and words in message and "evaluate again" in message


def test_reports_that_cannot_be_compared_are_refused(reports, refused, tmp_path):
    assert "two reports or more" in refused(main, "--compare", reports / "a")
    assert "report.json" in refused(main, "--compare", reports / "a", tmp_path)
    other = shutil.copytree(reports / "b", tmp_path / "b")
    report = read(other)
    report["meta"]["data_sha256"]["all"] = "another"
    (other / "report.json").write_text(json.dumps(report))
    assert "same data" in refused(main, "--compare", reports / "a", other)
    del report["meta"]["data_sha256"]
    (other / "report.json").write_text(json.dumps(report))
    assert "which data it is of" in refused(main, "--compare", reports / "a", other)
