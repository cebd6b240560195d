"""Calibrated probabilities of the mask type: one temperature, fitted on sentences that are never trained on.

The head answers validation queries in training wordings almost without error. A temperature fitted on those would make
it overconfident on everything else. Sentences written by hand are as new to the head as those of a user. They need no
images, so the temperature is fitted at every evaluation, for any data source.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float
from scipy.optimize import minimize_scalar

from r2sm_jax.models.text_states import TextStates
from r2sm_jax.query import Sentence

RANGE = 0.2, 5.0
"""Smallest and largest temperature."""


def fit_temperature(logits: Float[np.ndarray, " n"], amodal: Bool[np.ndarray, " n"]) -> float:
    """The temperature T at which sigmoid(logits / T) has the smallest cross entropy.

    Source: Guo et al. 2017, "On Calibration of Modern Neural Networks", section 4.2.
    """
    signed = np.where(amodal, logits, -logits)

    def cross_entropy(log_temperature: float) -> float:
        return float(np.logaddexp(0, -signed / np.exp(log_temperature)).mean())

    found: Any = minimize_scalar(cross_entropy, bounds=tuple(np.log(RANGE)), method="bounded")
    return float(np.exp(found.x))


class Calibration:
    """Fits the temperature of a run with a learned head."""

    def __init__(self, graphdef: nnx.GraphDef, texts: TextStates, sentences: Sequence[Sentence]):
        self.amodal = np.array([sentence.mask_type == "amodal" for sentence in sentences])
        self.states, self.mask = texts([sentence.text for sentence in sentences])

        @jax.jit
        def logits(params: nnx.State, constants: nnx.State, states: jax.Array, mask: jax.Array) -> jax.Array:
            return nnx.merge(graphdef, params, constants).type_logit(states[None], mask[None])[0]

        self._logits = logits

    def __call__(self, params: nnx.State, constants: nnx.State) -> nnx.State:
        """`constants` with the temperature that fits `params`."""
        temperature = fit_temperature(np.asarray(self._logits(params, constants, self.states, self.mask)), self.amodal)
        before: Any = constants["type_temperature"]
        value = jax.device_put(jnp.float32(temperature), before[...].sharding)
        return nnx.merge_state(constants, nnx.State({"type_temperature": before.replace(value)}))
