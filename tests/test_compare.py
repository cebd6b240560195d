"""Reports side by side: their own figures, and intervals of the differences."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sample_records import to_records

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Instance, Sample, write_records
from r2sm_jax.evaluate import main
from r2sm_jax.evaluation.compare import compare
from r2sm_jax.evaluation.page import write_report
from r2sm_jax.evaluation.predictions import score_predictions
from r2sm_jax.evaluation.report import make_report
from r2sm_jax.query import Query
from r2sm_jax.synthetic.sources import load_json_split

IMAGES = 24


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> Path:
    """Reports on `a`, on `b`, which draws better and always says amodal, and on one with half of
    the answers."""
    folder = tmp_path_factory.mktemp("compare")
    rng = np.random.default_rng(0)
    samples, entries = [], {"a": [], "b": [], "half": []}
    for n in range(IMAGES):
        whole = np.zeros((20, 30), bool)
        whole[4:16, 5:25] = True
        modal = whole.copy()
        modal[:, : 5 + n % 9] = False
        queries = (
            Query(2 * n + 1, "the mug", "modal", (1,)),
            Query(2 * n + 2, "the whole mug", "amodal", (1,)),
        )
        instances = (Instance(1, "mug", modal, whole),)
        samples.append(
            Sample(n + 1, f"{n}.png", np.zeros((20, 30, 3), np.uint8), instances, queries)
        )
        Image.fromarray(samples[-1].image).save(folder / f"{n}.png")
        for query in queries:
            expected = whole if query.mask_type == "amodal" else modal
            for name in entries:
                drawn = np.roll(expected, int(rng.integers(0, 4)) + (name == "a"), axis=1)
                decision = "amodal" if name == "b" else query.mask_type
                entry = {
                    "query_id": query.id,
                    "segmentation": masks.encode(drawn),
                    "score": 1.0,
                    "mask_type": decision,
                }
                if name != "half" or query.id % 2:
                    entries[name].append(entry)
    write_records(folder / "data.json", to_records(samples))
    for name, answers in entries.items():
        (folder / f"{name}.json").write_text(json.dumps(answers))
        source = load_json_split(folder / "data.json", "all")
        evaluated = {"all": score_predictions(folder / f"{name}.json", source)}
        write_report(
            make_report(evaluated, source="json:data.json", predictions=name),
            evaluated,
            folder / name,
        )
    return folder


def test_values_are_those_of_the_reports(reports):
    compared = compare([reports / "a", reports / "b"])["splits"]["all"]
    for i, name in enumerate("ab"):
        report = json.loads((reports / name / "report.json").read_text())["splits"]["all"]
        for kind, figures in compared.items():
            for key in set(figures) - {"accuracy"}:
                value = figures[key]["values"][i]
                expected = report[kind][key]
                assert value == (expected and pytest.approx(expected, abs=1e-9))
        accuracy = report["mask_type"]["accuracy"]
        assert compared["all"]["accuracy"]["values"][i] == accuracy


def test_a_difference_has_a_paired_interval(reports):
    figures = compare([reports / "a", reports / "b"])["splits"]["all"]["all"]
    (difference,) = figures["giou"]["differences"]
    a, b = figures["giou"]["values"]
    low, high = difference["interval"]
    assert difference["value"] == pytest.approx(b - a)
    assert 0 < low < b - a < high < low + 0.2  # the masks of b are nearer to the truth
    assert figures["accuracy"]["differences"] == [{"value": -0.5, "interval": [-0.5, -0.5]}]
    same = compare([reports / "a", reports / "a"])["splits"]["all"]["all"]["ciou"]
    assert same["differences"] == [{"value": 0, "interval": [0, 0]}]


def test_missing_answers_count_as_empty(reports):
    values = compare([reports / "a", reports / "half"])["splits"]["all"]["amodal"]
    assert values["giou"]["values"][1] == 0 and values["accuracy"]["values"][1] is None


def test_the_command_shows_and_writes_the_comparison(reports, command, tmp_path):
    folders = [reports / "a", reports / "b", reports / "half"]
    end = command(main, "--compare", *folders, "--out", tmp_path / "out")
    assert end.code == 0 and "side by side" in end.out
    assert json.loads((tmp_path / "out" / "compare.json").read_text()) == compare(folders)
    text = (tmp_path / "out" / "compare.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("| gIoU, all |")]
    assert line.count("|") == 7 and "*" in line
    assert "<table>" in (tmp_path / "out" / "compare.html").read_text()


def test_reports_that_cannot_be_compared_are_refused(reports, refused, tmp_path):
    assert "two reports or more" in refused(main, "--compare", reports / "a")
    assert "report.json" in refused(main, "--compare", reports / "a", tmp_path)
    assert "one of them" in refused(main, "run", "--compare", reports / "a", reports / "b")

    other = shutil.copytree(reports / "b", tmp_path / "b")
    report = json.loads((other / "report.json").read_text())
    report["meta"]["data_sha256"]["all"] = "another"
    (other / "report.json").write_text(json.dumps(report))
    assert "same data" in refused(main, "--compare", reports / "a", other)
