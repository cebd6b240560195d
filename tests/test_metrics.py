from dataclasses import replace

import numpy as np
import pytest

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Instance
from r2sm_jax.evaluation.iou import VARIANTS, lisa, overlap
from r2sm_jax.evaluation.report import mask_type_scores, split_figures
from r2sm_jax.evaluation.scorer import QueryResult, QueryTruth, score
from r2sm_jax.inference.prediction import Prediction
from r2sm_jax.query import Query


def mask(*rows: str) -> np.ndarray:
    return np.array([[c == "#" for c in row] for row in rows])


EMPTY = mask("....", "....")
LEFT = mask("##..", "##..")
TOP = mask("####", "....")


def result_of(
    predicted, truth, *, wants="modal", probability=0.0, text="the mug", ignore=None, query=1
) -> QueryResult:
    """Scores one answer; pairs are (modal, amodal)."""
    mask_type = None
    if probability is not None:
        mask_type = "amodal" if probability > 0.5 else "modal"
    prediction = Prediction(text, mask_type, probability, None, *predicted)
    instance = Instance(1, "", masks.encode(truth[0]), masks.encode(truth[1]))
    ignored = None if ignore is None else masks.encode(ignore)
    asked = QueryTruth(Query(query, text, wants, (1,)), 0, 1, *truth[0].shape, (instance,), ignored)
    (result,) = score([(asked, prediction)]).results
    return result


def test_overlap_counts_pixels_and_leaves_ignored_ones_out():
    assert overlap(LEFT, TOP) == (2, 6, 4, 4)
    assert overlap(LEFT, TOP, mask("#...", "#...")) == (1, 4, 2, 3)
    assert overlap(LEFT, TOP, ~EMPTY) == (0, 0, 0, 0)


def test_giou_is_the_mean_and_ciou_the_ratio_of_sums():
    scores = lisa(np.array([(2, 6, 4, 4), (8, 8, 8, 8), (0, 6, 3, 3)]))
    assert scores["giou"] == pytest.approx((2 / 6 + 1 + 0) / 3, abs=1e-5)
    assert scores["ciou"] == pytest.approx(10 / 20)


def test_empty_truth_scores_one_when_nothing_is_predicted_and_nought_otherwise():
    right, wrong = overlap(EMPTY, EMPTY), overlap(LEFT, EMPTY)
    assert (lisa(np.array([right]))["giou"], lisa(np.array([wrong]))["giou"]) == (1.0, 0.0)
    whole = (4, 4, 4, 4)
    assert lisa(np.array([whole, right]))["ciou"] == pytest.approx(
        1
    )  # nothing is added to either sum
    assert lisa(np.array([whole, right, wrong]))["ciou"] == pytest.approx(
        4 / 8
    )  # added to the union


def test_no_queries_have_no_score():
    for variant in VARIANTS.values():
        assert set(variant(np.zeros((0, 4), int)).values()) == {None}


def toy() -> np.ndarray:
    """Five queries: half right, all right, rightly empty, wrongly empty, false positives on an empty truth."""
    return np.array(
        [(50, 100, 60, 90), (80, 80, 80, 80), (0, 0, 0, 0), (0, 40, 0, 40), (0, 30, 30, 0)]
    )


def test_variants_differ_in_what_empty_masks_score():
    giou = {name: variant(toy())["giou"] for name, variant in VARIANTS.items()}
    assert giou["lisa"] == pytest.approx((0.5 + 1 + 1 + 0 + 0) / 5, abs=1e-6)
    assert giou["gres"] == pytest.approx((0.5 + 1 + 1 + 0 + 0) / 5)
    assert giou["segzero"] == pytest.approx((0.5 + 1 + 0 + 0 + 0) / 5)
    assert giou["mmr"] == pytest.approx((0.5 + 1 + 0) / 3, abs=1e-6)
    assert VARIANTS["lisa"](toy())["ciou"] == pytest.approx(130 / 250)
    assert VARIANTS["mmr"](toy())["ciou"] == pytest.approx(130 / 210)
    assert "ciou" not in VARIANTS["segzero"](toy())


def test_gres_judges_the_decision_that_there_is_no_target():
    scores = VARIANTS["gres"](toy())
    assert scores["ciou"] == pytest.approx(130 / 250)
    assert (scores["target_accuracy"], scores["no_target_accuracy"]) == (pytest.approx(2 / 3), 0.5)
    assert scores["pr@0.7"] == scores["pr@0.9"] == pytest.approx(1 / 3)


def test_the_predicted_type_chooses_the_mask():
    predicted, truth = (LEFT, LEFT | TOP), (TOP, LEFT | TOP)
    said_modal = result_of(predicted, truth, wants="amodal", probability=0.2)
    said_amodal = result_of(predicted, truth, wants="amodal", probability=0.9)
    undecided = result_of(predicted, truth, wants="amodal", probability=None)
    assert said_modal.chosen == said_modal.modal and said_modal.answered == (4, 6, 4, 6)
    assert said_amodal.chosen == said_amodal.amodal and said_amodal.answered == (6, 6, 6, 6)
    assert undecided.chosen == undecided.modal and undecided.decision is None
    wrong = result_of(predicted, truth, wants="modal", probability=0.9)
    assert wrong.answered == (4, 6, 6, 4)


