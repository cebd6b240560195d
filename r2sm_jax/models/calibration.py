"""The numbers that are fitted to the answers of a trained model, for each kind of answers.

    words                             the segmenter
    box, click                        what the outliner draws
    completed_box, completed_click    the complete masks of that
    alone, neighbours                 complete masks of given ones, without and with the others'

evaluation/fit_calibration.py and crop_selection.py fit them; `config.json` stores them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float

from r2sm_jax.config import UNSURE_BELOW

Number = float | Float[jax.Array, ""]
MIN_ADDED = 0.001
"""A completion that adds less than this share of the visible area adds nothing."""


class Calibration(NamedTuple):
    """What is fitted to one kind of answers. The defaults change nothing.

        IoU       sigmoid(iou_scale logit(predicted) + agreement_scale logit(agreement) + iou_shift)
        hidden    sigmoid(hidden_scale predicted + added_scale log(added) + hidden_shift)

    It is an argument of the model rather than a part of its weights: refitting it neither copies
    weights nor compiles anything anew.
    """

    type_temperature: Number = 1.0
    """Of words: divides the logit that a query asks for the amodal mask."""
    iou_scale: Number = 1.0
    iou_shift: Number = 0.0
    presence_bias: Number = 0.0
    """Of words: is added to the logit that a query has a target."""
    mask_shift: Number = 0.0
    """Of words: is added to `ModelConfig.mask_threshold`."""
    unsure_below: Number = UNSURE_BELOW
    """Predicted IoUs below this are called unsure."""
    agreement_scale: Number = 0.0
    """Of clicks, around which several crops are read."""
    # Of completions only:
    hidden_scale: Number = 1.0
    hidden_shift: Number = 0.0
    added_scale: Number = 0.0
    kept_below: Number = 0.0
    """Where a part is hidden with a lower probability, the given mask is the answer."""

    def iou(
        self, predicted: Float[ArrayLike, "*m"], agreement: Float[ArrayLike, "*m"] = 0.5
    ) -> Float[Any, "*m"]:
        """Calibrates predicted IoUs, from 0 to 1: arrays of NumPy or of JAX."""
        array = jnp if isinstance(predicted, jax.Array) else np

        def logit(probability: ArrayLike) -> ArrayLike:
            # Neither may be 0 or 1, where logits are infinite.
            clipped = array.clip(probability, 0.001, 0.999)
            return array.log(clipped / (1 - clipped))

        logits = self.iou_scale * logit(predicted) + self.agreement_scale * logit(agreement)
        logits = logits + self.iou_shift
        return (1 + array.tanh(logits / 2)) / 2  # a sigmoid that does not overflow

    def hidden_logit(
        self, predicted: Float[ArrayLike, "*m"], added: Float[ArrayLike, "*m"]
    ) -> Float[Any, "*m"]:
        """Calibrates logits that a part is hidden.

        Args:
            predicted: by the completer's token.
            added: the area that the completer adds, as a share of the visible area.
        """
        log_added = np.log(np.maximum(added, MIN_ADDED))
        return self.hidden_scale * predicted + self.added_scale * log_added + self.hidden_shift


NOT_CALIBRATED = Calibration()
