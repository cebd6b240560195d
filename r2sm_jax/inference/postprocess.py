"""Makes a `Prediction` of what words find, or of what is drawn at a place.

Of words the presence of a target says what is left out:

fused mask      empty below `ModelConfig.presence_threshold`; `R2SM.decode` has emptied it
instances       the target is present, and so is the slot (`MIN_INSTANCE_PRESENCE`)
absent slots    for average precision, which ranks all slots by their confidence

Where the scores of each kind of answer come from: the table in docs/predict.md.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float
from scipy.special import expit

from r2sm_jax.data import masks
from r2sm_jax.data.letterbox import Letterbox
from r2sm_jax.data.masks import Mask
from r2sm_jax.inference.decision import Decision
from r2sm_jax.inference.parts import Drawn
from r2sm_jax.inference.prediction import AbsentSlot, Candidate, InstanceMask, Prediction
from r2sm_jax.inference.prompts import Request
from r2sm_jax.models.calibration import Calibration
from r2sm_jax.models.r2sm import R2SMOutput
from r2sm_jax.query import AMODAL, MODAL

MIN_INSTANCE_PRESENCE = 0.5
"""A `Prediction` leaves out instances with a lower presence probability."""


def resize_masks(logits: Float[np.ndarray, "2 h w"], letterbox: Letterbox) -> tuple[Mask, Mask]:
    """Returns the modal and the amodal mask [H W] from mask logits in the letterbox frame."""
    modal, amodal = map(letterbox.undo_mask, logits)
    # The model gives no amodal logit below the modal one. But enlarging rounds each of the two, so
    # the union makes sure that the amodal mask contains the modal one.
    return modal, amodal | modal


def by_words(
    query: str,
    decision: Decision,
    output: R2SMOutput,
    letterbox: Letterbox,
    presence_threshold: float,
    calibration: Calibration,
    *,
    unread: str = "",
    with_absent_slots: bool = False,
    with_logits: bool = False,
) -> Prediction:
    """Makes the prediction for a query of what its words find.

    Args:
        query: the sentence.
        decision: which mask it asks for.
        output: numpy arrays without the axes b and k.
        letterbox: that of the image.
        presence_threshold: `ModelConfig.presence_threshold`.
        calibration: says which answers are called unsure.
        unread: the end of the sentence that the language model did not read.
        with_absent_slots: fill in `Prediction.absent_slots`.
        with_logits: fill in `Prediction.mask_logits`.
    """
    asked = AMODAL if decision.mask_type == "amodal" else MODAL
    # The first of the axis q is the fused pair, the others are slots.
    logits = np.asarray(output.masks)
    modal, amodal = resize_masks(logits[0], letterbox)
    mask_logits = None
    if with_logits:
        mask_logits = letterbox.undo(logits[0, MODAL])
        if asked == AMODAL:
            mask_logits = np.maximum(mask_logits, letterbox.undo(logits[0, AMODAL]))

    presence = expit(output.presence)
    has_target = output.presence[0] > presence_threshold
    is_present = has_target & (presence >= MIN_INSTANCE_PRESENCE)
    instances = []
    absent_slots = []
    for slot in range(1, len(presence)):
        # Most slots are absent, and resizing their masks would take most of the time.
        if not is_present[slot] and not with_absent_slots:
            continue
        pair = resize_masks(logits[slot], letterbox)
        mask = pair[asked]
        if not mask.any():
            continue

        confidence = float(presence[slot] * output.iou[slot, asked])
        if is_present[slot]:
            instances.append(InstanceMask(float(presence[slot]), confidence, mask, *pair))
        else:
            rate = masks.occlude_rate(*pair)
            absent_slots.append(AbsentSlot(masks.encode(mask), confidence, rate))
    instances.sort(key=lambda instance: -instance.presence)

    return Prediction(
        query=query,
        **decision._asdict(),
        score=float(output.iou[0, asked]),
        modal=modal,
        amodal=amodal,
        instances=tuple(instances),
        absent_slots=tuple(absent_slots),
        mask_logits=mask_logits,
        # In double precision, since calibration computes the logit again from this probability.
        presence=float(expit(np.float64(output.presence[0]))),
        unread=unread,
        # Without a decision (the head `none`) both masks are the same one.
        has_both_masks=decision.amodal_probability is not None,
        unsure_below=float(calibration.unsure_below),
    )


def at_place(
    request: Request,
    decision: Decision,
    drawn: Sequence[Drawn],
    size: tuple[int, int],
    *,
    unread: str = "",
) -> Prediction:
    """Makes the prediction for a query of the objects that were drawn at its place: one, or those
    that a finder found and the sentence chose.

    If `drawn` is empty, the prediction is absent (presence 0); a box with an empty outline is not.
    Where a given mask is itself the answer, `score` is None, and the confidence of its instance is
    its presence alone.

    Args:
        size: height and width of the image.
    """
    answers = [one.answer(decision.mask_type) for one in drawn]
    outlines = [one.outline for one in drawn]
    completions = [one.completion for one in drawn if one.completion is not None]
    instances = []
    for one, answer in zip(drawn, answers, strict=True):
        visible, presence = one.outline.mask, one.outline.presence
        if visible.any():
            confidence = presence * answer.iou
            instances.append(InstanceMask(presence, confidence, answer.mask, visible, one.complete))
    instances.sort(key=lambda instance: -instance.presence)
    pairs = zip(outlines, answers, strict=True)
    ious = [answer.iou for outline, answer in pairs if not (outline.is_given and answer is outline)]
    unsure_below = min((answer.unsure_below for answer in answers), default=0.0)
    if len(answers) > 1 and any(answer.iou < answer.unsure_below for answer in answers):
        # One unsure object makes the answer unsure, though the score is the mean of all.
        unsure_below = 1.0
    candidates = [candidate for outline in outlines for candidate in outline.candidates]
    return Prediction(
        query=request.text,
        **decision._asdict(),
        score=float(np.mean(ious)) if ious else None,
        modal=masks.union((outline.mask for outline in outlines), size),
        amodal=masks.union((one.complete for one in drawn), size),
        instances=tuple(instances),
        candidates=tuple(Candidate(masks.encode(one.mask), one.iou) for one in candidates),
        presence=max((outline.presence for outline in outlines), default=0.0),
        unread=unread,
        is_given=isinstance(request.place, np.ndarray),
        has_both_masks=len(completions) == len(drawn),
        hidden_probability=max((one.hidden_probability for one in completions), default=None),
        unsure_below=unsure_below,
    )


def name_hiders(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Returns the predictions about one image, each with the query of the other one whose target
    hides it: whose visible mask covers at least half of the hidden part, and more of it than any
    other's."""
    named = []
    for prediction in predictions:
        hidden = prediction.occluded
        most = max(1, masks.area(hidden)) / 2
        hider = ""
        for other in predictions:
            covered = masks.area(hidden & other.modal)
            is_other = other.query not in ("", prediction.query) and not other.is_unsure
            if is_other and covered >= most:
                hider, most = other.query, covered
        named.append(replace(prediction, hidden_by=hider) if hider else prediction)
    return named