def test_occluded_iou_leaves_the_visible_truth_out():
    truth = mask("##..", "...."), mask("####", "....")  # two pixels are hidden
    predicted = (
        mask("##..", "##.."),
        mask("###.", "##.."),
    )  # one of them is found, two pixels are wrong
    assert result_of(predicted, truth, wants="amodal", probability=0.9).occluded[:2] == (1, 4)
    assert result_of(predicted, truth, wants="amodal", probability=0.1).occluded[:2] == (0, 4)
    ignore = mask("....", "##..")
    assert result_of(predicted, truth, wants="amodal", probability=0.9, ignore=ignore).occluded[
        :2
    ] == (1, 2)
    assert result_of(predicted, truth, wants="modal", probability=0.9).occluded is None
    assert result_of(predicted, (LEFT, LEFT), wants="amodal", probability=0.9).occluded is None


def test_mask_type_scores_by_hand():
    probability = np.array([0.9, 0.8, 0.7, 0.4, 0.3, 0.1])
    wants = np.array([True, True, False, True, False, False])  # tp 2, fp 1, fn 1, tn 2
    scores = mask_type_scores(probability, wants)
    assert scores["accuracy"] == pytest.approx(4 / 6)
    assert scores["f1"] == pytest.approx(4 / 6)
    assert scores["mcc"] == pytest.approx((2 * 2 - 1 * 1) / np.sqrt(3 * 3 * 3 * 3))


def test_mask_type_scores_where_they_are_undefined():
    assert set(mask_type_scores(np.zeros(0), np.zeros(0, bool)).values()) == {None}
    all_modal = mask_type_scores(np.array([0.1, 0.2]), np.array([False, False]))
    assert (all_modal["accuracy"], all_modal["f1"], all_modal["mcc"]) == (1, None, None)


def test_calibration_error_by_hand():
    # Confidences 0.92 and 0.94 share a bin in which one of two is right; 0.6 stands alone and is right.
    probability, wants = np.array([0.92, 0.06, 0.6]), np.array([True, True, True])
    by_hand = 2 / 3 * abs(0.93 - 0.5) + 1 / 3 * abs(0.6 - 1)
    assert mask_type_scores(probability, wants)["ece"] == pytest.approx(by_hand)
    assert mask_type_scores(np.array([1.0, 0.0]), np.array([True, False]))["ece"] == 0


@pytest.mark.parametrize(("decision", "accuracy"), [("modal", 1), ("amodal", 0)])
def test_the_decision_counts_where_the_probability_says_something_else(decision, accuracy):
    """As where `predict --mask-type` forces it. The probabilities are still as wrong as they are."""
    one = replace(
        result_of((LEFT, LEFT | TOP), (LEFT, LEFT | TOP)), probability=0.9, decision=decision
    )
    figures = split_figures([replace(one, query_id=n, image_id=n) for n in range(30)])["mask_type"]
    assert figures["accuracy"] == figures["modal"] == accuracy
    assert figures["interval"]["accuracy"] == [accuracy, accuracy]
    assert figures["confusion"]["modal_as_modal"] == 30 * accuracy and figures[
        "ece"
    ] == pytest.approx(0.9)


def test_split_figures_put_references_beside_the_decision():
    predicted, truth = (LEFT, LEFT | TOP), (LEFT, LEFT | TOP)
    results = [
        result_of(predicted, truth, wants="modal", probability=0.1, text="the whole mug", query=1),
        result_of(predicted, truth, wants="amodal", probability=0.2, text="the whole mug", query=2),
    ]
    figures = split_figures(results)
    wrong = 4 / 6
    assert figures["all"]["giou"] == pytest.approx((1 + wrong) / 2, abs=1e-5)
    assert figures["modal"]["giou"] == pytest.approx(1, abs=1e-5)
    assert figures["amodal"]["giou"] == pytest.approx(wrong, abs=1e-5)
    assert figures["mask_type"]["accuracy"] == 0.5
    giou = {name: figures["references"][name]["giou"] for name in figures["references"]}
    assert giou["oracle_type"] == pytest.approx(1, abs=1e-5)
    for name in ("always_modal", "always_amodal", "keyword"):
        assert giou[name] == pytest.approx((1 + wrong) / 2, abs=1e-5), name


def test_the_predicted_iou_of_an_oracle_has_no_error():
    answers = [
        ((LEFT, LEFT), (LEFT, LEFT)),
        ((LEFT, LEFT), (TOP, TOP)),
        ((EMPTY, EMPTY), (LEFT, LEFT)),
    ]
    results = [
        replace(result_of(a, b), predicted_iou=p)
        for (a, b), p in zip(answers, (1.0, 2 / 6, 0.0), strict=True)
    ]
    nothing = replace(
        result_of((EMPTY, EMPTY), (EMPTY, EMPTY)), predicted_iou=0.5
    )  # no target: not counted
    untold = result_of((LEFT, LEFT), (TOP, TOP))
    found = split_figures([*results, nothing, untold])["predicted_iou"]
    assert found["error"] == pytest.approx(0, abs=1e-5) and [
        b["queries"] for b in found["curve"]
    ] == [1, 1, 1]
    assert all(b["confidence"] == pytest.approx(b["accuracy"], abs=1e-5) for b in found["curve"])
    proud = split_figures([replace(r, predicted_iou=1.0) for r in results])["predicted_iou"]
    assert proud["error"] == pytest.approx((0 + 4 / 6 + 1) / 3, abs=1e-5)
    assert [(b["queries"], b["confidence"]) for b in proud["curve"]] == [(3, 1.0)]
    assert split_figures([nothing, untold])["predicted_iou"] == {"error": None, "curve": []}
