"""The answer in words: what it says is in the prediction, and it is English."""

import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from stub_predictor import StubPredictor

from r2sm_jax.inference.answer import NUMBERS, find_name
from r2sm_jax.inference.postprocess import with_hiders
from r2sm_jax.inference.prediction import InstanceMask, Prediction

NAMED = ["the red mug", "all the cups", "a dog", "the scissors", "every sheep", "two-tone mug"]
UNNAMED = ["what could hold coffee?", "the mug owner", "the cat and the dog", "xyzzy", ""]
BLANK = np.zeros((10, 10), bool)


def box(height: int, width: int) -> np.ndarray:
    """A mask that fills the upper left corner."""
    mask = BLANK.copy()
    mask[:height, :width] = True
    return mask


def predict(query: str, *, hidden: int = 0, instances: int = 1, **changes) -> Prediction:
    """A prediction about a square of 100 pixels whose last rows are hidden."""
    modal, amodal = box(10 - hidden, 10), box(10, 10)
    mask_type = changes.get("mask_type", "amodal")
    mask = amodal if mask_type == "amodal" else modal
    found = (InstanceMask(0.9, 0.8, mask, modal, amodal),) * instances
    values = {
        "mask_type": mask_type,
        "amodal_probability": 0.9,
        "score": 0.72,
        "modal": modal,
        "amodal": amodal,
        "instances": found,
    }
    return Prediction(query=query, **(values | changes))


@settings(deadline=None)  # the first example reads the lexicon
@given(
    query=st.sampled_from(NAMED + UNNAMED),
    hidden=st.integers(0, 10),
    instances=st.integers(0, 12),
    score=st.none() | st.floats(-0.2, 1),
    presence=st.floats(0, 1),
    mask_type=st.sampled_from(["modal", "amodal", None]),
    undecided=st.booleans(),
    is_given=st.booleans(),
)
def test_an_answer_is_one_sentence_that_says_what_is_known(
    query, hidden, instances, score, presence, mask_type, undecided, is_given
):
    prediction = predict(
        query,
        hidden=hidden,
        instances=instances,
        score=score,
        presence=presence,
        mask_type=mask_type,
        undecided=undecided,
        is_given=is_given,
    )
    answer = prediction.answer
    assert re.fullmatch(r"[A-Z\d][^.]*(?:\d\.\d[^.]*)?\.", answer) and "  " not in answer
    assert not re.search(
        r"\b(?:is|are) (?:is|are)\b|^\S+ \S*(?:mugs|cups|dogs) is\b|None|nan", answer
    )
    if not prediction.mask.any():
        assert not re.search(r"IoU|hidden|shown", answer)
        assert "no " in answer.lower()
        return

    # Numbers.
    share = re.search(r"about (\d+) % of", answer)
    if share:
        assert abs(int(share[1]) - 10 * hidden) <= 2.5
    if mask_type is None or hidden == 0:
        assert not share and " by " not in answer
    quality = re.search(r"IoU about (-?\d\.\d)", answer)
    assert (quality is None) == (score is None)
    if quality and score is not None:
        assert abs(float(quality[1]) - max(score, 0)) <= 0.0501
    if instances > 1:
        number = NUMBERS[instances] if instances < len(NUMBERS) else str(instances)
        assert number in answer.lower().split()

    # Doubt.
    is_unsure = (score is not None and score < 0.3) or presence < 0.5
    assert ("may be here" in answer) == (is_unsure and not is_given)
    assert ("is given" in answer) == is_given
    assert undecided == ("may mean the other" in answer)


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        (
            predict("the red mug", hidden=3),
            "The red mug is found; about 30 % of it is hidden; its complete shape is shown (IoU "
            "about 0.7).",
        ),
        (
            predict("the whole scissors, hidden parts included", mask_type="modal"),
            "The scissors are found; no hidden part of them is found; their visible parts are "
            "shown (IoU about 0.7).",
        ),
        (
            predict("every red mug", hidden=2, instances=2, hidden_by="laptop"),
            "Two red mugs are found; about 20 % of their area is hidden by the laptop; their "
            "complete shapes are shown (IoU about 0.7).",
        ),
        (
            predict("what could hold coffee?", hidden=2, score=None, is_given=True),
            "The visible mask of an object is given; about 20 % of it is hidden; its complete "
            "shape is shown.",
        ),
        (
            predict("the cat", modal=BLANK, amodal=BLANK, instances=0, presence=0.02),
            "There is no cat in this picture.",
        ),
        (
            predict("all the cats", modal=BLANK, amodal=BLANK, instances=0, presence=0.4),
            "There are probably no cats in this picture.",
        ),
    ],
)
def test_answers_are_english(prediction, expected):
    assert prediction.answer == expected


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("the red mug", "red mug"),
        ("the whole red mug, hidden parts included", "red mug"),
        ("show me the complete shape of the red mug", "red mug"),
        ("black cat that the laptop hides", "black cat"),
        ("the car half hidden by the van", "car"),
        ("all of the wine glasses on the left", "wine glasses"),
        # More than one target, a part, or a clause: the first noun is not what is meant.
        ("the cat and the dog", None),
        ("the mug handle", "mug handle"),
        ("the mug owner", None),
        ("the mug's handle", None),
        ("the laptop hides a cat", None),
        ("The laptop is in front. Draw the cat", None),
        ("what the mug stands on", None),
        ("the cups, bottles", None),
        ("circle mug", None),
        ("", None),
    ],
)
def test_a_name_is_the_target_or_none(query, name):
    found = find_name(query)
    assert (None if found is None else str(found)) == name


def test_what_hides_a_thing_is_named_only_where_the_call_has_found_it():
    hider = predict("the laptop", modal=~box(7, 10), amodal=~box(7, 10))
    target = predict("the black cat", hidden=3)
    first, second = with_hiders([target, hider])
    assert (first.hidden_by, second.hidden_by) == ("laptop", "")
    assert "hidden by the laptop" in first.answer

    unsure = predict("the laptop", modal=~box(7, 10), amodal=~box(7, 10), score=0.1)
    elsewhere = predict("the laptop", modal=box(7, 10), amodal=box(7, 10))
    nameless = predict("what hides it?", modal=~box(7, 10), amodal=~box(7, 10))
    for other in (unsure, elsewhere, nameless, target):
        assert with_hiders([target, other])[0].hidden_by == ""


def test_the_answer_is_in_the_json_and_the_summary():
    predictor = StubPredictor()
    predictor.set_image(np.full((24, 32, 3), 200, np.uint8))
    for prediction in predictor.predict(["the red mug", "the whole red mug"]):
        values = prediction.to_json()
        assert values["answer"] == prediction.answer and "red mug is found" in prediction.answer
        assert prediction.answer in prediction.summary()
