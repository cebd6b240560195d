"""Reports side by side: their own figures, and intervals of the differences."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from PIL import Image
from sample_records import to_records

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.data.sources import load_json_split
from r2sm_jax.errors import InputError
from r2sm_jax.evaluate import main
from r2sm_jax.evaluation.compare import FIGURES, NAME, compare
from r2sm_jax.evaluation.predictions import score_predictions
from r2sm_jax.evaluation.report import make_report, write_report
from r2sm_jax.query import Query
from r2sm_jax.tools.convert import write_json

IMAGES = 24


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> Path:
    """Reports on `a`, on `b`, which draws better and always says amodal, and on one with half of the answers."""
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
            wanted = whole if query.mask_type == "amodal" else modal
            for name in entries:
                drawn = np.roll(wanted, int(rng.integers(0, 4)) + (name == "a"), axis=1)
                said = "amodal" if name == "b" else query.mask_type
                entry = {
                    "query_id": query.id,
                    "segmentation": masks.encode(drawn),
                    "score": 1.0,
                    "mask_type": said,
                }
                if name != "half" or query.id % 2:
                    entries[name].append(entry)
    write_json(folder / "data.json", to_records(samples))
    for name, answers in entries.items():
        (folder / f"{name}.json").write_text(json.dumps(answers))
        source = load_json_split(folder / "data.json", "all")
        evaluated = {"all": (source, score_predictions(folder / f"{name}.json", source))}
        write_report(
            make_report(evaluated, source="json:data.json", predictions=name),
            evaluated,
            folder / name,
        )
    return folder


def test_values_are_those_of_the_reports(reports):
    compared = compare([reports / "a", reports / "b"])
    for place, name in enumerate("ab"):
        report = json.loads((reports / name / "report.json").read_text())["splits"]["all"]
        for kind, figures in compared["splits"]["all"].items():
            for key in set(FIGURES.values()) - {"accuracy"}:
                value = figures[key]["values"][place]
                assert (
                    value == pytest.approx(report[kind][key], abs=1e-9)
                    if value is not None
                    else not report[kind][key]
                )
        assert (
            compared["splits"]["all"]["all"]["accuracy"]["values"][place]
            == report["mask_type"]["accuracy"]
        )


def test_a_difference_has_a_paired_interval(reports):
    figures = compare([reports / "a", reports / "b"])["splits"]["all"]
    (difference,) = figures["all"]["giou"]["differences"]
    a, b = figures["all"]["giou"]["values"]
    low, high = difference["interval"]
    assert difference["value"] == pytest.approx(b - a) and low < b - a < high and high - low < 0.2
    assert low > 0  # b was drawn nearer to the truth
    (accuracy,) = figures["all"]["accuracy"]["differences"]
    assert accuracy == {"value": -0.5, "interval": [-0.5, -0.5]}
    (same,) = compare([reports / "a", reports / "a"])["splits"]["all"]["all"]["ciou"]["differences"]
    assert same == {"value": 0, "interval": [0, 0]}


def test_missing_answers_count_as_empty(reports):
    values = compare([reports / "a", reports / "half"])["splits"]["all"]["amodal"]
    assert values["giou"]["values"][1] == 0 and values["accuracy"]["values"][1] is None


def test_the_command_shows_and_writes_the_comparison(reports, command, tmp_path):
    end = command(
        main, "--compare", reports / "a", reports / "b", reports / "half", "--out", tmp_path / "out"
    )
    assert end.code == 0 and "side by side" in end.out and "half - a" in end.out
    compared = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert compared == compare([reports / "a", reports / "b", reports / "half"])
    text = (tmp_path / "out" / "compare.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("| gIoU, all |"))
    assert line.count("|") == 7 and "*" in line
    assert "<table>" in (tmp_path / "out" / "compare.html").read_text()


def test_what_cannot_be_compared_is_one_sentence(reports, refused, tmp_path, monkeypatch):
    assert "two reports or more" in refused(main, "--compare", reports / "a")
    assert f"there is no {NAME}" in refused(main, "--compare", reports / "a", tmp_path)
    assert "one of them" in refused(main, "run", "--compare", reports / "a", reports / "b")
    lines = (reports / "b" / NAME).read_text().splitlines()

    def spoilt(*changed: str) -> str:
        (tmp_path / NAME).write_text("\n".join(changed))
        return refused(main, "--compare", reports / "a", tmp_path)

    assert "is in one of them only" in spoilt(*lines[:-1])
    assert "another true mask" in spoilt(
        lines[0], lines[1].replace(",modal,", ",amodal,"), *lines[2:]
    )
    assert "no split in common" in spoilt(
        lines[0], *(line.replace("all,", "val,", 1) for line in lines[1:])
    )
    assert "no table of queries" in spoilt("a,b", "1,2")
    assert "no table of queries" in spoilt(lines[0], lines[1].replace(",", ",x", 1), *lines[2:])
    assert "no table of queries" in spoilt("")
    assert "no table of queries" in spoilt(lines[0], lines[1] + "0" * 200_000, *lines[2:])

    def denied(path: Path) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert f"{NAME}: cannot read the file (Permission denied)" in refused(
        main, "--compare", reports / "a", tmp_path
    )


def test_reports_of_other_sentences_are_not_compared(reports, tmp_path):
    other = shutil.copytree(reports / "b", tmp_path / "b")
    report = json.loads((other / "report.json").read_text())
    report["meta"]["data_sha256"]["all"] = "another"
    (other / "report.json").write_text(json.dumps(report))
    with pytest.raises(InputError, match=r"queries or masks of all in .* differ"):
        compare([reports / "a", other])
