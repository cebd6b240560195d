"""`predict` for many images: what is predicted, the journal, and going on after a stop. A stub
stands for the model."""

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
from stub_predictor import StubPredictor

from r2sm_jax import predict
from r2sm_jax.data.dataset import Instance
from r2sm_jax.errors import InputError
from r2sm_jax.evaluate import main as evaluate_main
from r2sm_jax.inference import batch
from r2sm_jax.inference.batch import PREDICTIONS, predict_images
from r2sm_jax.inference.journal import JOURNAL, read_journal
from r2sm_jax.inference.predictor import Request
from r2sm_jax.inference.tasks import find_tasks
from r2sm_jax.predict import main
from r2sm_jax.query import Query
from r2sm_jax.synthetic.scenes.source import SceneSource
from r2sm_jax.tools.records import write_json

QUERY = "the complete shape of the red mug"
COUNT = 11
HEADER = {"weights": "w", "queries": "q", "mask_type": "auto"}


@pytest.fixture
def stub(monkeypatch) -> StubPredictor:
    stub = StubPredictor()
    monkeypatch.setattr(predict, "load_predictor", lambda args: stub)
    return stub


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """Eleven scenes of three sizes, one with more queries than fit in a row; a folder with
    `val.json`.

    Each has a query without a target; some have a region to ignore, or an instance whose complete
    shape is not annotated.
    """
    folder = tmp_path_factory.mktemp("dataset")
    samples = []
    for i in range(COUNT):
        num_queries = 11 if i == 4 else 3
        sample = SceneSource("val", COUNT, size=40 + 24 * (i % 3), queries=num_queries)[i]
        instances = list(sample.instances)
        queries = [*sample.queries, Query(1, "the elephant", "modal", ())]
        if i % 3 == 0:
            corner = np.zeros(sample.image.shape[:2], bool)
            corner[:20, :20] = True
            instances.append(Instance(99, "crowd", corner, None, ignore=True))
        if i in (2, 7):
            instances[0] = replace(instances[0], amodal=None)
            queries.append(Query(2, "the whole thing", "amodal", (instances[0].id,)))
        changes = {"instances": tuple(instances), "queries": tuple(queries)}
        samples.append(replace(sample, image_id=i + 1, **changes))
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
    return json.loads((out / PREDICTIONS).read_text())


def fused(out: Path) -> list[dict]:
    return [entry for entry in entries(out) if entry.get("fused")]


def figures_of_files(report: dict) -> dict:
    """The figures of a split without those that need the mask of the type that was not decided
    for, or the instances that are absent: average precision and recall rank those as well."""
    figures = {name: report[name] for name in ("mask_type", "variants", "breakdowns")}
    for name in ("all", "modal", "amodal"):
        figures[name] = {
            k: v
            for k, v in report[name].items()
            if not k.startswith(("complete_", "ap", "ar", "detections"))
        }
    references = report["references"].items()
    figures["references"] = {k: v for k, v in references if k.startswith("true_")}
    return figures


def test_predictions_score_as_the_run_itself(tiny_run, dataset, tmp_path, command):
    """Predicting and scoring the file gives what evaluating the run gives, to the last digit of
    every figure."""
    run = shutil.copytree(tiny_run, tmp_path / "tiny")
    config = json.loads((run / "config.json").read_text())
    config["model"]["mask_threshold"] = -4.0  # after four steps most masks are empty otherwise
    (run / "config.json").write_text(json.dumps(config))
    flags = "--queries", dataset / "val.json", "--out", tmp_path / "p"
    end = command(main, run, dataset, *flags)
    assert end.code == 0 and f"{COUNT} images answered" in end.out, end

    reports = {}
    sources = {"run": [run], "file": ["--predictions", tmp_path / "p" / PREDICTIONS]}
    for name, arguments in sources.items():
        data = "--data", f"json:{dataset}", "--split", "val", "--out", tmp_path / name
        end = command(evaluate_main, *arguments, *data)
        assert end.code == 0, end.err
        reports[name] = json.loads((tmp_path / name / "report.json").read_text())
    run_meta, file_meta = reports["run"]["meta"], reports["file"]["meta"]
    assert not file_meta["missing"] and run_meta["data_sha256"] == file_meta["data_sha256"]
    ours, theirs = (reports[name]["splits"]["val"] for name in ("run", "file"))
    # Two more queries ask for a shape that is not annotated.
    assert ours["all"]["queries"] == 3 * (COUNT - 1) + 11 + COUNT
    assert ours["all"]["detections"] > 0 and figures_of_files(ours) == figures_of_files(theirs)
    tables = [(tmp_path / name / "queries.csv").read_text() for name in ("run", "file")]
    assert tables[0] == tables[1]


