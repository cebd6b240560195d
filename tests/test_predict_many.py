"""`predict` for many images: what is asked, the files of answers, and what is not asked again. A
stub stands for the model."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO
from sample_records import to_records
from stub_predictor import StubPredictor

from r2sm_jax import predict
from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Instance, read_json, write_records
from r2sm_jax.errors import InputError
from r2sm_jax.evaluate import main as evaluate_main
from r2sm_jax.inference.many import PREDICTIONS, find_tasks, predict_images
from r2sm_jax.predict import main
from r2sm_jax.query import Query
from r2sm_jax.synthetic.scenes.source import SceneSource

QUERY = "the complete shape of the red mug"
COUNT = 11


@pytest.fixture
def stub(monkeypatch) -> StubPredictor:
    stub = StubPredictor()
    monkeypatch.setattr(predict, "load_run", lambda *_, **__: SimpleNamespace(predictor=stub))
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
    write_records(folder / "val.json", to_records(samples))
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


# What is asked.


def test_predictions_score_as_the_run_itself(tiny_run, dataset, tmp_path, command):
    """Predicting a data set and scoring the file gives what evaluating the run gives, to the last
    digit of every figure, average precision, references and presence among them."""
    run = shutil.copytree(tiny_run, tmp_path / "tiny")
    config = json.loads((run / "config.json").read_text())
    # After four steps most masks are empty otherwise.
    config["config"]["model"]["mask_threshold"] = -4.0
    (run / "config.json").write_text(json.dumps(config))
    end = command(main, run, dataset / "val.json", "--out", tmp_path / "p")
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
    ours = reports["run"]["splits"]["val"]
    assert ours == reports["file"]["splits"]["val"]
    assert reports["run"]["presence"] == reports["file"]["presence"]
    assert reports["run"]["presence"]["queries"] > 0
    assert ours["references"]["oracle_type"]["giou"] is not None
    # Two more queries ask for a shape that is not annotated.
    assert ours["all"]["queries"] == 3 * (COUNT - 1) + 11 + COUNT
    assert ours["all"]["detections"] > 0
    tables = []
    for name in ("run", "file"):
        with (tmp_path / name / "queries.csv").open() as table:
            # Which images a system has seen is known of a run alone.
            tables.append([row | {"seen": ""} for row in csv.DictReader(table)])
    assert tables[0] == tables[1]


def test_a_folder_gives_what_single_images_give(stub, photos, tmp_path, command):
    """One of the stub's two instance slots is present; the other one is ranked only."""
    end = command(main, "RUN", photos, QUERY, "--out", tmp_path / "p")
    assert end.code == 0 and "wrote" in end.out, end
    answers = fused(tmp_path / "p")
    assert [entry["image"] for entry in answers] == sorted(path.name for path in photos.iterdir())
    assert [entry["query_id"] for entry in answers] == list(range(1, COUNT + 1))
    present = [entry.get("present", True) for entry in entries(tmp_path / "p")]
    assert present == COUNT * [True, True, False]
    one = json.loads(command(main, "RUN", photos / answers[3]["image"], QUERY, "--json").out)
    assert answers[3]["segmentation"] == one["mask"] and answers[3]["query"] == one["query"]
    assert answers[3]["mask_type"] == one["mask_type"] == "amodal"


