"""Names that one example teaches: what is found, which sentences hold one, files, refusals."""

import json

import numpy as np
import pytest

from r2sm_jax.data.letterbox import Letterbox
from r2sm_jax.errors import InputError
from r2sm_jax.inference.taught_names import Prototype, TaughtNames, find_similar, make_prototype

CELLS, SIZE = 8, 64
NOT_TAUGHT = "the red mug"


def checkers(places, dim=5) -> np.ndarray:
    """Tokens [8 8 d] of an image with a thing of its own kind at these cells."""
    tokens = np.tile(np.array([9.0, 1, 0, 0, 0], np.float32)[:dim], (CELLS, CELLS, 1))
    for row, column in places:
        tokens[row, column] = [9, 0, 2, 1, 0]
    return tokens


def mask_of(places, size=SIZE) -> np.ndarray:
    cells = np.zeros((CELLS, CELLS), bool)
    for place in places:
        cells[place] = True
    side = size // CELLS
    return cells.repeat(side, 0).repeat(side, 1)


# Prototypes.


def test_what_looks_like_the_example_is_found_in_connected_parts():
    letterbox = Letterbox(SIZE, SIZE, SIZE)
    example = [(2, 2), (2, 3), (3, 2)]
    prototype = make_prototype(checkers(example), mask_of(example), letterbox)
    assert prototype is not None
    two = [[(1, 1), (1, 2), (2, 1), (2, 2)], [(5, 6), (5, 5)]]
    parts, similarity = find_similar(prototype, checkers([*two[0], *two[1]]), letterbox)
    assert similarity > 0.9 and len(parts) == 2
    for part, places in zip(parts, two, strict=True):
        truth = mask_of(places)
        # Between cells the similarity is interpolated, so the outermost pixels are missing.
        assert truth.sum() / 4 < part.sum() and not (part & ~truth).any()
    # The example's image is compared with itself: nothing else looks like it.
    nothing, similarity = find_similar(prototype, checkers([]), letterbox)
    assert nothing == [] and similarity <= 0