def test_a_folder_gives_what_single_images_give(stub, photos, tmp_path, command):
    end = command(main, "RUN", photos, QUERY, "--out", tmp_path / "p")
    assert end.code == 0 and "wrote" in end.out, end
    answers = fused(tmp_path / "p")
    assert [entry["image"] for entry in answers] == sorted(path.name for path in photos.iterdir())
    assert [entry["query_id"] for entry in answers] == list(range(1, COUNT + 1))
    one = json.loads(command(main, "RUN", photos / answers[3]["image"], QUERY, "--json").out)
    assert answers[3]["segmentation"] == one["mask"] and answers[3]["query"] == one["query"]
    assert answers[3]["mask_type"] == one["mask_type"] == "amodal"


def test_files_hold_present_instances_only(stub, photos, tmp_path, command):
    """One of the stub's two instance slots is present."""
    end = command(main, "RUN", photos, QUERY, "--out", tmp_path / "p")
    assert end.code == 0 and len(fused(tmp_path / "p")) == COUNT
    assert len(entries(tmp_path / "p")) == 2 * COUNT
    predictions = stub.predict_batches(
        [Request(photos / "val_000000.png", [QUERY])], with_candidates=True
    )
    ((prediction,),) = predictions
    assert [c.is_present for c in prediction.candidates] == [True, False]
    stub.config = replace(stub.config, presence_threshold=5.0)
    end = command(main, "RUN", photos, QUERY, "--out", tmp_path / "absent")
    assert len(entries(tmp_path / "absent")) == COUNT


def test_images_of_a_pattern_are_named_below_its_fixed_folders(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (photos / folder).mkdir()
        shutil.copy2(photos / "val_000000.png", photos / folder / "1.png")
    file = tmp_path / "q.txt"
    file.write_text(f"a/1.png\t{QUERY}\nb/1.png\tthe mug\n")
    tasks = find_tasks("photos/**/1.png", None, str(file)).images
    assert [task.name for task in tasks] == ["a/1.png", "b/1.png"]
    assert len(find_tasks("photos/val_00000[0-3].png", QUERY, None).images) == 4


def test_a_text_file_asks_about_every_image_or_about_single_ones(photos, tmp_path):
    file = tmp_path / "queries.txt"
    file.write_text("the red mug\n\nval_000001.png\tthe whole car\nthe cat\n", encoding="utf-8-sig")
    tasks = find_tasks(str(photos), None, str(file)).images
    assert len(tasks) == COUNT
    texts = {task.name: [query.text for query in task.queries] for task in tasks}
    assert texts["val_000000.png"] == ["the red mug", "the cat"]
    assert texts["val_000001.png"] == ["the red mug", "the cat", "the whole car"]
    file.write_text("val_000001.png\tthe whole car\nval_000001.png\tthe car\n")
    (task,) = find_tasks(str(photos), None, str(file)).images
    assert task.path == photos / "val_000001.png" and len(task.queries) == 2


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("the mug\u000bbehind\u2028the\u0085plate\n", ["the mug behind the plate"]),
        ("the mug\r\n\r\nthe cat\r\n", ["the mug", "the cat"]),
        ("the mug\rthe cat", ["the mug", "the cat"]),
        ("\ufeffthe mug\n\ufeffthe  cat \n \n", ["the mug", "the cat"]),
        ("VAL_000001.PNG\tthe mug\n", ["the mug"]),
        ("val_00001.png\tthe mug\n", "did you mean val_000001.png"),
        ("VAL_1\tthe mug\n", "not among"),
        ("../a.png\tthe mug\n", "not among"),
        ("/a.png\tthe mug\n", "not among"),
        ("the cat\n\tthe mug\n", "line 2"),
        ("the cat\nval_000001.png\t\n", "line 2"),
        ("the cat\nval_000001.png\tthe mug\t1\n", "line 2"),
        ("the cat\n...\n", "line 2"),
        ("the cat\n\nt\0h\0e\0", "line 3"),
        ('{"query": "the mug"}\n', "line 1"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:4d\n", "git lfs pull"),
    ],
)
def test_lines_of_a_query_file_are_read_as_they_are_or_refused(content, texts, dataset, tmp_path):
    file = tmp_path / "queries.txt"
    file.write_bytes(content.encode())
    image = str(dataset / "val_000001.png")
    if isinstance(texts, str):
        with pytest.raises(InputError, match=texts):
            find_tasks(image, None, str(file))
    else:
        (task,) = find_tasks(image, None, str(file)).images
        assert [query.text for query in task.queries] == texts


