"""IoU in every definition, the choice of the mask, and calibration, by hand."""

import numpy as np
import pytest

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import ImageTruth, Instance
from r2sm_jax.evaluation.counts import ROW, occluded_overlap, overlap_of_rows
from r2sm_jax.evaluation.decisions import area_under_curve, mask_type_scores
from r2sm_jax.evaluation.instances import cgf1_figures, rank_detections
from r2sm_jax.evaluation.iou import VARIANTS, overlap
from r2sm_jax.evaluation.report import (
    breakdowns,
    leak,
    pair_figures,
    presence_figures,
    right_object,
    split_figures,
)
from r2sm_jax.evaluation.scorer import (
    Answer,
    Pair,
    QueryResult,
    QueryTruth,
    score,
    truths_of_image,
)
from r2sm_jax.query import Query


def mask(*rows: str) -> np.ndarray:
    return np.array([[c == "#" for c in row] for row in rows])


EMPTY = mask("....", "....")
LEFT = mask("##..", "##..")
TOP = mask("####", "....")


def score_masks(
    predicted,
    truth,
    *,
    mask_type="modal",
    probability=0.0,
    text="the mug",
    ignore=None,
    query_id=1,
    image_id=1,
) -> QueryResult:
    """Scores one prediction. Masks are pairs (modal, amodal)."""
    predicted_type = None
    if probability is not None:
        predicted_type = "amodal" if probability > 0.5 else "modal"
    both = Pair(*map(masks.encode, predicted))
    said = Answer(both.of_type(predicted_type or "modal"), both, predicted_type, probability)
    pair = Pair(*map(masks.encode, truth))
    ignored = None if ignore is None else masks.encode(ignore)
    query = Query(query_id, text, mask_type, (1,))
    instances = (Instance(1, "", *pair),)
    return score(said, QueryTruth(query, 0, image_id, pair, instances, (), ignored))


def rows_of(*results: QueryResult) -> np.ndarray:
    """The table of some results."""
    return np.array([result.row for result in results], ROW)


def saying(result: QueryResult, **said) -> QueryResult:
    """The result of an answer with other fields."""
    return score(result.said._replace(**said), result.truth)


def test_overlap_counts_pixels_and_leaves_ignored_ones_out():
    assert overlap(LEFT, TOP) == (2, 6, 4, 4)
    assert overlap(LEFT, TOP, mask("#...", "#...")) == (1, 4, 2, 3)
    assert overlap(LEFT, TOP, ~EMPTY) == (0, 0, 0, 0)


def test_no_queries_have_no_score():
    for variant in VARIANTS.values():
        assert set(variant(np.zeros((0, 4), int)).values()) == {None}


TOY = np.array([(50, 100, 60, 90), (80, 80, 80, 80), (0, 0, 0, 0), (0, 40, 0, 40), (0, 30, 30, 0)])
"""Five queries: half right, all right, rightly empty, wrongly empty, false positives on an empty
truth."""


def test_variants_differ_in_what_empty_masks_score():
    giou = {name: variant(TOY)["giou"] for name, variant in VARIANTS.items()}
    assert giou["lisa"] == pytest.approx((0.5 + 1 + 1 + 0 + 0) / 5, abs=1e-6)
    assert giou["gres"] == pytest.approx((0.5 + 1 + 1 + 0 + 0) / 5)
    assert giou["segzero"] == pytest.approx((0.5 + 1 + 0 + 0 + 0) / 5)
    assert giou["mmr"] == pytest.approx((0.5 + 1 + 0) / 3, abs=1e-6)
    assert VARIANTS["lisa"](TOY)["ciou"] == pytest.approx(130 / 250)
    assert VARIANTS["mmr"](TOY)["ciou"] == pytest.approx(130 / 210)
    assert "ciou" not in VARIANTS["segzero"](TOY)


def test_gres_judges_the_decision_that_there_is_no_target():
    scores = VARIANTS["gres"](TOY)
    assert scores["ciou"] == pytest.approx(130 / 250)
    assert scores["target_accuracy"] == pytest.approx(2 / 3)
    assert scores["no_target_accuracy"] == 0.5
    assert scores["pr@0.5"] == pytest.approx(2 / 3)
    assert scores["pr@0.6"] == scores["pr@0.9"] == pytest.approx(1 / 3)