def test_the_objects_of_all_answers_as_coco_instances(stub, dataset, tmp_path, command):
    """pycocotools and this package's readers open the file; a second run, which asks nothing,
    writes the same one. An object has both masks, its score, and its query as category."""
    arguments = "RUN", dataset / "val.json", "--out", tmp_path / "p", "--coco"
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        assert command(main, *arguments, file).code == 0
    assert files[0].read_bytes() == files[1].read_bytes()

    coco = COCO(files[0])
    truth = read_json(dataset / "val.json")
    assert sorted(coco.getImgIds()) == sorted(truth.image_ids)
    names = {category["name"] for category in coco.loadCats(coco.getCatIds())}
    texts = [query.text for index in range(COUNT) for query in truth.queries_at(index)]
    assert names == set(texts)
    assert len(coco.anns) == len(texts)  # one of the stub's two slots is present
    sample = read_json(files[0], dataset)[3]
    one = json.loads(command(main, "RUN", truth.image_path(3), texts[9], "--json").out)
    assert masks.encode(sample.instances[0].complete) == one["instances"][0]["amodal"]
    assert coco.anns[1]["score"] > 0 and "presence" in coco.anns[1]
    assert "source_id" not in coco.anns[1]

    joined: dict[str, dict] = {"images": {}, "annotations": {}, "categories": {}}
    for number in (1, 2):
        part = tmp_path / f"{number}.json"
        assert command(main, *arguments, part, "--shard", f"{number}/2").code == 0
        for key, records in joined.items():
            new = {record["id"]: record for record in json.loads(part.read_text())[key]}
            assert key == "categories" or not new.keys() & records.keys()
            records |= new
    assert joined["categories"] == coco.cats and joined["images"] == coco.imgs
    assert len(joined["annotations"]) == len(coco.anns)

    end = command(main, *arguments, files[0])
    assert end.code == 2 and "a.json" in end.err
    end = command(main, "RUN", truth.image_path(0), "the mug", "--coco", tmp_path / "c.json")
    assert end.code == 2 and "--coco is for a folder" in end.err


def test_a_data_set_asks_its_queries_wherever_its_images_lie(dataset, photos):
    (own, named) = (
        find_tasks(str(dataset / "val.json"), (), None),
        find_tasks(str(photos), (), str(dataset / "val.json")),
    )
    assert [task.queries for task in own] == [task.queries for task in named]
    assert own[0].path.parent == dataset and named[0].path.parent == photos
    assert own[4].size == Image.open(own[4].path).size[::-1] and len(own[4].queries) == 12


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("the red mug\n\nval_000001.png\tthe whole car\nthe cat\n", {0: 2, 1: 3, 2: 2}),
        ("val_000001.png\tthe whole car\nval_000001.png\tthe car\n", {1: 2}),
        ("the mug\u000bbehind\u2028the\u0085plate\n", {0: 1, 1: 1}),
        ("\ufeffthe mug\r\n\ufeffthe  cat \n \n", {0: 2, 1: 2}),
        ("val_00001.png\tthe mug\n", "line 1"),
        ("../a.png\tthe mug\n", "line 1"),
        ("the cat\n\tthe mug\n", "line 2"),
        ("the cat\nval_000001.png\t\n", "line 2"),
        ("the cat\nval_000001.png\tthe mug\t1\n", "line 2"),
        ("the cat\n...\n", "line 2"),
        ('{"query": "the mug"}\n', "line 1"),
    ],
)
def test_lines_of_a_query_file_are_read_as_they_are_or_refused(content, texts, photos, tmp_path):
    file = tmp_path / "queries.txt"
    file.write_bytes(content.encode())
    if isinstance(texts, str):
        with pytest.raises(InputError, match=texts):
            find_tasks(str(photos), (), str(file))
        return
    tasks = find_tasks(str(photos), (), str(file))
    counts = {task.name: len(task.queries) for task in tasks}
    assert len(counts) == (COUNT if 0 in texts else 1)
    assert all(counts[f"val_{number:06}.png"] == count for number, count in texts.items())
    numbers = [number for task in tasks for number, _ in task.queries]
    assert numbers == list(range(1, len(numbers) + 1))
    assert all(text == " ".join(text.split()) for task in tasks for _, text in task.queries)


def test_files_of_a_folder_are_read_or_named(stub, photos, tmp_path, command):
    image = Image.open(photos / "val_000000.png")
    for name in ("a.JPG", "a.jpe", "a.jfif"):
        image.save(photos / name, "JPEG")
    (photos / "._a.jpg").write_bytes(b"\0\5\x16")  # macOS keeps attributes in such files
    (photos / "b.heic").write_bytes(b"\0")
    (photos / "more").mkdir()
    end = command(main, "RUN", photos, QUERY, "--out", tmp_path / "p")
    assert end.code == 0 and "0 not readable" in end.out
    names = {entry["image"] for entry in entries(tmp_path / "p")}
    assert len(names) == COUNT + 3 and {"a.JPG", "a.jpe", "a.jfif"} < names
    assert "b.heic, more/" in end.err


