"""AP and AR equal pycocotools' on random queries and on the cases where reimplementations go wrong.

And hotcoco's, which reimplements pycocotools in Rust, so that our figures stand on two legs.
"""

import contextlib
import inspect
import io
import re

import hotcoco
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from r2sm_jax.data import masks
from r2sm_jax.evaluation import instances
from r2sm_jax.evaluation.instances import (
    QueryDetections,
    instance_figures,
    occlusion_figures,
    positive_micro_f1,
    rank_detections,
)

pytestmark = pytest.mark.filterwarnings("ignore:hotcoco. use_cats is false")  # that is meant
SIDE = 128
NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large", "ar1", "ar10", "ar")


def box(x: int, y: int, width: int, height: int) -> dict:
    mask = np.zeros((SIDE, SIDE), bool)
    mask[y : y + height, x : x + width] = True
    return masks.encode(mask)


def query(truth=(), detected=(), crowd=()) -> dict:
    """`truth` and `crowd`: masks; `detected`: (mask, score)."""
    return {"truth": list(truth), "crowd": list(crowd), "detected": detected}


ENGINES = {"pycocotools": (COCO, COCOeval), "hotcoco": (hotcoco.COCO, hotcoco.COCOeval)}


def coco_stats(
    queries: list[dict],
    engine: str = "pycocotools",
    true_areas: list[list[float]] | None = None,
    areas: list[list[float]] | None = None,
    ranges: list[list[float]] | None = None,
) -> list[float | None]:
    """COCO's evaluation with `image_id := query_id`, without categories. Ids start at 1: it takes 0
    for no match. Areas are in pixels unless others are given."""
    dataset, evaluator = ENGINES[engine]
    annotations, results = [], []
    for number, one in enumerate(queries, start=1):
        for place, mask in enumerate([*one["truth"], *one["crowd"]]):
            area = float(masks.area(masks.decode(mask)))
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": 1,
                    "segmentation": mask,
                    "area": area if true_areas is None else true_areas[number - 1][place],
                    "iscrowd": int(place >= len(one["truth"])),
                    "bbox": [0, 0, 1, 1],
                }
            )
        for mask, score in one["detected"]:
            results.append(
                {"image_id": number, "category_id": 1, "segmentation": mask, "score": score}
            )
    images = [{"id": n, "height": SIDE, "width": SIDE} for n in range(1, len(queries) + 1)]
    truth, detected = dataset(), dataset()
    with contextlib.redirect_stdout(io.StringIO()):
        for data, content in ((truth, annotations), (detected, [])):
            data.dataset = {
                "images": images,
                "annotations": content,
                "categories": [{"id": 1, "name": "x"}],
            }
            data.createIndex()
        detected = truth.loadRes(results) if results else detected
        if areas is not None:
            flat = [area for of_query in areas for area in of_query]
            for result, area in zip(detected.dataset["annotations"], flat, strict=True):
                result["area"] = area
        evaluation = evaluator(truth, detected, "segm")
        evaluation.params.useCats = 0
        evaluation.params.areaRng = ranges or evaluation.params.areaRng
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return [None if value == -1 else float(value) for value in evaluation.stats]


def ours(queries: list[dict]) -> dict[str, float | None]:
    return instance_figures([detections_of(one) for one in queries])


def detections_of(one: dict) -> QueryDetections:
    detections = [mask for mask, _ in one["detected"]]
    scores = [score for _, score in one["detected"]]
    present = [True] * len(scores)
    return rank_detections(detections, scores, present, one["truth"], one["crowd"])


def assert_equal(queries: list[dict]) -> dict[str, float | None]:
    detected = ours(queries)
    for engine in ENGINES:
        expected = dict(zip(NAMES, coco_stats(queries, engine), strict=False))
        for name in NAMES:
            assert (detected[name] is None) == (expected[name] is None), (engine, name)
            assert detected[name] == pytest.approx(expected[name], abs=1e-9), (engine, name)
    return detected


def random_queries(seed: int, count: int = 12) -> list[dict]:
    rng = np.random.default_rng(seed)

    def any_box() -> dict:
        x, y, width, height = rng.integers(1, [70, 70, 58, 58])
        return box(int(x), int(y), int(width), int(height))

    queries = []
    for _ in range(count):
        truth = [any_box() for _ in range(rng.integers(0, 5))]
        crowd = [any_box() for _ in range(rng.integers(0, 2))]
        near = [_shifted(mask, rng) for mask in truth for _ in range(rng.integers(0, 3))]
        detected = near + [any_box() for _ in range(rng.integers(0, 3))]
        # Few different scores, so that many are tied.
        queries.append(query(truth, [(m, float(rng.integers(0, 6) / 5)) for m in detected], crowd))
    return queries


def _shifted(mask: dict, rng: np.random.Generator) -> dict:
    return masks.encode(np.roll(masks.decode(mask), tuple(rng.integers(-4, 5, 2)), (0, 1)))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31))
def test_random_queries(seed):
    assert_equal(random_queries(seed))


