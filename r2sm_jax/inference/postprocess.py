"""From the model's output for one query to a `Prediction`. The presence of a target gates it so:

fused mask      empty below `ModelConfig.presence_threshold`; `R2SM.decode` has emptied it
instances       the target is present, and so is the slot (`MIN_INSTANCE_PRESENCE`)
candidates      never gated: average precision ranks all slots by their confidence
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import ArrayLike, Float
from scipy.special import expit

from r2sm_jax.config import ModelConfig
from r2sm_jax.data import masks
from r2sm_jax.data.letterbox import Letterbox
from r2sm_jax.data.masks import Mask
from r2sm_jax.errors import InputError
from r2sm_jax.inference.decision import decide
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


def to_prediction(
    request: Request,
    output: R2SMOutput,
    letterbox: Letterbox,
    config: ModelConfig,
    calibration: Calibration,
    *,
    unread: str = "",
    abstain: float = 0.0,
    with_candidates: bool = False,
    with_logits: bool = False,
) -> Prediction:
    """Makes the prediction for one query by its words.

    Args:
        request: what was asked.
        output: numpy arrays without the axes b and k.
        letterbox: that of the image.
        config: names the mask-type head, and has the threshold of presence.
        calibration: says which answers are called unsure.
        unread: the end of the query that the language model did not read.
        abstain: a probability that is nearer than this to 0.5 is undecided.
        with_candidates: fill in `Prediction.candidates`.
        with_logits: fill in `Prediction.mask_logits`.

    Raises InputError for an oracle head where no mask type is forced.
    """
    if config.head == "oracle" and request.mask_type == "auto":
        raise InputError(
            "this run's head is the oracle, which needs the truth; pass --mask-type modal or amodal"
        )
    amodal_logit = float(output.amodal_logit)
    decision = decide(config.head, request.text, amodal_logit, request.mask_type, abstain=abstain)
    is_amodal = decision.mask_type == "amodal"
    fused, slots = output.fused, output.slots
    modal, amodal = resize_masks(fused.modal, fused.amodal, letterbox)
    mask_logits = None
    if with_logits:
        mask_logits = letterbox.undo(np.asarray(fused.modal))
        if is_amodal:
            mask_logits = np.maximum(mask_logits, letterbox.undo(np.asarray(fused.amodal)))

    slot_presence = expit(slots.presence)
    has_target = fused.presence > config.presence_threshold
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
    instances.sort(key=lambda instance: -instance.score)

    return Prediction(
        query=request.text,
        mask_type=decision.mask_type,
        amodal_probability=decision.amodal_probability,
        score=float(fused.iou[int(is_amodal)]),
        modal=modal,
        amodal=amodal,
        instances=tuple(instances),
        candidates=tuple(candidates),
        mask_logits=mask_logits,
        # In double precision, since the scorer computes the logit again from this probability.
        presence=float(expit(np.float64(fused.presence))),
        undecided=decision.undecided,
        unread=unread,
        unsure_below=float(calibration.unsure_below),
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
