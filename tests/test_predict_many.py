import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sample_records import to_records

from r2sm_jax import predict as many
from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Instance
from r2sm_jax.errors import InputError
from r2sm_jax.evaluate import main as evaluate_main
from r2sm_jax.inference.exporter import main as export_main
from r2sm_jax.inference.journal import JOURNAL
from r2sm_jax.inference.run import open_run
from r2sm_jax.predict import PRODUCT, find_tasks, main, predict_many
from r2sm_jax.query import Query
from r2sm_jax.synthetic.scenes.source import SceneSource
from r2sm_jax.tools.convert import write_json

QUERY = "the complete shape of the red mug"
COUNT = 11


@pytest.fixture(scope="module")
def predictor(tiny_run):
    return open_run(tiny_run).predictor


@pytest.fixture(autouse=True)
def one_predictor(monkeypatch, predictor):
    """Opens the run once for this whole file."""
    opened = type("Opened", (), {"predictor": predictor})()
    monkeypatch.setattr(
        many, "open_run", lambda folder, *, checkpoint="best", matmul_precision="float32": opened
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """Eleven scenes of three sizes, one with more queries than are answered at once; a folder with `val.json`. Each has
    a query without a target; some have a region to ignore, or an instance whose complete shape is not annotated."""
    folder = tmp_path_factory.mktemp("dataset")
    samples = []
    for i in range(COUNT):
        sample = SceneSource("val", COUNT, size=40 + 24 * (i % 3), queries=11 if i == 4 else 3)[i]
        instances, queries = (
            list(sample.instances),
            [*sample.queries, Query(1, "the elephant", "modal", ())],
        )
        if i % 3 == 0:
            corner = np.zeros(sample.image.shape[:2], bool)
            corner[:20, :20] = True
            instances.append(Instance(99, "crowd", corner, None, ignore=True))
        if i in (2, 7):
            instances[0] = replace(instances[0], amodal=None)
            queries.append(Query(2, "the whole thing", "amodal", (instances[0].id,)))
        samples.append(
            replace(sample, image_id=i + 1, instances=tuple(instances), queries=tuple(queries))
        )
    for sample in samples:
        Image.fromarray(sample.image).save(folder / sample.file_name)
    write_json(folder / "val.json", to_records(samples))
    return folder


@pytest.fixture
def photos(dataset, tmp_path) -> Path:
    """The images alone, in a folder that a test may spoil."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for path in dataset.glob("*.png"):
        shutil.copy2(path, folder)
    return folder


def entries(out: Path) -> list[dict]:
    return json.loads((out / PRODUCT).read_text())


def fused(out: Path) -> list[dict]:
    return [entry for entry in entries(out) if entry.get("fused")]


def defined_by_both(report: dict) -> dict:
    """The figures of a split without those that need the mask of the type that was not chosen."""
    kept = {
        t: {k: v for k, v in report[t].items() if not k.startswith("complete_")}
        for t in ("all", "modal", "amodal")
    }
    references = {k: v for k, v in report["references"].items() if k.startswith("true_")}
    return (
        kept
        | {k: report[k] for k in ("mask_type", "variants", "breakdowns")}
        | {"references": references}
    )


def test_predictions_score_as_the_run_itself(tiny_run, dataset, tmp_path, command, monkeypatch):
    """Predict, then score the file, gives what evaluating the run gives, to the last digit of every figure."""
    monkeypatch.setattr(many, "open_run", open_run)
    tiny_run = shutil.copytree(tiny_run, tmp_path / "tiny")
    config = json.loads((tiny_run / "config.json").read_text())
    config["model"][
        "mask_threshold"
    ] = -4.0  # after four steps few masks are drawn at the usual one
    (tiny_run / "config.json").write_text(json.dumps(config))
    end = command(
        main, tiny_run, dataset, "--queries", dataset / "val.json", "--out", tmp_path / "p"
    )
    assert end.code == 0 and f"{COUNT} images answered" in end.out, end
    data = "--data", f"json:{dataset}", "--split", "val"
    for name, arguments in (
        ("run", [tiny_run]),
        ("file", ["--predictions", tmp_path / "p" / PRODUCT]),
    ):
        end = command(evaluate_main, *arguments, *data, "--out", tmp_path / name)
        assert end.code == 0, end.err
    run, file = (
        json.loads((tmp_path / name / "report.json").read_text()) for name in ("run", "file")
    )
    assert not file["meta"]["missing"] and run["meta"]["data_sha256"] == file["meta"]["data_sha256"]
    ours, theirs = run["splits"]["val"], file["splits"]["val"]
    assert (
        ours["all"]["queries"] == 3 * (COUNT - 1) + 11 + COUNT
    )  # two more ask for a shape that is not annotated
    assert ours["all"]["detections"] > 0 and defined_by_both(ours) == defined_by_both(theirs)
    tables = [(tmp_path / name / "queries.csv").read_text() for name in ("run", "file")]
    assert tables[0] == tables[1]


def test_a_folder_is_asked_one_query_and_says_what_one_image_says(
    tiny_run, photos, tmp_path, command
):
    end = command(main, tiny_run, photos, QUERY, "--out", tmp_path / "p")
    assert end.code == 0 and "wrote" in end.out, end
    found = fused(tmp_path / "p")
    assert [entry["image"] for entry in found] == sorted(path.name for path in photos.iterdir())
    assert [entry["query_id"] for entry in found] == list(range(1, COUNT + 1))
    one = json.loads(command(main, tiny_run, photos / found[3]["image"], QUERY, "--json").out)
    assert found[3]["query"] == one["query"] and found[3]["mask_type"] == one["mask_type"]
    assert found[3]["amodal_probability"] == pytest.approx(one["amodal_probability"], abs=1e-4)
    differ = masks.decode(found[3]["segmentation"]) != masks.decode(one["mask"])
    assert differ.mean() < 0.01


def test_a_pattern_takes_what_matches(tiny_run, photos, tmp_path, command):
    end = command(
        main,
        tiny_run,
        photos / "val_00000[0-3].png",
        QUERY,
        "--out",
        tmp_path / "p",
        "--mask-type",
        "modal",
    )
    assert end.code == 0 and "4 images answered" in end.out
    assert {entry["mask_type"] for entry in fused(tmp_path / "p")} == {"modal"}


def test_a_text_file_asks_about_every_image_and_about_single_ones(photos, tmp_path):
    file = tmp_path / "queries.txt"
    file.write_text("the red mug\n\nval_000001.png\tthe whole car\nthe cat\n", encoding="utf-8-sig")
    tasks = find_tasks(str(photos), None, str(file)).images
    assert len(tasks) == COUNT
    asked = {task.path.name: [query.text for query in task.queries] for task in tasks}
    assert asked["val_000000.png"] == ["the red mug", "the cat"]
    assert asked["val_000001.png"] == ["the red mug", "the cat", "the whole car"]
    file.write_text("val_000001.png\tthe whole car\nval_000001.png\tthe car\n")
    (task,) = find_tasks(str(photos), None, str(file)).images
    assert task.path == photos / "val_000001.png" and len(task.queries) == 2


def test_a_bad_image_is_named_and_the_others_are_answered(tiny_run, photos, tmp_path, command):
    (photos / "val_000002.png").write_text("no image")
    whole = (photos / "val_000005.png").read_bytes()
    (photos / "val_000005.png").write_bytes(whole[: len(whole) // 2])
    Image.new("1", (10_000, 10_000)).save(photos / "huge.png")
    end = command(main, tiny_run, photos, QUERY, "--out", tmp_path / "p")
    said = [line for line in end.err.splitlines() if line.startswith("not answered: ")]
    assert (
        end.code == 0
        and "9 images answered" in end.out
        and "3 not readable" in end.out
        and len(said) == 3
    )
    assert any("val_000002.png" in line and "not an image" in line for line in said)
    assert any("huge.png" in line and "megapixels" in line for line in said)
    assert len(fused(tmp_path / "p")) == 9
    (photos / "val_000005.png").write_bytes(whole)  # mended: it alone is done now
    end = command(main, tiny_run, photos, QUERY, "--out", tmp_path / "p")
    assert "1 images answered, 9 answered earlier, 2 not readable" in end.out
    assert len(fused(tmp_path / "p")) == 10


def test_what_is_done_is_not_done_again(predictor, photos, tmp_path, monkeypatch):
    """Stopped in the second part, then resumed: the same file as at one go, and no image is answered twice."""
    tasks = find_tasks(str(photos), QUERY, None)
    predict_many(predictor, tasks, tmp_path / "whole")
    seen: list[str] = []
    answer_part, read = many._answer_part, many._read

    def killed(predictor, part, mask_type):
        if len(seen) > many.PART:
            raise KeyboardInterrupt
        return answer_part(predictor, part, mask_type)

    monkeypatch.setattr(
        many, "_read", lambda path, size: (seen.append(path.name), read(path, size))[1]
    )
    monkeypatch.setattr(many, "_answer_part", killed)
    with pytest.raises(KeyboardInterrupt):
        predict_many(predictor, tasks, tmp_path / "parts")
    assert not (tmp_path / "parts" / PRODUCT).exists()
    monkeypatch.setattr(many, "_answer_part", answer_part)
    seen.clear()
    outcome = predict_many(predictor, tasks, tmp_path / "parts")
    assert (
        (outcome.earlier, outcome.answered)
        == (many.PART, COUNT - many.PART)
        == (many.PART, len(seen))
    )
    whole, parts = ((tmp_path / name / PRODUCT).read_bytes() for name in ("whole", "parts"))
    assert whole == parts
    seen.clear()
    assert predict_many(predictor, tasks, tmp_path / "parts").answered == 0 and not seen
    assert (tmp_path / "parts" / PRODUCT).read_bytes() == whole


def test_a_line_that_was_cut_short_is_done_again(predictor, photos, tmp_path):
    tasks = find_tasks(str(photos), QUERY, None)
    predict_many(predictor, tasks, tmp_path)
    product, journal = (tmp_path / PRODUCT).read_bytes(), tmp_path / JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    for kept, torn in ((5, 20), (COUNT, 1), (0, 10)):
        journal.write_bytes(b"".join(lines[: kept + 1])[: -torn if torn > 1 else None])
        if torn == 1:
            journal.write_bytes(b"".join(lines)[:-1])  # only the newline is missing
        outcome = predict_many(predictor, tasks, tmp_path)
        assert outcome.earlier + outcome.answered == COUNT and outcome.answered > 0
        assert (tmp_path / PRODUCT).read_bytes() == product


def test_an_image_that_changed_is_asked_again(predictor, photos, tmp_path):
    tasks = find_tasks(str(photos), QUERY, None)
    predict_many(predictor, tasks, tmp_path / "p")
    Image.new("RGB", (30, 20), "white").save(photos / "val_000003.png")
    outcome = predict_many(predictor, tasks, tmp_path / "p")
    assert outcome.answered == 1
    changed = next(entry for entry in fused(tmp_path / "p") if entry["image"] == "val_000003.png")
    assert changed["segmentation"]["size"] == [20, 30] and len(fused(tmp_path / "p")) == COUNT


def test_other_questions_do_not_mix_with_what_is_there(predictor, photos, tmp_path):
    tasks = find_tasks(str(photos / "val_000000.png"), QUERY, None)
    predict_many(predictor, tasks, tmp_path / "p")
    before = (tmp_path / "p" / PRODUCT).read_bytes()
    other = find_tasks(str(photos / "val_000000.png"), "the cat", None)
    with pytest.raises(InputError, match="of other queries; pass another --out, or --overwrite"):
        predict_many(predictor, other, tmp_path / "p")
    with pytest.raises(InputError, match="of other mask type"):
        predict_many(predictor, tasks, tmp_path / "p", mask_type="amodal")
    assert (tmp_path / "p" / PRODUCT).read_bytes() == before
    predict_many(predictor, other, tmp_path / "p", overwrite=True)
    assert fused(tmp_path / "p")[0]["query"] == "the cat"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / PRODUCT).write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        predict_many(predictor, tasks, tmp_path / "mine")
    assert (tmp_path / "mine" / PRODUCT).read_text() == "mine"


@pytest.mark.parametrize(
    "content", [b"my notes", b"my notes\nand more", b'{"image": "a"}\n{"im', b"[]\n"]
)
def test_a_file_of_that_name_that_is_not_ours_is_left_as_it_is(
    predictor, photos, tmp_path, content
):
    (tmp_path / JOURNAL).write_bytes(content)
    with pytest.raises(
        InputError, match=f"{JOURNAL}: (line 1 is damaged|these answers are of other weights)"
    ):
        predict_many(predictor, find_tasks(str(photos), QUERY, None), tmp_path)
    assert (tmp_path / JOURNAL).read_bytes() == content


def test_a_long_query_is_cut_with_a_warning(tiny_run, photos, tmp_path, command):
    file = tmp_path / "queries.txt"
    file.write_text("the red mug " * 5000)
    end = command(
        main, tiny_run, photos / "val_000000.png", "--queries", file, "--out", tmp_path / "p"
    )
    assert end.code == 0 and "longer than 24 tokens" in end.err and len(fused(tmp_path / "p")) == 1


def test_of_an_animation_the_first_frame_is_answered_with_a_warning(tiny_run, tmp_path, command):
    folder = tmp_path / "moving"
    folder.mkdir()
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("white", "red", "blue")]
    frames[0].save(folder / "a.gif", save_all=True, append_images=frames[1:])
    frames[0].save(folder / "b.png")
    end = command(main, tiny_run, folder, QUERY, "--out", tmp_path / "p")
    assert (
        end.code == 0
        and "a.gif: it has 3 frames; the first one is looked at" in end.err
        and "b.png" not in end.err
    )
    first, plain = (entry["segmentation"] for entry in fused(tmp_path / "p"))
    assert first == plain
    end = command(main, tiny_run, folder / "a.gif", QUERY, "--json")
    assert (
        end.code == 0
        and "a.gif: it has 3 frames" in end.err
        and json.loads(end.out)["size"] == [30, 40]
    )


def bad(tmp_path: Path, photos: Path) -> dict[str, tuple[list, list[str]]]:
    """Arguments after the run, and words of the sentence that must come."""
    empty, text, latin, void = (
        tmp_path / "empty",
        tmp_path / "q.txt",
        tmp_path / "latin.txt",
        tmp_path / "void.txt",
    )
    empty.mkdir()
    text.write_text("missing.png\tthe mug\n")
    latin.write_bytes("das gr\xfcne Auto".encode("latin-1"))
    void.write_text("\n \n")
    half, odd, nothing = tmp_path / "half.txt", tmp_path / "odd.json", tmp_path / "nothing.json"
    half.write_text("the mug\n\tthe mug\n")
    odd.write_text("[1, 2")
    nothing.write_text(
        json.dumps({"images": [], "annotations": [], "categories": [], "queries": []})
    )
    return {
        "no query": ([photos], ["no query", "--queries"]),
        "empty query": ([photos, "  "], ["query is empty"]),
        "both": ([photos, QUERY, "--queries", text], ["--queries", "leave one"]),
        "empty folder": ([empty, QUERY], ["empty", "no .jpg"]),
        "no match": ([empty / "*.jpg", QUERY], ["*.jpg", "no file matches", "quotes"]),
        "no query file": (
            [photos, "--queries", tmp_path / "nowhere.txt"],
            ["nowhere.txt", "cannot read the query"],
        ),
        "folder of queries": ([photos, "--queries", empty], ["empty", "cannot read the query"]),
        "latin-1": ([photos, "--queries", latin], ["latin.txt", "UTF-8"]),
        "no lines": ([photos, "--queries", void], ["void.txt", "empty"]),
        "half a line": ([photos, "--queries", half], ["half.txt", "line 2"]),
        "missing image": ([photos, "--queries", text], ["q.txt", "missing.png"]),
        "no JSON": ([photos, "--queries", odd], ["odd.json", "not JSON"]),
        "no queries in it": ([photos, "--queries", nothing], ["nothing.json", "no queries"]),
        "JSON and no folder": (
            [photos / "val_000000.png", "--queries", nothing],
            ["folder of its images"],
        ),
        "json": ([photos, QUERY, "--json"], ["--json"]),
    }


@pytest.mark.parametrize(
    "name",
    [
        "no query",
        "empty query",
        "both",
        "empty folder",
        "no match",
        "no query file",
        "folder of queries",
        "latin-1",
        "no lines",
        "half a line",
        "missing image",
        "no JSON",
        "no queries in it",
        "JSON and no folder",
        "json",
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(name, tiny_run, photos, tmp_path, refused):
    arguments, words = bad(tmp_path, photos)[name]
    message = refused(main, tiny_run, *arguments, "--out", tmp_path / "out")
    assert all(word in message for word in words), message
    assert not (tmp_path / "out").exists()


def test_images_that_cannot_be_read_at_all_are_an_error(tiny_run, tmp_path, refused):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_text("no image")
    message = refused(main, tiny_run, tmp_path / "photos", QUERY, "--out", tmp_path / "out")
    assert "no image could be read" in message and "a.png" in message


def test_an_unknown_mask_type_is_refused(tiny_run, photos, command):
    end = command(main, tiny_run, photos, QUERY, "--mask-type", "both")
    assert end.code == 2 and "both" in end.err + end.out and "Traceback" not in end.err


@pytest.mark.slow
def test_an_export_answers_as_its_run(tiny_run, photos, tmp_path, command):
    assert command(export_main, tiny_run, "--out", tmp_path / "export").code == 0
    tasks = find_tasks(str(photos), QUERY, None)
    for place in (tiny_run, tmp_path / "export"):
        predict_many(open_run(place).predictor, tasks, tmp_path / place.name / "answers")
    one, other = (
        (tmp_path / name / "answers" / PRODUCT).read_bytes() for name in (tiny_run.name, "export")
    )
    assert one == other


@pytest.mark.slow
def test_a_killed_process_is_resumed(tiny_run, photos, tmp_path):
    """SIGKILL, wherever it strikes: the second call ends with the answers of an undisturbed one."""
    line = [
        sys.executable,
        "-m",
        "r2sm_jax.predict",
        str(tiny_run),
        str(photos),
        QUERY,
        "--out",
        str(tmp_path / "p"),
    ]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal = tmp_path / "p" / JOURNAL
    while process.poll() is None and not (journal.exists() and journal.stat().st_size > 400):
        time.sleep(0.01)
    process.kill()
    process.wait()
    subprocess.run(line, check=True, capture_output=True)
    subprocess.run([*line[:-1], str(tmp_path / "q")], check=True, capture_output=True)
    assert [e["image"] for e in fused(tmp_path / "p")] == [
        e["image"] for e in fused(tmp_path / "q")
    ]
    assert entries(tmp_path / "p") == entries(tmp_path / "q")


def test_other_images_are_not_written_over_the_answers(photos, tmp_path, command, refused):
    other = tmp_path / "else" / "photos"
    shutil.copytree(photos, other)
    assert command(main, "run", photos, QUERY, "--out", tmp_path / "p").code == 0
    before = entries(tmp_path / "p")
    assert "answers are of other images" in refused(
        main, "run", other, QUERY, "--out", tmp_path / "p"
    )
    assert entries(tmp_path / "p") == before


def test_overwriting_removes_no_file_of_others(photos, tmp_path, command, refused):
    out = tmp_path / "p"
    assert command(main, "run", photos, QUERY, "--out", out).code == 0
    for name in ("answers-mine.jsonl", "answers_mine.jsonl"):
        (out / name).write_text("mine")
    assert command(main, "run", photos, "the blue mug", "--out", out, "--overwrite").code == 0
    assert {(out / name).read_text() for name in ("answers-mine.jsonl", "answers_mine.jsonl")} == {
        "mine"
    }
    (tmp_path / "q.txt").write_text(QUERY)
    words = (
        "run",
        tmp_path / "missing.jpg",
        "--queries",
        tmp_path / "q.txt",
        "--out",
        out,
        "--overwrite",
    )
    assert "no such image" in refused(main, *words) and (out / JOURNAL).read_text()


def test_images_of_a_pattern_are_told_apart_by_their_folders(
    photos, tmp_path, command, refused, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (photos / folder).mkdir()
        shutil.copy2(next(photos.glob("*.png")), photos / folder / "1.png")
    lines = tmp_path / "q.txt"
    lines.write_text(f"a/1.png\t{QUERY}\nb/1.png\tthe mug\n")
    assert command(main, "run", "photos/**/1.png", "--queries", lines).code == 0
    found = {(e["image"], e["query"]) for e in entries(tmp_path / "predictions" / "photos")}
    assert found == {("a/1.png", QUERY), ("b/1.png", "the mug")}
    lines.write_text("1.png\tthe mug\n")
    assert "asks about 1.png" in refused(main, "run", "photos/**/1.png", "--queries", lines)


def test_the_default_folder_is_named_after_the_images(photos, tmp_path, command, monkeypatch):
    versioned = photos.rename(photos.with_name("shots.v2"))
    monkeypatch.chdir(versioned)
    assert command(main, "run", ".", QUERY).code == 0
    assert entries(versioned / "predictions" / "shots.v2")


def test_arguments_that_cannot_be_images_are_one_sentence(tmp_path, refused, photos):
    assert "IMAGE is empty" in refused(main, "run", "", QUERY)
    assert "too long for the name of a file" in refused(main, "run", "what is " * 60, QUERY)
    (tmp_path / "file").write_text("")
    assert "this is a file" in refused(main, "run", photos, QUERY, "--out", tmp_path / "file")


def test_a_file_name_that_is_no_text(photos, tmp_path, command):
    try:
        shutil.copy2(next(photos.glob("*.png")), os.fsencode(photos) + b"/caf\xe9.png")
    except OSError:
        pytest.skip("this file system has no such names")
    assert command(main, "run", photos, QUERY, "--out", tmp_path / "p").code == 0
    assert len({e["image"] for e in entries(tmp_path / "p")}) == COUNT + 1
