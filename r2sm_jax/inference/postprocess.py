"""Makes a `Prediction` of what words find, or of what is drawn at a place.

Of words the presence of a target says what is left out:

fused mask      empty below `ModelConfig.presence_threshold`; `R2SM.decode` has emptied it
instances       the target is present, and so is the slot (`MIN_INSTANCE_PRESENCE`)
candidates      never gated: average precision ranks all slots by their confidence
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import ArrayLike, Float
from scipy.special import expit

from r2sm_jax.data import masks
from r2sm_jax.data.letterbox import Letterbox
from r2sm_jax.data.masks import Mask
from r2sm_jax.inference.decision import Decision
from r2sm_jax.inference.parts import Drawn
from r2sm_jax.inference.prediction import Candidate, InstanceMask, Prediction
from r2sm_jax.inference.prompts import Request
from r2sm_jax.models.r2sm import Calibration, R2SMOutput

MIN_INSTANCE_PRESENCE = 0.5
"""A `Prediction` leaves out instances with a lower presence probability."""


def resize_masks(
    modal_logits: Float[ArrayLike, "h w"],
    amodal_logits: Float[ArrayLike, "h w"],
    letterbox: Letterbox,
) -> tuple[Mask, Mask]:
    """Returns the modal and the amodal mask [H W] from mask logits in the letterbox frame."""
    modal = letterbox.undo_mask(np.asarray(modal_logits))
    # The model gives no amodal logit below the modal one. But enlarging rounds each of the two, so
    # the union makes sure that the amodal mask contains the modal one.
    return modal, letterbox.undo_mask(np.asarray(amodal_logits)) | modal


def by_words(
    query: str,
    decision: Decision,
    output: R2SMOutput,
    letterbox: Letterbox,
    presence_threshold: float,
    calibration: Calibration,
    *,
    unread: str = "",
    with_candidates: bool = False,
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
        with_candidates: fill in `Prediction.candidates`.
        with_logits: fill in `Prediction.mask_logits`.
    """
    is_amodal = decision.mask_type == "amodal"
    fused, slots = output.fused, output.slots
    modal, amodal = resize_masks(fused.modal, fused.amodal, letterbox)
    mask_logits = None
    if with_logits:
        mask_logits = letterbox.undo(np.asarray(fused.modal))
        if is_amodal:
            mask_logits = np.maximum(mask_logits, letterbox.undo(np.asarray(fused.amodal)))

    slot_presence = expit(slots.presence)
    has_target = fused.presence > presence_threshold
    is_present = has_target & (slot_presence >= MIN_INSTANCE_PRESENCE)
    instances = []
    candidates = []
    for slot in range(len(slot_presence)):
        # Most slots are absent, and resizing their masks would take most of the time.
        if not is_present[slot] and not with_candidates:
            continue
        slot_modal, slot_amodal = resize_masks(slots.modal[slot], slots.amodal[slot], letterbox)
        mask = slot_amodal if is_amodal else slot_modal
        if not mask.any():
            continue

        confidence = float(slot_presence[slot] * slots.iou[slot, int(is_amodal)])
        if is_present[slot]:
            presence = float(slot_presence[slot])
            instances.append(InstanceMask(presence, confidence, mask, slot_modal, slot_amodal))
        if with_candidates:
            rle = masks.encode(mask)
            rate = masks.occlude_rate(slot_modal, slot_amodal)
            candidates.append(Candidate(rle, confidence, bool(is_present[slot]), rate))
    instances.sort(key=lambda instance: -instance.presence)

    return Prediction(
        query=query,
        mask_type=decision.mask_type,
        amodal_probability=decision.amodal_probability,
        undecided=decision.undecided,
        target=decision.target,
        score=float(fused.iou[int(is_amodal)]),
        modal=modal,
        amodal=amodal,
        instances=tuple(instances),
        candidates=tuple(candidates),
        mask_logits=mask_logits,
        # In double precision, since the scorer computes the logit again from this probability.
        presence=float(expit(np.float64(fused.presence))),
        unread=unread,
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
    that a finder found and the sentence chose. Without any the target is absent.

    What is given is right: it has no score, and ranks first for average precision.

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
    # A mask that was given has no score.
    pairs = zip(outlines, answers, strict=True)
    ious = [answer.iou for one, answer in pairs if not (one.is_given and answer is one)]
    candidates = [candidate for outline in outlines for candidate in outline.candidates]
    return Prediction(
        query=request.text,
        mask_type=decision.mask_type,
        amodal_probability=decision.amodal_probability,
        undecided=decision.undecided,
        target=decision.target,
        score=float(np.mean(ious)) if ious else None,
        modal=masks.union((outline.mask for outline in outlines), size),
        amodal=masks.union((one.complete for one in drawn), size),
        instances=tuple(instances),
        candidates=tuple(Candidate(masks.encode(one.mask), one.iou) for one in candidates),
        presence=max((outline.presence for outline in outlines), default=0.0),
        unread=unread,
        is_given=any(outline.is_given for outline in outlines),
        has_both_masks=len(completions) == len(drawn),
        hidden_probability=max((one.hidden_probability for one in completions), default=None),
        unsure_below=min((answer.unsure_below for answer in answers), default=0.0),
    )


def name_hiders(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Returns the predictions about one image, each with the query of the other one whose target
    hides it: whose visible mask covers most of the hidden part, and at least half of it."""
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