# What is written, and not asked again.


def test_each_sentence_about_a_folder_has_a_default_folder(stub, photos, command, monkeypatch):
    monkeypatch.chdir(photos)
    for query in (QUERY, "the cat"):
        assert command(main, "RUN", ".", query).code == 0
    queries = {path.name: fused(path)[0]["query"] for path in Path("predictions/photos").iterdir()}
    assert queries == {"the-complete-shape-of-the-red-mug": QUERY, "the-cat": "the cat"}


def test_answers_of_a_folder_can_be_drawn_later_too(stub, photos, tmp_path, command):
    (tmp_path / "q.txt").write_text(f"{QUERY} on the table\n{QUERY} on the tray\n")
    flags = "--queries", tmp_path / "q.txt", "--out", tmp_path / "p"
    assert command(main, "RUN", photos, *flags).code == 0
    before = (tmp_path / "p" / PREDICTIONS).read_bytes()
    assert command(main, "RUN", photos, *flags, "--overlays").code == 0
    pictures = sorted((tmp_path / "p" / "overlays").iterdir())
    assert len(pictures) == 2 * COUNT  # although both sentences begin alike
    pictures[3].unlink()
    end = command(main, "RUN", photos, *flags, "--overlays")
    assert "1 images answered" in end.out and pictures[3].exists()
    assert (tmp_path / "p" / PREDICTIONS).read_bytes() == before


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


def test_a_photo_that_was_replaced_is_answered_anew(stub, photos, tmp_path):
    """And what is asked is what is written."""
    tasks = find_tasks(str(photos), [QUERY], None)
    predict_images(stub, tasks, tmp_path)
    before = fused(tmp_path)
    Image.new("RGB", (30, 20), "white").save(photos / "val_000003.png")
    assert predict_images(stub, tasks, tmp_path).num_answered == 1
    changed = [a != b for a, b in zip(before, fused(tmp_path), strict=True)]
    assert [i for i, is_other in enumerate(changed) if is_other] == [3]
    assert predict_images(stub, tasks[:2], tmp_path).num_answered == 0
    assert len(fused(tmp_path)) == 2


def test_several_sentences_are_asked_about_an_image(stub, photos, tmp_path, command):
    image = photos / "val_000000.png"
    assert command(main, "RUN", image, QUERY, "the cat", "--out", tmp_path / "one").code == 0
    assert [entry["query"] for entry in fused(tmp_path / "one")] == [QUERY, "the cat"]


def test_a_stopped_call_goes_on_without_repeating(stub, photos, tmp_path, monkeypatch):
    """Threads answer a batch while the model computes the next one, and are waited for."""
    tasks = find_tasks(str(photos), [QUERY], None)
    predict_images(stub, tasks, tmp_path / "whole")
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
            predict_images(stub, tasks, tmp_path / "parts")
    assert not (tmp_path / "parts" / PREDICTIONS).exists()
    assert predict_images(stub, tasks, tmp_path / "parts")[:2] == (COUNT - parts[0], parts[0])
    whole = (tmp_path / "whole" / PREDICTIONS).read_bytes()
    assert (tmp_path / "parts" / PREDICTIONS).read_bytes() == whole


