"""What a caller gives about an object: masks in many layouts, boxes, clicks; and refusals."""

import json

import numpy as np
import pytest
from conftest import BOX, MUG, SIZE
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.mask_reader import read_mask, read_union
from r2sm_jax.errors import InputError
from r2sm_jax.evaluation.completion import innermost_pixel
from r2sm_jax.inference.prompts import Request, read_requests
from r2sm_jax.query import MAX_CLICKS, Click, Prompt

POINT = (10, 20)


@pytest.mark.parametrize(
    "value",
    [
        MUG,
        MUG.astype(np.uint8),
        255 * MUG.astype(np.uint8),
        MUG.astype(np.float32),
        MUG[None, None],
        masks.encode(MUG),
        {"segmentation": masks.encode(MUG), "score": 0.9},
        [[10, 10, 30, 10, 30, 40, 10, 40]],
        [np.array([[10, 10], [30, 10], [30, 40], [10, 40]], np.float32)],
    ],
)
def test_a_mask_is_read_in_every_layout(value):
    np.testing.assert_array_equal(read_mask(value, SIZE, "it"), MUG)


def test_files_are_read_as_what_they_hold_is(tmp_path):
    """By all callers: a mask, a list of masks, and their union."""
    Image.fromarray(MUG).save(tmp_path / "mug.png")
    for name, value in (
        ("rle", masks.encode(MUG)),
        ("annotation", {"segmentation": masks.encode(BOX)}),
        ("list", [masks.encode(MUG), {"segmentation": masks.encode(BOX)}]),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    for name in ("mug.png", "rle.json"):
        np.testing.assert_array_equal(read_mask(tmp_path / name, SIZE, "it"), MUG)
        np.testing.assert_array_equal(read_union(str(tmp_path / name), SIZE, "it"), MUG)
    both = [tmp_path / "mug.png", tmp_path / "annotation.json"]
    for values in (both, tmp_path / "list.json"):
        np.testing.assert_array_equal(read_union(values, SIZE, "it"), MUG | BOX)
    (request,) = read_requests("the mug", SIZE, masks=[tmp_path / "mug.png"])
    np.testing.assert_array_equal(request.place, MUG)


def test_tensors_of_torch_are_masks():
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(MUG)
    for value in (tensor, tensor.long(), tensor.float(), tensor[None, None]):
        np.testing.assert_array_equal(read_mask(value, SIZE, "it"), MUG)


def test_a_mask_is_an_array_of_its_own():
    """What the caller draws later changes no answer."""
    for value in (MUG.copy(), MUG.copy()[None]):
        mask = read_mask(value, SIZE, "it")
        value[...] = False
        np.testing.assert_array_equal(mask, MUG)


def test_boxes_and_clicks_are_read_with_their_queries():
    requests = read_requests(
        [None, "the mug", "the mug", None, "the cat"],
        SIZE,
        masks=[None, None, None, MUG, None],
        boxes=[None, (10, 20, 90, 40), np.array([0, 0, 5, 5]), None, None],
        points=[[(40, 30), (80, 60, False)], None, [(9, 9, 0)], None, None],
    )
    clicks = (Click(40, 30), Click(80, 60, False))
    assert requests[0] == Request("", place=Prompt(None, clicks))
    # What lies outside of the image is cut off.
    assert requests[1] == Request("the mug", place=Prompt((10, 20, 80, 40)))
    # A click beside the object helps a box.
    assert requests[2].place == Prompt((0, 0, 5, 5), (Click(9, 9, False),))
    np.testing.assert_array_equal(requests[3].place, MUG)
    assert requests[4] == Request("the cat")
    assert len(read_requests(None, SIZE, boxes=[(0, 0, 5, 5)] * 3)) == 3
    assert read_requests("the mug", SIZE) == [Request("the mug")] and read_requests([], SIZE) == []


@pytest.mark.parametrize(
    "given",
    [
        {"boxes": (10, 20, 80, 40)},
        {"boxes": np.array([10, 20, 80, 40])},
        {"points": [(10, 20), (30, 5, False)]},
        {"points": np.array([[10, 20], [30, 5]])},
        {"points": POINT},
        {"masks": MUG},
        {"masks": masks.encode(MUG)},
        {"masks": [10, 10, 30, 10, 30, 40, 10, 40]},
    ],
)
def test_what_is_given_for_a_single_query_needs_no_list_around_it(given):
    ((name, value),) = given.items()
    inner = [value] if value is POINT else value
    for queries in (None, ["the mug"]):
        (found,) = read_requests(queries, SIZE, **given)
        (expected,) = read_requests(queries, SIZE, **{name: [inner]})
        if name == "masks":
            np.testing.assert_array_equal(found.place, expected.place)
        else:
            assert found == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"masks": [MUG, BOX]}, "2 masks, but 1 queries"),
        ({"masks": [~MUG & MUG]}, "mask of query 1 .* empty"),
        ({"masks": [MUG[:30]]}, r"\[30, 80\], its image's \[60, 80\]"),
        ({"masks": [MUG.T]}, "turned"),
        ({"masks": [np.stack([MUG, BOX])]}, r"\[2, 60, 80\]"),
        ({"masks": [10 * MUG - 5.0]}, "no probabilities"),
        ({"masks": ["cat.png"]}, "No such file"),
        ({"masks": [{"size": [60, 80]}]}, "counts"),
        (
            {"masks": [{"segmentation": masks.encode(MUG), "i_segm": masks.encode(BOX)}]},
            "i_segm holds a mask, too",
        ),
        ({"masks": [{"images": [], "annotations": []}]}, "it has images, annotations, and not"),
        ({"masks": [MUG.astype(int).tolist()]}, "numbers are 0 and 1, as pixels are"),
        ({"masks": [MUG], "boxes": [(0, 0, 9, 9)]}, "one of them"),
        ({"boxes": [(0, 0, 5, 5)] * 2}, "2 boxes, but 1 queries"),
        ({"boxes": [(5, 5, 5, 9)]}, "no area"),
        ({"boxes": [(50, 40, 20, 10)]}, "corners"),
        ({"boxes": [(90, 0, 95, 5)]}, "no area"),
        ({"boxes": [(0.1, 0.5, 0.8, 0.95)]}, "shares"),
        ({"boxes": [(0, 0, float("nan"), 5)]}, "no area"),
        ({"points": [[(81, 5)]]}, "not in the image"),
        ({"points": [[(-1, 5)]]}, "not in the image"),
        ({"points": [[(0.1, 0.5), (0.8, 0.95)]]}, "shares"),
        ({"points": [[(20, 20, -1)]]}, "label -1"),
        ({"points": [[(20, 20, 2)]]}, "label 2"),
        ({"points": [[(1, 1)] * (MAX_CLICKS + 1)]}, "at most"),
        ({"points": [[(1, 1, False)]]}, "beside its object"),
        ({"boxes": [(1, 2, 3)]}, "give x0 y0 x1 y1"),
        ({"boxes": ["mug"]}, "give x0 y0 x1 y1"),
        ({"points": [[40, (30, 20)]]}, "give x y"),
    ],
)
def test_what_cannot_be_used_is_refused(given, words):
    with pytest.raises(InputError, match=words):
        read_requests(["the mug"], SIZE, **given)


def test_a_query_needs_words_or_a_place():
    for queries in ([None], ["the mug", ""], [" ."], ["\u200b\u2060"]):
        with pytest.raises(InputError, match="query is empty"):
            read_requests(queries, SIZE)
    with pytest.raises(InputError, match="half of a character"):
        read_requests(["the caf\udce9"], SIZE)


def test_the_innermost_pixel_of_a_ring_lies_on_it():
    mask = np.zeros((40, 40), bool)
    mask[5:35, 5:35] = True
    mask[12:34, 12:34] = False
    x, y = innermost_pixel(mask)
    assert mask[int(y), int(x)]
