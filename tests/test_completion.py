"""Scores of completion, beside rules that learn nothing."""

from dataclasses import replace

import numpy as np
import pytest
from stub_predictor import StubCompleter, StubOutliner
from tiny_crops import rectangle

from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.evaluation.completion import (
    ObjectScore,
    completion_figures,
    convex_hull,
    hulls_inside_others,
    methods_of,
    prompt_figures,
    score_completion,
    score_object,
)
from r2sm_jax.inference.crop_models import Completion
from r2sm_jax.query import Query


@pytest.fixture
def image():
    return np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8)


def test_scores_of_completion_by_hand():
    visible, truth = rectangle(10, 10, 0, 0, 4, 10), rectangle(10, 10, 0, 0, 8, 10)
    answer = rectangle(10, 10, 0, 0, 6, 10)
    score = score_object(visible, truth, answer)
    assert (score.amodal_iou, score.occluded_iou, score.hidden_share) == (0.75, 0.5, 0.5)
    # The given mask counts, also where the answer leaves it out.
    assert score_object(visible, truth, truth & ~visible).amodal_iou == 1


def test_the_hull_of_a_cut_rectangle_is_the_rectangle_and_inside_neighbours_only_what_they_cover():
    whole = rectangle(40, 40, 5, 5, 30, 25)
    cut = whole & ~rectangle(40, 40, 10, 0, 20, 20)
    np.testing.assert_array_equal(convex_hull(cut), whole)
    neighbour = rectangle(40, 40, 10, 0, 15, 20)
    (answer,) = hulls_inside_others(np.zeros((40, 40, 3), np.uint8), [cut], neighbour)
    np.testing.assert_array_equal(answer, cut | (whole & neighbour))


def test_a_line_and_a_point_are_their_own_hulls():
    for mask in (rectangle(9, 9, 2, 3, 7, 4), rectangle(9, 9, 2, 3, 3, 4)):
        np.testing.assert_array_equal(convex_hull(mask), mask)


def test_completion_is_scored_over_hidden_and_other_objects_with_all_neighbours(image):
    whole, front = rectangle(60, 80, 10, 10, 50, 40), rectangle(60, 80, 30, 5, 60, 35)
    instances = (
        Instance(1, "cup", whole & ~front, whole),
        Instance(2, "box", front, front),
        Instance(3, "cat", rectangle(60, 80, 70, 50, 80, 60), None),
    )
    sample = Sample(1, "a.png", image, instances, ())
    seen = []

    def complete(image, visible, others):
        seen.append(others)
        return hulls_inside_others(image, visible, others)

    figures = score_completion({"neighbours": complete}, [sample])["neighbours"]
    assert figures["hidden"]["objects"] == figures["not_hidden"]["objects"] == 1
    assert figures["not_hidden"]["amodal_iou"] == 1
    np.testing.assert_array_equal(seen[0], whole | front | instances[2].modal)


def test_a_completer_is_told_all_other_masks_or_gets_a_mask_alone(image):
    told, completer = [], StubCompleter()
    mask = rectangle(60, 80, 10, 10, 50, 40)
    for method in methods_of(completer).values():
        (answer,) = method(image, [mask], ~mask)
        told.append(completer.all_visible)
    assert told[0] is not None and told[1] is None
    # The predicted IoU, 0.9, of a mask that is right.
    figures = completion_figures([score_object(mask, mask, answer)])
    assert figures["iou_error"] == pytest.approx(0.1) and figures["hidden_auc"] is None


def test_visible_masks_are_scored_by_kind_of_prompt_and_no_kind_repeats_another(image):
    cup, cat = rectangle(60, 80, 10, 10, 50, 40), rectangle(60, 80, 55, 45, 75, 55)
    instances = Instance(1, "cup", cup, cup), Instance(2, "cat", cat, None)
    queries = Query(1, "the cup", "modal", (1,)), Query(2, "both", "modal", (1, 2))
    sample = Sample(1, "a.png", image, instances, queries)
    asked = []

    def find(image, texts):
        asked.extend(texts)
        return [cup] * len(texts)

    figures = prompt_figures(StubOutliner(), [sample], find)
    assert asked == ["the cup"]
    assert figures["box"] == {"objects": 2, "iou": 1, "iou_error": 1 - StubOutliner.predicted_iou}
    assert figures["sentence"] == {"objects": 1, "iou": 1}
    alone = prompt_figures(StubOutliner(), [replace(sample, instances=instances[:1], queries=())])
    of_named = figures["click, of objects with a sentence"]
    assert of_named == {"objects": 1, "iou": alone["click"]["iou"]}
    assert list(figures) == ["box", "click", "click, of objects with a sentence", "sentence"]


def test_the_order_of_hidden_and_other_objects_is_scored():
    shares, probabilities = (0.5, 0.4, 0.0, 0.0), (0.9, 0.3, 0.3, 0.1)
    scores = [
        ObjectScore(1.0, 0.0, share, 1.0, probability)
        for share, probability in zip(shares, probabilities, strict=True)
    ]
    assert completion_figures(scores)["hidden_auc"] == 3.5 / 4


def test_the_probability_of_a_hidden_part_is_held_against_what_was_added():
    visible = rectangle(60, 80, 0, 10, 45, 40)
    above, below, much = (rectangle(60, 80, 0, 10, x1, 40) for x1 in (51, 49, 60))
    answers = (above, 0.9), (much, 0.4), (below, 0.6), (visible, 0.1)
    scores = [
        score_object(visible, much, Completion(mask, 1.0, probability, 0.0))
        for mask, probability in answers
    ]
    assert [score.answer_added for score in scores] == pytest.approx([6 / 51, 0.25, 4 / 49, 0])
    says_hidden = completion_figures(scores)["says_hidden"]
    assert says_hidden == {"much_added": 0.5, "little_added": 0.5}
    hull = completion_figures([score_object(visible, much, much)])
    assert hull["says_hidden"] == {"much_added": None, "little_added": None}