def test_shards_answer_what_one_call_answers(stub, photos, tmp_path, command):
    assert command(main, "RUN", photos, QUERY, "--out", tmp_path / "one").code == 0
    joined = []
    for number in (1, 2, 3):
        flags = "--out", tmp_path / "p", "--shard", f"{number}/3"
        assert command(main, "RUN", photos, QUERY, *flags).code == 0
        joined += json.loads((tmp_path / "p" / f"predictions-{number}-of-3.json").read_text())
    assert sorted(map(json.dumps, joined)) == sorted(map(json.dumps, entries(tmp_path / "one")))
    end = command(main, "RUN", photos, QUERY, "--out", tmp_path / "p")
    assert f"0 images answered, {COUNT} answered earlier" in end.out
    assert entries(tmp_path / "p") == entries(tmp_path / "one")
    # There may be more shards than images.
    flags = "--out", tmp_path / "p", "--shard", "99/99", "--coco", tmp_path / "found.json"
    end = command(main, "RUN", photos, QUERY, *flags)
    assert end.code == 0 and "0 images answered" in end.out, end
    assert json.loads((tmp_path / "p" / "predictions-99-of-99.json").read_text()) == []
    assert json.loads((tmp_path / "found.json").read_text())["annotations"] == []


def test_answers_of_something_else_are_refused(stub, photos, tmp_path):
    tasks = find_tasks(str(photos / "val_000000.png"), [QUERY], None)
    predict_images(stub, tasks, tmp_path / "p")
    before = (tmp_path / "p" / PREDICTIONS).read_bytes()
    other = find_tasks(str(photos / "val_000000.png"), ["the cat"], None)
    with pytest.raises(InputError, match=r"answer to other .*--overwrite"):
        predict_images(stub, other, tmp_path / "p")
    with pytest.raises(InputError, match="answers are of another"):
        predict_images(stub, tasks, tmp_path / "p", mask_type="amodal")
    assert (tmp_path / "p" / PREDICTIONS).read_bytes() == before
    predict_images(stub, other, tmp_path / "p", overwrite=True)
    assert fused(tmp_path / "p")[0]["query"] == "the cat"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / PREDICTIONS).write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        predict_images(stub, tasks, tmp_path / "mine")
    assert (tmp_path / "mine" / PREDICTIONS).read_text() == "mine"


@pytest.fixture(scope="module")
def query_files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("queries")
    (folder / "empty").mkdir()
    (folder / "bad").mkdir()
    (folder / "bad" / "a.png").write_text("no image")
    (folder / "q.txt").write_text("missing.png\tthe mug\n")
    (folder / "latin.txt").write_bytes("das gr\xfcne Auto".encode("latin-1"))
    (folder / "void.txt").write_text("\n \n")
    (folder / "commas.txt").write_text("a.png,the mug\n")
    (folder / "table.csv").write_text("a.png,the mug\n")
    (folder / "odd.json").write_text("[1, 2")
    nothing = {"images": [], "annotations": [], "categories": [], "queries": []}
    (folder / "nothing.json").write_text(json.dumps(nothing))
    return folder


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["PHOTOS", QUERY, "--queries", "FILES/q.txt"], "leave out '"),
        (["FILES/nothing.json", QUERY], "leave out '"),
        (["PHOTOS", QUERY, "--json"], "--json"),
        (["PHOTOS", QUERY, "--mask", "FILES/bad/a.png"], "--mask"),
        (["PHOTOS", QUERY, "--box", "1", "2", "3", "4"], "--box"),
        (["PHOTOS", QUERY, "--others", "FILES/q.txt", "--finder", "FILES"], "--others"),
        (["PHOTOS", QUERY, "--shard", "2"], "--shard"),
        (["PHOTOS"], "no query"),
        (["PHOTOS", "the", "mug"], "the mug: put a sentence into quotes"),
        (["FILES/empty", QUERY], "empty"),
        (["FILES/bad", QUERY], "a.png"),
        (["PHOTOS/*.jpg", QUERY], "*.jpg"),
        (["PHOTOS", "--queries", "FILES/latin.txt"], "UTF-8"),
        (["FILES/bad", "--queries", "FILES/commas.txt"], "commas.txt: line 1: a.png is an image"),
        (["PHOTOS", "--queries", "FILES/void.txt"], "no queries"),
        (["PHOTOS", "--queries", "FILES/table.csv"], "tab"),
        (["PHOTOS", "--queries", "FILES/q.txt"], "missing.png"),
        (["PHOTOS", "--queries", "FILES/odd.json"], "odd.json"),
        (["PHOTOS", "--queries", "FILES/nothing.json"], "no queries"),
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
