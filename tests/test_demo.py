"""What the page of `demo.py` shows, by its functions; test_demo_page.py looks at it over HTTP and in a browser."""

import io
import json
import os
import re
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.sheet import OCCLUDED, VISIBLE
from r2sm_jax.errors import InputError
from r2sm_jax.inference import web_answers as answers, web_page as demo
from r2sm_jax.inference.run import load


@pytest.fixture(scope="module")
def predictor(tiny_run):
    return load(tiny_run).predictor


@pytest.fixture(scope="module")
def photo(tmp_path_factory, predictor) -> answers.Photo:
    file = tmp_path_factory.mktemp("photo") / "photo.png"
    Image.fromarray(answers.make_examples()[0][0][:300, :400]).save(file)
    return answers.open_photo(predictor, file)


@pytest.fixture(scope="module")
def answer(predictor, photo) -> answers.Answer:
    return answers.ask(predictor, photo, "the complete shape of the red mug")


def drawn(answer: answers.Answer) -> answers.Answer:
    """The same with masks that are known: visible is the left half, hidden the quarter beside it."""
    height, width = answer.by_type["modal"]["size"]
    modal, amodal = np.zeros((2, height, width), bool)
    modal[:, : width // 2], amodal[:, : 3 * width // 4] = True, True
    rles = {
        "modal": masks.encode(modal),
        "amodal": masks.encode(amodal),
        "occluded": masks.encode(amodal & ~modal),
    }
    instance = {
        "score": 0.9,
        **{name: masks.encode(m[:, ::-1]) for name, m in (("modal", modal), ("amodal", amodal))},
    }
    return replace(
        answer,
        by_type={
            kind: entry | rles | {"mask": rles[kind], "instances": [instance, instance]}
            for kind, entry in answer.by_type.items()
        },
    )


def test_examples_are_drawn_with_a_plain_and_a_complete_wording_of_something_hidden():
    found = answers.make_examples()
    assert len(found) == answers.EXAMPLES
    for image, (plain, complete, *_) in found:
        assert complete == f"the complete shape of {plain}, hidden parts included"
        assert image.shape == (480, 480, 3)


def test_the_threshold_decides_and_the_model_is_not_asked_again(answer):
    p = answer.probability
    assert 0 < p < 1 and answer.by_type["amodal"]["amodal_probability"] == p
    assert answer.decision(p - 1e-6) == "amodal" and answer.decision(p) == "modal"
    assert answer.by_type["modal"]["mask"] == answer.by_type["modal"]["modal"]
    assert answer.by_type["amodal"]["mask"] == answer.by_type["amodal"]["amodal"]


def test_the_decision_is_shown_with_its_probability_and_its_words(answer):
    words = [("the", 0.0), ("complete", 1.5), ("mug", -0.75)]
    answer = replace(answer, words=words)
    shown = answers.decision_html(answer, answer.probability - 0.01)
    assert (
        "Amodal" in shown
        and f"{answer.probability:.3f}" in shown
        and f"<b>{answer.probability:.0%}</b>" in shown
    )
    shares = re.findall(r'class="word (for-\w+)" style="--share:([\d.]+)">(\w+)<', shown)
    assert shares == [
        ("for-modal", "0.00", "the"),
        ("for-amodal", "1.00", "complete"),
        ("for-modal", "0.50", "mug"),
    ]
    shown = answers.decision_html(answer, answer.probability + 0.01)
    assert "Modal" in shown and f"<b>{1 - answer.probability:.0%}</b>" in shown


def test_what_people_write_is_text_and_not_markup(answer):
    evil = "<script>alert(1)</script>"
    shown = answers.decision_html(replace(answer, words=[(evil, 1.0)], unread=evil), 0.5)
    shown += answers.message_html(InputError(f"{evil}: no")) + answers.message_html(evil)
    assert "<script" not in shown and shown.count("&lt;script&gt;") == 4


@pytest.mark.parametrize(
    ("shown", "visible", "hidden"),
    [("modal", True, False), ("amodal", True, True), ("occluded", False, True)],
)
def test_each_view_tints_the_parts_that_it_shows(answer, photo, shown, visible, hidden):
    white = replace(photo, preview=np.full((720, 960, 3), 255, np.uint8))
    assert photo.preview.shape == white.preview.shape
    for instance, order in ((-1, 1), (0, -1)):
        picture = answers.draw(white, drawn(answer), shown, instance)[:, ::order].astype(int)
        left, beside, right = picture[360, 100:400], picture[360, 520:680], picture[360, 760:]
        blue, orange = np.subtract(VISIBLE, 255), np.subtract(OCCLUDED, 255)
        assert (np.abs((left - 255) @ blue).mean() > 5000) == visible
        assert (np.abs((beside - 255) @ orange).mean() > 5000) == hidden
        assert np.ptp(right, axis=0).max() == 0


def test_files_to_take_away_hold_the_masks_of_the_decision(answer, tmp_path):
    picture, answer = np.zeros((60, 80, 3), np.uint8), drawn(answer)
    for threshold, kind in ((0.0, "amodal"), (1.0, "modal")):
        archive, record = answers.write_files(tmp_path / kind, picture, answer, threshold)
        written = json.loads(Path(record).read_text())
        assert written["mask_type"] == kind and written["threshold"] == threshold
        with zipfile.ZipFile(archive) as files:
            pictures = {f"{name}.png" for name in (*answers.MASKS, "overlay")}
            assert set(files.namelist()) == pictures | {"prediction.json"}
            assert json.loads(files.read("prediction.json")) == written
            for name in answers.MASKS:
                mask = np.asarray(Image.open(io.BytesIO(files.read(f"{name}.png"))))
                assert np.array_equal(mask > 0, masks.decode(written[name])) and mask.shape == (
                    300,
                    400,
                )


def test_answers_are_forgotten_after_their_time(tmp_path):
    for name, age in (("answer-old", 100), ("answer-new", 1), ("upload", 100)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "masks.zip").write_text("")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    (tmp_path / "answer-gone").symlink_to(tmp_path / "nowhere")  # as if removed after it was listed
    answers.remove_old_answers(tmp_path, 50)
    (tmp_path / "answer-gone").unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answer-new", "upload"]


def test_a_long_sentence_is_answered_with_what_was_not_read(predictor, photo):
    answer = answers.ask(predictor, photo, "the red mug " * 3333 + "unread")
    assert answer.unread.endswith("unread")
    shown = answers.decision_html(answer, 0.5)
    assert "Too long" in shown and len(shown) < 20_000


def test_of_an_animation_the_first_frame_is_used_and_that_is_said(predictor, tmp_path):
    pictures = [Image.new("RGB", (40, 30), colour) for colour in ("white", "red", "blue")]
    pictures[0].save(tmp_path / "moving.gif", save_all=True, append_images=pictures[1:])
    photo = answers.open_photo(predictor, tmp_path / "moving.gif")
    assert photo.frames == 3 and photo.preview.min() == 255


@pytest.mark.parametrize(
    ("query", "reason"), [(" ", "empty"), ("mug " * 40_000, "160,000 characters")]
)
def test_a_sentence_that_cannot_be_used_is_one_sentence(query, reason, predictor, photo):
    with pytest.raises(InputError, match=reason):
        answers.ask(predictor, photo, query)


def test_a_bad_photo_is_named_without_the_servers_folder(predictor, tmp_path):
    (tmp_path / "bad.png").write_text("no image")
    Image.new("1", (10_000, 10_000)).save(tmp_path / "huge.png")
    for name, reason in (("bad.png", "not an image"), ("huge.png", "megapixels")):
        with pytest.raises(InputError, match=reason) as raised:
            answers.open_photo(predictor, tmp_path / name)
        assert name in str(raised.value) and str(tmp_path) not in str(raised.value)


def test_the_page_goes_from_an_image_to_an_answer(predictor, tmp_path):
    pytest.importorskip("gradio", reason="the page needs gradio: pip install '.[demo]'")
    page = demo.Page(predictor, tmp_path)
    page.build()
    assert "no image yet" in page.ask(None, "the red mug", 0.5)[page.decision]
    (tmp_path / "bad.png").write_text("no image")
    refused = page.choose_upload(str(tmp_path / "bad.png"))
    assert "not an image" in refused[page.decision] and refused[page.photo] is None
    chosen = page.choose_example(0)
    photo = chosen[page.photo]
    assert chosen[page.sentences[0]]["value"].startswith("the ")
    assert "query is empty" in page.ask(photo, " ", 0.5)[page.decision]
    found = page.ask(photo, "the red mug", 0.0)
    answer = found[page.answer]
    assert found[page.shown]["value"] == "amodal" and zipfile.is_zipfile(found[page.archive])
    assert page.show_answer(photo, answer, 1.0)[page.shown]["value"] == "modal"
    seen = page.show_mask(photo, answer, "occluded", -1)[page.stage]
    assert seen["alt_text"].startswith("The occluded mask of “the red mug”") and seen[
        "value"
    ].shape == (960, 960, 3)


def test_a_request_without_values_is_no_error_of_the_server(predictor, tmp_path):
    pytest.importorskip("gradio", reason="the page needs gradio: pip install '.[demo]'")
    page = demo.Page(predictor, tmp_path)
    page.build()
    assert page.choose_upload(None)[page.photo] is None
    gone = page.choose_upload(str(tmp_path / "gone.png"))
    assert "gone.png" in gone[page.decision] and str(tmp_path) not in gone[page.decision]
    photo = page.choose_example(0)[page.photo]
    assert "query is empty" in page.ask(photo, None, 0.5)[page.decision]
    answer = page.ask(photo, "the red mug", 0.5)[page.answer]
    assert page.ask(photo, "the red mug", None) == page.show_answer(photo, answer, None) == {}
    assert (
        page.show_mask(photo, answer, None, -1)
        == page.show_mask(photo, answer, "modal", None)
        == {}
    )


def test_bad_arguments_are_one_sentence(tmp_path, refused):
    assert "--max-upload-mb" in refused(demo.main, tmp_path, "--max-upload-mb", 0)


def test_a_run_that_is_not_there_is_one_sentence(tmp_path, refused):
    pytest.importorskip("gradio", reason="the page needs gradio: pip install '.[demo]'")
    assert "no such run folder" in refused(demo.main, tmp_path / "nowhere")


def test_without_gradio_the_remedy_is_named(tmp_path, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert "pip install 'r2sm_jax[demo]'" in refused(demo.main, tmp_path)
