"""Probabilities of the mask type that mean what they say: one temperature, fitted on sentences never trained on.

Validation queries in training wordings are answered almost without error, so a temperature fitted on them would make
the head overconfident on everything else. The sentences written by hand (data/intent.py) are as new to the head as
a user's; they need no images, so the fit is done whenever a run is evaluated, for any data source.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float
from scipy.optimize import minimize_scalar

from r2sm_jax.models.text_states import TextStates
from r2sm_jax.queries.intent import intent_sentences

RANGE = 0.2, 5.0
"""Temperatures that can come out."""


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

    def __init__(self, graphdef: nnx.GraphDef, texts: TextStates):
        rows = intent_sentences()
        self.amodal = np.array([row.mask_type == "amodal" for row in rows])
        self.states, self.mask = texts([row.text for row in rows])

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