def test_leak_is_the_share_of_the_hidden_part_that_modal_answers_paint():
    truth = mask("##..", "...."), mask("####", "....")  # two pixels are hidden
    half = mask("###.", "##..")  # one of them, and two beyond the object
    results = [
        score_masks((half, half), truth),
        score_masks((TOP, TOP), truth),
        score_masks((LEFT, LEFT), truth),
        score_masks((TOP, TOP), truth, mask_type="amodal"),  # should be painted
        score_masks((TOP, TOP), (LEFT, LEFT)),  # nothing is hidden
    ]
    rows = rows_of(*results)
    assert leak(rows) == (1 / 2 + 1 + 0) / 3
    assert leak(rows[3:]) is None
    figures = split_figures(rows)
    assert figures["all"]["leak"] == figures["modal"]["leak"] == 1 / 2
    assert figures["amodal"]["leak"] is None


def test_pairs_of_sentences_about_one_target():
    def answers(image_id, modal_probability, amodal_probability):
        return [
            score_masks(
                (LEFT, LEFT),
                (LEFT, LEFT),
                mask_type=mask_type,
                probability=probability,
                image_id=image_id,
            )
            for mask_type, probability in [
                ("modal", modal_probability),
                ("amodal", amodal_probability),
            ]
        ]

    results = [
        *answers(1, 0.1, 0.9),
        *answers(2, 0.9, 0.1),
        *answers(3, 0.1, 0.2),
        *answers(4, 0.8, 0.9),
        *answers(5, 0.2, 0.9),
        *answers(6, None, None),
        answers(7, 0.1, 0.9)[0],  # without its other sentence
    ]
    figures = pair_figures(rows_of(*results))
    assert figures == {
        "both_right": 2 / 5,
        "swapped": 1 / 5,
        "both_modal": 1 / 5,
        "both_amodal": 1 / 5,
        "pairs": 5,
    }
    assert pair_figures(rows_of()) == {**dict.fromkeys(figures), "pairs": 0}


def test_cgf1_is_the_f1_of_instances_times_the_correlation_of_presence():
    def detect(*predicted, truth=()):
        rles = [masks.encode(one) for one in predicted]
        present = [True] * len(rles)
        return rank_detections(rles, [0.9] * len(rles), present, [masks.encode(t) for t in truth])

    three = mask("##..", "#...")  # IoU 0.75 with LEFT: right at six of ten thresholds
    queries = [
        detect(three, TOP, truth=[LEFT]),
        detect(truth=[LEFT]),
        detect(LEFT),  # false positive: counts in the correlation only
        detect(),
        detect(),
    ]
    f1 = 6 / 10 * 2 / (2 + 2)  # one right, two detections, two instances
    correlation = (1 * 2 - 1 * 1) / np.sqrt(2 * 2 * 3 * 3)  # tp 1, fp 1, fn 1, tn 2
    figures = cgf1_figures(queries, type_mcc=0.5)
    assert figures["positive_micro_f1"] == pytest.approx(f1)
    assert figures["presence_mcc"] == pytest.approx(correlation)
    assert figures["cgf1"] == pytest.approx(f1 * correlation)
    assert figures["typed_cgf1"] == pytest.approx(f1 * 0.5)
    # Without a query about something absent, the correlation is undefined.
    assert cgf1_figures(queries[:1], type_mcc=None)["cgf1"] is None
    assert set(cgf1_figures([], type_mcc=None).values()) == {None}


def test_the_predicted_type_chooses_the_mask():
    predicted = (LEFT, LEFT | TOP)
    truth = (TOP, LEFT | TOP)
    rows = rows_of(
        score_masks(predicted, truth, mask_type="amodal", probability=0.2),
        score_masks(predicted, truth, mask_type="amodal", probability=0.9),
        score_masks(predicted, truth, mask_type="modal", probability=0.9),
    )
    assert overlap_of_rows(rows).tolist() == [[4, 6, 4, 6], [6, 6, 6, 6], [4, 6, 6, 4]]
    for row, said in zip(rows, (0, 1, 1), strict=True):
        assert row["shared"].tolist() == row["both_shared"][said].tolist()