def test_files_of_a_folder_are_read_or_named(stub, photos, tmp_path, command):
    image = Image.open(photos / "val_000000.png")
    for name in ("a.JPG", "a.jpe", "a.jfif"):
        image.save(photos / name, "JPEG")
    (photos / "._a.jpg").write_bytes(b"\0\5\x16")  # macOS keeps attributes in such files
    (photos / "b.heic").write_bytes(b"\0")
    (photos / "notes.txt").write_text("mine")
    (photos / "more").mkdir()
    end = command(main, "RUN", photos, QUERY, "--out", tmp_path / "p")
    assert end.code == 0 and "0 not readable" in end.out
    names = {entry["image"] for entry in entries(tmp_path / "p")}
    assert len(names) == COUNT + 3 and {"a.JPG", "a.jpe", "a.jfif"} < names
    assert "skipped 3" in end.err and "b.heic, more/, notes.txt" in end.err


def test_the_default_folder_is_named_after_the_images(stub, photos, command, monkeypatch):
    versioned = photos.rename(photos.with_name("shots.v2"))
    monkeypatch.chdir(versioned)
    assert command(main, "RUN", ".", QUERY).code == 0
    assert entries(versioned / "predictions" / "shots.v2")


def test_another_sentence_about_a_folder_is_answered_beside_the_first(
    stub, photos, command, monkeypatch
):
    monkeypatch.chdir(photos.parent)
    for _ in range(2):  # the second call goes on with what the first left
        assert command(main, "RUN", "photos", QUERY).code == 0
    assert command(main, "RUN", "photos", "the cat").code == 0
    queries = {path: fused(path)[0]["query"] for path in Path("predictions").iterdir()}
    assert sorted(queries.values()) == sorted([QUERY, "the cat"])
    assert queries[Path("predictions/photos")] == QUERY


def test_answers_of_a_folder_can_be_drawn_later_too(stub, photos, tmp_path, command):
    (tmp_path / "q.txt").write_text(f"{QUERY} on the table\n{QUERY} on the tray\n")
    flags = "--queries", tmp_path / "q.txt", "--out", tmp_path / "p"
    assert command(main, "RUN", photos, *flags).code == 0
    before = (tmp_path / "p" / PREDICTIONS).read_bytes()
    assert command(main, "RUN", photos, *flags, "--overlays").code == 0
    assert (tmp_path / "p" / PREDICTIONS).read_bytes() == before
    pictures = sorted((tmp_path / "p" / "overlays").iterdir())
    assert len(pictures) == 2 * COUNT  # although both sentences begin alike
    sizes = [Image.open(path).size for path in pictures]
    assert all(size[1] > Image.open(photos / "val_000000.png").height for size in sizes)
    pictures[3].unlink()
    end = command(main, "RUN", photos, *flags, "--overlays")
    assert "1 images answered" in end.out
    assert pictures[3].exists() and (tmp_path / "p" / PREDICTIONS).read_bytes() == before