def test_padding_is_never_found():
    letterbox = Letterbox(SIZE // 2, SIZE, SIZE)
    below = [(row, column) for row in range(4, 8) for column in range(CELLS)]
    example = [(1, 1), (1, 2)]
    mask = mask_of(example)[: SIZE // 2]
    prototype = make_prototype(checkers(example), mask, letterbox)
    parts, _ = find_similar(prototype, checkers([*below, (1, 5), (2, 5)]), letterbox)
    (part,) = parts
    assert part.shape == (SIZE // 2, SIZE)
    assert (part & mask_of([(1, 5), (2, 5)])[: SIZE // 2]).sum() > 0.6 * part.sum()


def test_an_object_that_the_frame_does_not_show_gives_no_prototype():
    mask = np.zeros((4000, 4000), bool)
    mask[7, 7] = True
    assert make_prototype(checkers([]), mask, Letterbox(4000, 4000, SIZE)) is None


# Names in sentences.


def names_of(*names) -> TaughtNames:
    taught = TaughtNames()
    for name in names:
        taught.add(name, Prototype(np.ones(4, np.float32), np.zeros(4, np.float32)))
    return taught


@pytest.mark.parametrize(
    ("sentence", "name"),
    [
        ("the part 7", "part 7"),
        ("Every PART  7, including what is hidden", "part 7"),
        ("all the part 7s", "part 7"),
        ("the part 71", None),
        ("a counterpart 7", None),
        ("the rear part 7", "rear part 7"),
        ("the flansch", "flansch"),
        ("two flansches", "flansch"),
        ("", None),
    ],
)
def test_the_longest_name_in_whole_words_counts(sentence, name):
    assert names_of("part 7", "rear part 7", "Flansch").find(sentence) == name


def test_a_name_is_taught_once_unless_it_is_replaced():
    taught = names_of("part 7")
    with pytest.raises(InputError, match="taught already"):
        taught.add("Part 7", taught["part 7"])
    taught.add("Part 7", Prototype(np.full(4, 3.0), np.zeros(4)), replace=True)
    assert len(taught) == 1 and taught["PART 7"].target[0] == 3
    with pytest.raises(InputError, match="no words"):
        taught.add(" - ", taught["part 7"])


# Files.


def test_a_file_gives_back_the_names_of_its_model_only(tmp_path):
    path = tmp_path / "names.json"
    with pytest.raises(InputError, match="no name is taught"):
        TaughtNames().save(path, "a" * 64)
    names_of("part 7", "größe").save(path, "a" * 64)
    loaded = TaughtNames()
    loaded.load(path, "a" * 64, dim=4)
    assert list(loaded) == ["part 7", "größe"] and np.array_equal(
        loaded["größe"].target, np.ones(4)
    )

    other = names_of("größe", "lid")
    with pytest.raises(InputError, match="taught already"):
        other.load(path, "a" * 64, dim=4)
    assert list(other) == ["größe", "lid"]  # nothing of the file
    other.load(path, "a" * 64, dim=4, replace=True)
    assert set(other) == {"größe", "lid", "part 7"}
    with pytest.raises(InputError, match="another model"):
        TaughtNames().load(path, "b" * 64, dim=4)


@pytest.mark.parametrize(
    "stored",
    [
        [],
        {"names": {}},
        {"model": "a" * 64, "names": []},
        {"model": "a" * 64, "names": {"part 7": [1, 2, 3, 4]}},
        {"model": "a" * 64, "names": {"part 7": {"target": [1, 2, 3, 4]}}},
        {"model": "a" * 64, "names": {"part 7": {"target": [1, 2], "image": [1, 2]}}},
        {"model": "a" * 64, "names": {"part 7": {"target": ["x"] * 4, "image": [1] * 4}}},
    ],
)
def test_other_files_are_refused(stored, tmp_path):
    path = tmp_path / "names.json"
    path.write_text(json.dumps(stored))
    with pytest.raises(InputError, match=r"names\.json"):
        TaughtNames().load(path, "a" * 64, dim=4)


# In a predictor.


@pytest.fixture
def taught(predictor):
    """The tiny predictor with one name, and the image and the mask of its example."""
    predictor = predictor.updated(weights=predictor.weights)
    image = np.random.default_rng(0).integers(0, 80, (48, 64, 3)).astype(np.uint8)
    mask = np.zeros((48, 64), bool)
    mask[8:32, 16:40] = True
    image[mask] += np.array([170, 20, 90], np.uint8)
    predictor.teach("part 7", image, mask)
    return predictor, image, mask


def test_a_sentence_with_the_name_finds_the_example_and_decides_the_type(taught):
    predictor, image, mask = taught
    sentences = ["the part 7", "the complete part 7 with all that is hidden", NOT_TAUGHT]
    predictor.set_image(image)
    with_name, complete, without = predictor.predict(sentences)
    assert (with_name.modal & mask).sum() > 0.3 * (with_name.modal | mask).sum()
    assert np.array_equal(with_name.modal, complete.modal) and with_name.instances
    assert with_name.score is None and 0 < with_name.similarity <= 1 and with_name.presence == 1
    assert without.similarity is None and "similarity" not in without.to_json()
    assert "IoU" not in with_name.answer and "given" not in with_name.answer
    fresh = predictor.updated(weights=predictor.weights)
    expected = fresh.predict(sentences, image=image)
    assert with_name.mask_type == expected[0].mask_type
    assert complete.amodal_probability == pytest.approx(expected[1].amodal_probability)
    assert np.array_equal(without.modal, expected[2].modal)

    # In batches and through a file.
    ((batched, _),) = predictor.predict_batch([image], [sentences[::2]])
    assert np.array_equal(batched.modal, with_name.modal)


def test_a_given_mask_goes_before_a_name(taught, monkeypatch):
    predictor, image, mask = taught
    monkeypatch.setattr(predictor, "completer", lambda image, masks: list(masks))
    other = np.roll(mask, 10, axis=1)
    (prediction,) = predictor.predict(["the part 7"], image=image, masks=[other])
    assert np.array_equal(prediction.modal, other) and prediction.similarity is None


def test_parts_are_outlined_and_completed(taught, monkeypatch):
    predictor, image, mask = taught
    boxes = []

    def outline(image, prompts):
        boxes.extend(prompt.box for prompt in prompts)
        return [type("Outline", (), {"mask": mask, "iou": 0.9})]

    def complete(image, masks):
        return [np.roll(mask, 4, axis=0) | mask for mask in masks]

    monkeypatch.setattr(predictor, "outliner", outline)
    monkeypatch.setattr(predictor, "completer", complete)
    (prediction,) = predictor.predict(["the part 7"], "amodal", image)
    assert boxes and len(prediction.instances) == 1  # one object has one outline
    assert np.array_equal(prediction.modal, mask)
    assert prediction.occluded.any() and np.array_equal(prediction.mask, prediction.amodal)


def test_bad_examples_are_refused(taught):
    predictor, image, mask = taught
    with pytest.raises(InputError, match="taught already"):
        predictor.teach("part 7", image, mask)
    for bad in (np.zeros_like(mask), mask[:, :-1]):
        with pytest.raises(InputError, match="lid"):
            predictor.teach("lid", image, bad)
    assert list(predictor.names) == ["part 7"]
    predictor.teach("part 7", image, ~mask, replace=True)