def test_occluded_iou_leaves_the_visible_truth_out():
    truth = mask("##..", "...."), mask("####", "....")  # two pixels are hidden
    predicted = mask("##..", "##.."), mask("###.", "##..")  # one of them, and two wrong pixels

    def occluded(probability, mask_type="amodal", truth=truth, ignore=None):
        result = score_masks(
            predicted, truth, mask_type=mask_type, probability=probability, ignore=ignore
        )
        return occluded_overlap(rows_of(result))[0, :2]

    assert occluded(0.9).tolist() == [1, 4]
    assert occluded(0.1).tolist() == [0, 4]
    assert occluded(0.9, ignore=mask("....", "##..")).tolist() == [1, 2]
    assert np.isnan(occluded(0.9, mask_type="modal")).all()
    assert np.isnan(occluded(0.9, truth=(LEFT, LEFT))).all()


def test_mask_type_scores_by_hand():
    probability = np.array([0.9, 0.8, 0.7, 0.4, 0.3, 0.1])
    is_amodal = np.array([True, True, False, True, False, False])  # tp 2, fp 1, fn 1, tn 2
    scores = mask_type_scores(probability, is_amodal)
    assert scores["accuracy"] == scores["f1"] == pytest.approx(4 / 6)
    assert scores["mcc"] == pytest.approx((2 * 2 - 1 * 1) / np.sqrt(3 * 3 * 3 * 3))


def test_mask_type_scores_where_they_are_undefined():
    assert set(mask_type_scores(np.zeros(0), np.zeros(0, bool)).values()) == {None}
    all_modal = mask_type_scores(np.array([0.1, 0.2]), np.array([False, False]))
    assert (all_modal["accuracy"], all_modal["f1"], all_modal["mcc"]) == (1, None, None)


def test_calibration_error_by_hand():
    # Confidences 0.92 and 0.94 share a bin in which one of two is right; 0.6 stands alone, right.
    probability = np.array([0.92, 0.06, 0.6])
    expected = 2 / 3 * abs(0.93 - 0.5) + 1 / 3 * abs(0.6 - 1)
    scores = mask_type_scores(probability, np.array([True, True, True]))
    assert scores["ece"] == pytest.approx(expected)
    assert mask_type_scores(np.array([1.0, 0.0]), np.array([True, False]))["ece"] == 0


@pytest.mark.parametrize(("decision", "accuracy"), [("modal", 1), ("amodal", 0)])
def test_the_decision_counts_where_the_probability_says_something_else(decision, accuracy):
    """As where `predict --mask-type` forces it. The probabilities are still as wrong as they
    are."""
    results = []
    for n in range(30):
        result = score_masks((LEFT, LEFT | TOP), (LEFT, LEFT | TOP), query_id=n, image_id=n)
        results.append(saying(result, amodal_probability=0.9, mask_type=decision))
    figures = split_figures(rows_of(*results))["mask_type"]
    assert figures["accuracy"] == figures["modal"] == accuracy
    assert figures["interval"]["accuracy"] == [accuracy, accuracy]
    assert figures["confusion"]["modal_as_modal"] == 30 * accuracy
    assert figures["ece"] == pytest.approx(0.9)


def test_split_figures_put_references_beside_the_decision():
    pair = (LEFT, LEFT | TOP)
    text = "the whole mug"
    rows = rows_of(
        score_masks(pair, pair, mask_type="modal", probability=0.1, text=text, query_id=1),
        score_masks(pair, pair, mask_type="amodal", probability=0.2, text=text, query_id=2),
    )
    figures = split_figures(rows)
    wrong = 4 / 6
    assert figures["all"]["giou"] == pytest.approx((1 + wrong) / 2, abs=1e-5)
    assert figures["modal"]["giou"] == pytest.approx(1, abs=1e-5)
    assert figures["amodal"]["giou"] == pytest.approx(wrong, abs=1e-5)
    assert figures["mask_type"]["accuracy"] == 0.5
    giou = {name: scores["giou"] for name, scores in figures["references"].items()}
    assert giou["oracle_type"] == pytest.approx(1, abs=1e-5)
    for name in ("always_modal", "always_amodal", "keyword"):
        assert giou[name] == pytest.approx((1 + wrong) / 2, abs=1e-5), name