def test_a_bad_image_is_named_and_the_others_are_predicted(stub, photos, tmp_path, command):
    (photos / "val_000002.png").write_text("no image")
    whole = (photos / "val_000005.png").read_bytes()
    (photos / "val_000005.png").write_bytes(whole[: len(whole) // 2])
    end = command(main, "RUN", photos, QUERY, "--out", tmp_path / "p")
    reasons = [line for line in end.err.splitlines() if line.startswith("not answered: ")]
    assert end.code == 0 and "9 images answered" in end.out and "2 not readable" in end.out
    assert len(reasons) == 2 and "val_000002.png" in reasons[0] and len(fused(tmp_path / "p")) == 9
    (photos / "val_000005.png").write_bytes(whole)
    end = command(main, "RUN", photos, QUERY, "--out", tmp_path / "p")
    assert "1 images answered, 9 answered earlier, 1 not readable" in end.out
    assert len(fused(tmp_path / "p")) == 10


def test_a_stopped_call_goes_on_without_repeating(stub, photos, tmp_path, monkeypatch):
    tasks = find_tasks(str(photos), QUERY, None)
    predict_images(stub, tasks, tmp_path / "whole")
    opened = []

    def stop_in_the_second_part(path, size):
        if len(opened) == batch.BATCH_ROWS:
            raise KeyboardInterrupt
        opened.append(path)
        return np.asarray(Image.open(path))

    with monkeypatch.context() as patch:
        patch.setattr(batch, "read_image", stop_in_the_second_part)
        with pytest.raises(KeyboardInterrupt):
            predict_images(stub, tasks, tmp_path / "parts")
    assert not (tmp_path / "parts" / PREDICTIONS).exists()
    result = predict_images(stub, tasks, tmp_path / "parts")
    assert result[:2] == (COUNT - batch.BATCH_ROWS, batch.BATCH_ROWS)
    whole = (tmp_path / "whole" / PREDICTIONS).read_bytes()
    assert (tmp_path / "parts" / PREDICTIONS).read_bytes() == whole
    assert predict_images(stub, tasks, tmp_path / "parts").num_predicted == 0
    assert (tmp_path / "parts" / PREDICTIONS).read_bytes() == whole


def test_a_call_that_the_model_stops_keeps_the_answers_before(stub, photos, tmp_path, monkeypatch):
    """Threads answer a part while the model computes the next one, and are waited for."""
    tasks = find_tasks(str(photos), QUERY, None)
    predict_logits = stub.predict_logits
    parts = []

    def stop_in_the_second_part(images, queries):
        parts.append(len(images))
        if len(parts) == 2:
            raise MemoryError
        return predict_logits(images, queries)

    with monkeypatch.context() as patch:
        patch.setattr(stub, "predict_logits", stop_in_the_second_part)
        with pytest.raises(MemoryError):
            predict_images(stub, tasks, tmp_path)
    assert predict_images(stub, tasks, tmp_path)[:2] == (COUNT - parts[0], parts[0])


def test_an_answer_that_cannot_be_made_stops_the_call_and_is_not_written(
    stub, photos, tmp_path, monkeypatch
):
    """The answers before it are, each of them once."""
    tasks = find_tasks(str(photos), QUERY, None)
    answer = batch._answer

    def fail_at_the_third(predictor, task, *rest):
        if task.name == tasks.images[2].name:
            raise InputError("no room")
        return answer(predictor, task, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(batch, "_answer", fail_at_the_third)
        with pytest.raises(InputError, match="no room"):
            predict_images(stub, tasks, tmp_path)
    lines = (tmp_path / JOURNAL).read_text().splitlines()[1:]
    assert [json.loads(line)["image"] for line in lines] == [t.name for t in tasks.images[:2]]
    assert predict_images(stub, tasks, tmp_path)[:2] == (COUNT - 2, 2)
    assert len(fused(tmp_path)) == COUNT


@pytest.mark.parametrize(("num_lines", "num_cut"), [(6, 20), (COUNT + 1, 1), (1, 10)])
def test_a_line_that_was_cut_short_is_predicted_again(num_lines, num_cut, stub, photos, tmp_path):
    tasks = find_tasks(str(photos), QUERY, None)
    predict_images(stub, tasks, tmp_path)
    predictions = (tmp_path / PREDICTIONS).read_bytes()
    journal = tmp_path / JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:num_lines])[:-num_cut])
    result = predict_images(stub, tasks, tmp_path)
    assert result.num_earlier + result.num_predicted == COUNT and result.num_predicted > 0
    assert (tmp_path / PREDICTIONS).read_bytes() == predictions


def test_answers_of_something_else_are_kept_apart(stub, photos, tmp_path):
    image = str(photos / "val_000000.png")
    tasks = find_tasks(image, QUERY, None)
    predict_images(stub, tasks, tmp_path / "p")
    before = (tmp_path / "p" / PREDICTIONS).read_bytes()
    other = find_tasks(image, "the cat", None)
    with pytest.raises(InputError, match=r"of other queries; .*--overwrite"):
        predict_images(stub, other, tmp_path / "p")
    with pytest.raises(InputError, match="of other mask type"):
        predict_images(stub, tasks, tmp_path / "p", mask_type="amodal")
    shutil.copytree(photos, tmp_path / "else" / "photos")
    elsewhere = find_tasks(str(tmp_path / "else" / "photos" / "val_000000.png"), QUERY, None)
    with pytest.raises(InputError, match="of other images"):
        predict_images(stub, elsewhere, tmp_path / "p")
    assert (tmp_path / "p" / PREDICTIONS).read_bytes() == before
    predict_images(stub, other, tmp_path / "p", overwrite=True)
    assert fused(tmp_path / "p")[0]["query"] == "the cat"


