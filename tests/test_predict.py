import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import r2sm_jax
from r2sm_jax import predict as predict_module
from r2sm_jax.data import masks
from r2sm_jax.data.sources import open_source
from r2sm_jax.errors import InputError
from r2sm_jax.inference.prediction import FILES
from r2sm_jax.predict import main

QUERY = "the complete shape of the red mug"
HEIGHT, WIDTH = 45, 61


@pytest.fixture(scope="module")
def photo(tmp_path_factory) -> Path:
    """A scene, cut to an odd size."""
    path = tmp_path_factory.mktemp("images") / "photo.png"
    Image.fromarray(open_source("scenes", "val", count=1)[0].image[:HEIGHT, :WIDTH]).save(path)
    return path


@pytest.fixture(scope="module", autouse=True)
def one_predictor(tiny_run):
    """Opens the run once for this whole file."""
    patch, opened, open_run = pytest.MonkeyPatch(), {}, predict_module.open_run

    def remembered(folder, *, checkpoint="best", matmul_precision="float32"):
        key = str(folder), checkpoint
        if key not in opened:
            opened[key] = open_run(folder, checkpoint=checkpoint)
        return opened[key]

    patch.setattr(predict_module, "open_run", remembered)
    yield
    patch.undo()


def picture(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def test_all_files_are_written_at_the_original_resolution(tiny_run, photo, tmp_path, command):
    end = command(main, tiny_run, photo, QUERY, "--out", tmp_path / "new" / "folder")
    assert (
        end.code == 0
        and QUERY in end.out
        and "probability of amodal" in end.out
        and "wrote" in end.out
    )
    folder = tmp_path / "new" / "folder"
    assert sorted(p.name for p in folder.iterdir()) == sorted(FILES)
    found = {
        name: picture(folder / f"{name}.png") for name in ("mask", "modal", "amodal", "occluded")
    }
    for mask in found.values():
        assert (
            mask.shape == (HEIGHT, WIDTH)
            and mask.dtype == np.uint8
            and set(np.unique(mask)) <= {0, 255}
        )
    assert ((found["modal"] | found["occluded"]) == found["amodal"]).all()
    assert not (found["modal"] & found["occluded"]).any()
    assert picture(folder / "overlay.png").shape == (HEIGHT, WIDTH, 3)
    answer = json.loads((folder / "prediction.json").read_text())
    assert np.array_equal(masks.decode(answer["mask"]), found["mask"] > 0)
    assert np.array_equal(found["mask"], found[answer["mask_type"]])


def test_json_prints_one_object_and_writes_nothing(tiny_run, photo, tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    end = command(main, tiny_run, photo, QUERY, "--json")
    answer = json.loads(end.out)
    assert end.code == 0 and list(tmp_path.iterdir()) == []
    assert list(answer) == [
        "query",
        "mask_type",
        "amodal_probability",
        "score",
        "presence",
        "mask",
        "modal",
        "amodal",
        "occluded",
        "instances",
        "size",
    ]
    assert answer["query"] == QUERY and answer["size"] == [HEIGHT, WIDTH]
    assert answer["mask_type"] == ("amodal" if answer["amodal_probability"] > 0.5 else "modal")
    assert 0 <= answer["amodal_probability"] <= 1 and 0 <= answer["score"] <= 1
    decoded = {name: masks.decode(answer[name]) for name in ("mask", "modal", "amodal", "occluded")}
    assert all(mask.shape == (HEIGHT, WIDTH) for mask in decoded.values())
    assert np.array_equal(decoded["modal"] | decoded["occluded"], decoded["amodal"])
    for instance in answer["instances"]:
        assert 0.5 <= instance["score"] <= 1 and masks.decode(instance["mask"]).any()


def test_json_and_files_are_the_same_answer(tiny_run, photo, tmp_path, command):
    end = command(main, tiny_run, photo, QUERY, "--json", "--out", tmp_path / "both")
    assert json.loads(end.out) == json.loads((tmp_path / "both" / "prediction.json").read_text())


def test_without_out_the_folder_has_the_name_of_the_image(
    tiny_run, photo, tmp_path, command, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    end = command(main, tiny_run, photo, QUERY)
    assert end.code == 0 and (tmp_path / "predictions" / "photo" / "mask.png").exists()


@pytest.mark.parametrize("mask_type", ["modal", "amodal"])
def test_the_mask_type_can_be_forced(mask_type, tiny_run, photo, command):
    answer = json.loads(
        command(main, tiny_run, photo, QUERY, "--mask-type", mask_type, "--json").out
    )
    assert answer["mask_type"] == mask_type and answer["mask"] == answer[mask_type]
    assert all(instance["mask"] == instance[mask_type] for instance in answer["instances"])


def test_the_image_may_be_anything_that_people_have(tiny_run, photo, tmp_path, command):
    image = Image.open(photo).convert("RGB")
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera was held upright
    image.rotate(90, expand=True).save(tmp_path / "exif.png", exif=turned)
    image.save(tmp_path / "a.jpg")
    image.save(tmp_path / "a.webp", lossless=True)
    image.convert("L").save(tmp_path / "grey.png")
    image.quantize(16).save(tmp_path / "palette.png")
    image.convert("RGBA").save(tmp_path / "alpha.png")
    answers = {}
    for path in (photo, *sorted(tmp_path.iterdir())):
        end = command(main, tiny_run, path, QUERY, "--json")
        assert end.code == 0, (path, end.err)
        answers[path.name] = json.loads(end.out)
        assert answers[path.name]["size"] == [HEIGHT, WIDTH], path
    for same in ("exif.png", "a.webp", "alpha.png"):
        assert answers[same] == answers["photo.png"], same


def test_nothing_is_overwritten_unasked(tiny_run, photo, tmp_path, command, refused):
    (tmp_path / "modal.png").write_text("mine")
    message = refused(main, tiny_run, photo, QUERY, "--out", tmp_path)
    assert "modal.png" in message and "--overwrite" in message
    assert [p.name for p in tmp_path.iterdir()] == ["modal.png"] and (
        tmp_path / "modal.png"
    ).read_text() == "mine"
    assert command(main, tiny_run, photo, QUERY, "--out", tmp_path, "--overwrite").code == 0
    assert picture(tmp_path / "modal.png").shape == (HEIGHT, WIDTH)


def test_a_query_beyond_the_limit_is_answered_with_a_warning_of_what_was_cut(
    tiny_run, photo, command
):
    long = "the red mug behind the book " * 5 + "with all of its hidden parts"
    end = command(main, tiny_run, photo, long, "--json")
    assert end.code == 0 and json.loads(end.out)["query"] == long
    warning = next(line for line in end.err.splitlines() if line.startswith("warning: "))
    assert "longer than 24 tokens" in warning and "with all of its hidden parts" in warning
    assert "warning" not in command(main, tiny_run, photo, "the red mug", "--json").err


def test_ten_thousand_words_are_cut_and_said_once(tiny_run, photo, command):
    end = command(main, tiny_run, photo, "the red mug " * 3333 + "end", "--json")
    assert end.code == 0 and len(end.err) < 1000 and end.err.count("longer than 24 tokens") == 1, (
        end.err
    )


def test_a_pattern_that_the_shell_expanded_is_told(tiny_run, photo, refused):
    message = refused(main, tiny_run, photo, photo, photo, QUERY)
    assert "too many arguments" in message and "quotes" in message


@pytest.mark.parametrize("query", ["", "  ", "\n"])
def test_an_empty_query_is_refused(query, tiny_run, photo, refused):
    assert "the query is empty" in refused(main, tiny_run, photo, query)


def huge_png(path: Path) -> None:
    Image.new("1", (10_000, 10_000)).save(path)


@pytest.mark.parametrize(
    ("name", "make", "reason"),
    [
        ("missing.png", lambda path: None, "no such image"),
        ("empty.png", lambda path: path.write_bytes(b""), "empty"),
        ("text.png", lambda path: path.write_text("hello"), "not an image"),
        ("huge.png", huge_png, "megapixels"),
    ],
)
def test_bad_images_are_one_sentence(name, make, reason, tiny_run, tmp_path, refused):
    make(tmp_path / name)
    message = refused(main, tiny_run, tmp_path / name, QUERY)
    assert name in message and reason in message


def test_a_truncated_image_is_one_sentence(tiny_run, photo, tmp_path, refused):
    whole = photo.read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    assert "damaged or cut short" in refused(main, tiny_run, tmp_path / "cut.png", QUERY)


def test_a_folder_that_is_no_run_is_one_sentence(photo, tmp_path, refused):
    assert "no such run folder" in refused(main, tmp_path / "nowhere", photo, QUERY)
    assert "config.json is missing" in refused(main, tmp_path, photo, QUERY)


def test_a_folder_that_cannot_be_written_is_one_sentence(tiny_run, photo, tmp_path, refused):
    (tmp_path / "file").write_text("")
    assert "cannot write there" in refused(
        main, tiny_run, photo, QUERY, "--out", tmp_path / "file" / "out"
    )


def test_python_gives_the_same_answer_for_many_queries_as_for_one(tiny_run, photo):
    predictor = r2sm_jax.load(tiny_run)
    predictor.set_image(photo)
    queries = [f"{QUERY} {'really ' * i}".strip() for i in range(11)]
    together = predictor.predict(queries)
    assert [p.query for p in together] == queries
    for i in (0, 5, 10):
        (alone,) = predictor.predict([queries[i]])
        assert alone.amodal_probability == pytest.approx(together[i].amodal_probability, abs=1e-4)
        assert np.mean(alone.mask != together[i].mask) < 0.01
        assert np.array_equal(alone.modal | alone.occluded, alone.amodal)


def test_python_names_what_is_missing(tiny_run):
    predictor = r2sm_jax.load(str(tiny_run))
    with pytest.raises(InputError, match="call set_image first"):
        predictor.predict(["the mug"])
    for wrong in (
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((4, 4, 3), np.float32),
    ):
        with pytest.raises(InputError, match=r"uint8 \[H W 3\]"):
            predictor.set_image(wrong)


def test_a_probability_within_the_margin_is_undecided(tiny_run, photo, tmp_path, command):
    undecided = json.loads(command(main, tiny_run, photo, QUERY, "--json", "--abstain", "0.5").out)
    decided = json.loads(command(main, tiny_run, photo, QUERY, "--json", "--abstain", "0").out)
    assert undecided.pop("undecided") is True and undecided == decided
    assert (
        "undecided, rather "
        in command(main, tiny_run, photo, QUERY, "--abstain", "0.5", "--out", tmp_path).out
    )
    forced = command(
        main, tiny_run, photo, QUERY, "--json", "--abstain", "0.5", "--mask-type", "modal"
    )
    assert "undecided" not in json.loads(forced.out)


@pytest.mark.parametrize(
    "flags, said", [(("--abstain", "0.7"), "--abstain 0.7"), (("--abstain", "-1"), "--abstain")]
)
def test_a_margin_that_cannot_be_is_refused(tiny_run, photo, command, flags, said):
    end = command(main, tiny_run, photo, QUERY, *flags)
    assert end.code == 2 and said in end.err


def test_the_example_of_the_readme_runs(tiny_run, photo, tmp_path, monkeypatch, capsys):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", readme, re.M | re.S)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "latest").symlink_to(tiny_run)
    shutil.copy(photo, tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line.split()[0] in ("modal", "amodal") for line in lines)
    assert all(f"({HEIGHT}, {WIDTH})" in line for line in lines)