def test_crowds_are_matched_again_and_again_and_count_for_nothing():
    crowd = box(0, 0, 100, 100)
    detected = [(box(5 * n, 5, 20, 20), 0.9 - 0.1 * n) for n in range(5)]
    assert_equal(
        [query([box(100, 100, 20, 20)], [*detected, (box(100, 100, 20, 20), 0.3)], [crowd])]
    )


def test_nothing_found_nothing_wanted_and_neither():
    mask = box(10, 10, 40, 40)
    assert_equal(
        [query([mask], []), query([], [(mask, 0.9)]), query(), query([mask], [(mask, 0.1)])]
    )
    assert assert_equal([query([mask], [])])["ap"] == 0
    assert ours([query([], [(mask, 0.5)])])["ap"] is None and ours([])["detections"] is None


def test_more_than_a_hundred_detections():
    rng = np.random.default_rng(0)
    truth = [box(4 * n, 4 * n, 30, 30) for n in range(20)]
    detected = [(_shifted(truth[n % 20], rng), float(rng.random())) for n in range(140)]
    figures = assert_equal([query(truth, detected), query(truth[:3], detected[:5])])
    assert figures["detections"] == (100 + 5) / 2


def test_what_lies_in_an_ignored_region_is_no_detection_and_what_is_within_one_counts():
    left, region, inside = box(0, 0, 20, 20), box(60, 60, 40, 40), box(70, 70, 10, 10)
    for detected in ([left], [left, inside]):
        scores = [0.9] * len(detected)
        detections = rank_detections(detected, scores, [True] * len(detected), [left], [region])
        assert positive_micro_f1([detections]) == 1
    # An instance within the region still counts.
    counts = rank_detections([inside, left], [0.9, 0.8], [True] * 2, [inside], [region])
    assert positive_micro_f1([counts]) == pytest.approx(2 / 3)


def test_absent_slots_count_for_average_precision_only():
    left, right = box(0, 0, 20, 20), box(40, 0, 20, 20)
    slots = rank_detections([left, right, right], [0.9, 0.2, 0.1], [True, False, False], [left])
    assert positive_micro_f1([slots]) == 1
    assert instance_figures([slots])["detections"] == 3


RANGES = [[0, 1.0], [0, 0.85], [0, 0.75], [0, 0.6]]


@pytest.mark.parametrize("seed", range(8))
def test_ap_by_occlusion_is_that_of_vrsp(seed):
    """Whose changed pycocotools has the visible share in the place of the area, of annotations as
    of results."""
    queries = [one | {"crowd": []} for one in random_queries(seed)]
    rng = np.random.default_rng(seed)
    # The edges of the ranges belong to them.
    choices = [0.0, 0.15, 0.2, 0.25, 0.3, 0.4, 0.7]
    rates = [rng.choice(choices, len(one["detected"])).tolist() for one in queries]
    true_rates = [rng.choice([*choices, None], len(one["truth"])).tolist() for one in queries]
    ranked = []
    for one, detected, true in zip(queries, rates, true_rates, strict=True):
        detections, scores = [m for m, _ in one["detected"]], [s for _, s in one["detected"]]
        present = [True] * len(scores)
        ranked.append(
            rank_detections(
                *(detections, scores, present, one["truth"]),
                occlude_rates=detected,
                true_occlude_rates=true,
            )
        )
    figures = [f for name, f in occlusion_figures(ranked).items() if name.startswith("ap")]
    areas = [[1 - rate for rate in of_query] for of_query in rates]
    # Without a rate, the area lies outside of each range.
    true_areas = [[1000 if rate is None else 1 - rate for rate in one] for one in true_rates]
    expected = coco_stats(queries, "pycocotools", true_areas, areas, RANGES)[3:6]
    assert figures == pytest.approx(expected, abs=1e-9)
    assert len(set(figures)) == 3


def test_ap_by_occlusion_by_hand():
    hidden, whole = box(0, 0, 40, 40), box(60, 60, 40, 40)
    stray = box(0, 90, 30, 30)

    def figures(stray_rate, hidden_rate=0.3):
        detections = [stray, hidden, whole]
        one = rank_detections(
            *(detections, [0.9, 0.8, 0.7], [True] * 3, [hidden, whole]),
            occlude_rates=[stray_rate, hidden_rate, 0.0],
            true_occlude_rates=[0.3, 0.0],
        )
        return occlusion_figures([one])

    # The stray detection counts only where it is hidden that much itself; the match always does.
    assert figures(0.0) == {
        "ap_occluded_15": pytest.approx(1),
        "ap_occluded_25": pytest.approx(1),
        "ap_occluded_40": None,
        "ar_occluded_15": 1,
        "ar_occluded_25": 1,
        "ar_occluded_40": None,
    }
    assert figures(0.2, 0.0)["ap_occluded_15"] == pytest.approx(0.5)
    assert figures(0.2)["ap_occluded_25"] == pytest.approx(1)
    # A system that does not tell how much is hidden has no such precision.
    assert figures(None)["ap_occluded_15"] is None and figures(None)["ar_occluded_15"] == 1


def test_nothing_private_of_pycocotools_is_used():
    """Its next version may do without."""
    source = inspect.getsource(instances)
    assert re.findall(r"(?:evaluation|self)\._(?!_)\w+", source) == []