def test_files_of_others_are_left_alone(stub, photos, tmp_path):
    tasks = find_tasks(str(photos), QUERY, None)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / PREDICTIONS).write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        predict_images(stub, tasks, tmp_path / "mine")
    assert (tmp_path / "mine" / PREDICTIONS).read_text() == "mine"

    (tmp_path / "p").mkdir()
    for name in ("answers-mine.jsonl", "answers_mine.jsonl"):
        (tmp_path / "p" / name).write_text("mine")
    predict_images(stub, tasks, tmp_path / "p", overwrite=True)
    assert (tmp_path / "p" / "answers-mine.jsonl").read_text() == "mine"
    assert (tmp_path / "p" / "answers_mine.jsonl").read_text() == "mine"


@pytest.mark.parametrize(
    "content", [b"my notes", b"my notes\nand more", b'{"image": "a"}\n{"im', b"[]\n"]
)
def test_a_file_that_is_no_journal_is_left_as_it_is(tmp_path, content):
    (tmp_path / JOURNAL).write_bytes(content)
    with pytest.raises(InputError, match=JOURNAL):
        read_journal(tmp_path / JOURNAL, HEADER)
    assert (tmp_path / JOURNAL).read_bytes() == content


@pytest.fixture(scope="module")
def query_files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("queries")
    (folder / "empty").mkdir()
    (folder / "bad").mkdir()
    (folder / "bad" / "a.png").write_text("no image")
    (folder / "q.txt").write_text("missing.png\tthe mug\n")
    (folder / "latin.txt").write_bytes("das gr\xfcne Auto".encode("latin-1"))
    (folder / "void.txt").write_text("\n \n")
    (folder / "table.csv").write_text("a.png,the mug\n")
    (folder / "odd.json").write_text("[1, 2")
    nothing = {"images": [], "annotations": [], "categories": [], "queries": []}
    (folder / "nothing.json").write_text(json.dumps(nothing))
    return folder


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["PHOTOS", QUERY, "--queries", "FILES/q.txt"], "--queries"),
        (["PHOTOS", QUERY, "--json"], "--json"),
        (["FILES/empty", QUERY], "empty"),
        (["FILES/bad", QUERY], "a.png"),
        (["PHOTOS/*.jpg", QUERY], "*.jpg"),
        (["PHOTOS", "--queries", "FILES/none.txt"], "none.txt"),
        (["PHOTOS", "--queries", "FILES/empty"], "empty"),
        (["PHOTOS", "--queries", "FILES/latin.txt"], "UTF-8"),
        (["PHOTOS", "--queries", "FILES/void.txt"], "void.txt"),
        (["PHOTOS", "--queries", "FILES/table.csv"], "tab"),
        (["PHOTOS", "--queries", "FILES/q.txt"], "missing.png"),
        (["PHOTOS", "--queries", "FILES/odd.json"], "odd.json"),
        (["PHOTOS", "--queries", "FILES/nothing.json"], "no queries"),
        (["PHOTOS/val_000000.png", "--queries", "FILES/nothing.json"], "folder"),
        (["PHOTOS", QUERY, "--out", "FILES/q.txt"], "q.txt"),
    ],
)
def test_refusals(arguments, word, stub, dataset, query_files, tmp_path, refused):
    words = [a.replace("PHOTOS", str(dataset)) for a in arguments]
    words = [a.replace("FILES", str(query_files)) for a in words]
    if "--out" not in words:
        words += ["--out", str(tmp_path / "out")]
    assert word in refused(main, "RUN", *words)
    assert not (tmp_path / "out" / PREDICTIONS).exists()


def test_a_file_name_that_is_no_text(stub, photos, tmp_path, command):
    try:
        shutil.copy2(photos / "val_000000.png", os.fsencode(photos) + b"/caf\xe9.png")
    except OSError:
        pytest.skip("this file system has no such names")
    assert command(main, "RUN", photos, QUERY, "--out", tmp_path / "p").code == 0
    assert len({entry["image"] for entry in entries(tmp_path / "p")}) == COUNT + 1


@pytest.mark.slow
def test_a_killed_process_is_resumed(tiny_run, photos, tmp_path):
    """SIGKILL, wherever it strikes: the second call ends with the answers of an undisturbed one."""
    program = [sys.executable, "-m", "r2sm_jax.predict", str(tiny_run), str(photos), QUERY, "--out"]
    killed = [*program, str(tmp_path / "killed")]
    process = subprocess.Popen(killed, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal = tmp_path / "killed" / JOURNAL
    while process.poll() is None and not (journal.exists() and journal.stat().st_size > 400):
        time.sleep(0.01)
    process.kill()
    process.wait()
    subprocess.run(killed, check=True, capture_output=True)
    subprocess.run([*program, str(tmp_path / "whole")], check=True, capture_output=True)
    assert entries(tmp_path / "killed") == entries(tmp_path / "whole")