def test_the_predicted_iou_of_an_oracle_has_no_error():
    results = []
    for predicted, truth, iou in ((LEFT, LEFT, 1.0), (LEFT, TOP, 2 / 6), (EMPTY, LEFT, 0.0)):
        result = score_masks((predicted, predicted), (truth, truth))
        results.append(saying(result, predicted_iou=iou))
    without_target = saying(score_masks((EMPTY, EMPTY), (EMPTY, EMPTY)), predicted_iou=0.5)
    without_prediction = score_masks((LEFT, LEFT), (TOP, TOP))
    not_counted = [without_target, without_prediction]

    figures = split_figures(rows_of(*results, *not_counted))["predicted_iou"]
    assert figures["error"] == pytest.approx(0, abs=1e-5)
    assert [point["queries"] for point in figures["curve"]] == [1, 1, 1]
    for point in figures["curve"]:
        assert point["confidence"] == pytest.approx(point["accuracy"], abs=1e-5)

    overconfident = [saying(result, predicted_iou=1.0) for result in results]
    figures = split_figures(rows_of(*overconfident))["predicted_iou"]
    assert figures["error"] == pytest.approx((0 + 4 / 6 + 1) / 3, abs=1e-5)
    assert [(p["queries"], p["confidence"]) for p in figures["curve"]] == [(3, 1.0)]
    assert split_figures(rows_of(*not_counted))["predicted_iou"] == {"error": None, "curve": []}


def test_the_area_under_the_curve_of_many_values_needs_no_table_of_pairs():
    values = np.arange(50_000.0)
    assert area_under_curve(values, values) == 0.5
    assert area_under_curve(values + 0.5, values) == pytest.approx(0.5 + 0.5 / len(values))


def test_presence_figures_by_hand():
    """One of 20 targets has a lower presence than one absent thing, and the same as another."""
    there = score_masks((LEFT, LEFT), (TOP, TOP))
    absent = score_masks((EMPTY, EMPTY), (EMPTY, EMPTY))
    values = [(there, 0.3)] + [(there, 0.6 + n / 100) for n in range(19)]
    values += [(absent, presence) for presence in (0.1, 0.2, 0.3, 0.5)]
    rows = rows_of(*(saying(result, presence=presence) for result, presence in values))
    figures = presence_figures(rows)
    assert figures.pop("auc") == pytest.approx(1 - 1.5 / 80)
    # The limit lies between the lowest target and the next one, near to that.
    expected = {"queries": 20, "absent_queries": 4, "refused_at_95": 1.0, "refused_at_90": 1.0}
    assert figures == expected
    assert presence_figures(rows[:20])["auc"] is None
    assert presence_figures(rows_of(there, absent))["queries"] == 0


def test_the_right_object_is_the_one_that_an_answer_overlaps_most():
    left, right, far = np.zeros((3, 8, 24), bool)
    left[:, :8], right[:, 8:16], far[:, 20:] = True, True, True
    shown = {1: ("cat", left), 2: ("cat", right), 3: ("dog", far)}
    queries = (
        Query(1, "the cat on the left", "modal", (1,)),
        Query(2, "the dog", "modal", (3,)),
        Query(3, "the cats", "modal", (1, 2)),
    )
    instances = tuple(Instance(i, name, masks.encode(m), None) for i, (name, m) in shown.items())
    truths = truths_of_image(ImageTruth(1, "a.png", (8, 24), instances, queries), 0)

    def row(number: int, mask: np.ndarray) -> np.ndarray:
        return np.array([score(Answer(masks.encode(mask)), truths[number]).row], ROW)

    both_cats = left | right
    both_cats[:, :1] = False
    assert row(0, left)[["rivals", "right_object"]].item() == (1, 1)
    assert row(0, both_cats)["right_object"] == 0  # the other one is covered more
    assert row(1, far)[["rivals", "right_object"]].item() == (0, 1)
    assert row(1, left)["right_object"] == 0
    assert row(1, np.zeros_like(far))["right_object"] == 0
    assert np.isnan(row(2, left)["right_object"])

    # What lies in a region to ignore counts nowhere.
    crowd = Instance(4, "crowd", masks.encode(right), None, ignore=True)
    truths = truths_of_image(ImageTruth(1, "a.png", (8, 24), (*instances, crowd), queries), 0)
    assert row(0, both_cats)["right_object"] == 1
    truths = truths_of_image(ImageTruth(1, "a.png", (8, 24), instances, queries), 0)

    rows = np.concatenate([row(0, left), row(0, both_cats), row(1, left), row(2, both_cats)])
    groups = breakdowns(rows)["class"]
    assert groups["one of several"]["right_object"] == 0.5
    assert groups["one of its kind"]["right_object"] == 0
    assert right_object(rows) == pytest.approx(1 / 3)
