"""Trains a mask-type head alone, on token states of sentences, without images.

The language model is frozen and a head reads only its token states, so a head trains in seconds.
Loss, optimizer and token dropout are those of `train.py`, which trains the same head together with
the masks. It is no task of loop.py: nothing of so short a training is saved or resumed.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Bool, Float, Float16, Int

from r2sm_jax.config import DataConfig, LossConfig
from r2sm_jax.data.prepare import drop_tokens
from r2sm_jax.data.text_states import TextStates
from r2sm_jax.models.mask_type_heads import LEARNED, member_logits
from r2sm_jax.training.losses import type_loss
from r2sm_jax.training.step import init_state, update

BATCH_SIZE = 128
PADDED_LENGTHS = (12, 16, 22, 32, 48)
"""Sentences are padded to the next of these numbers of tokens; longer ones are cut to the last."""


class PaddedSentences(NamedTuple):
    """Sentences of similar length as a head reads them."""

    rows: Int[np.ndarray, " n"]
    """Their positions in the list of all sentences."""
    states: Float16[np.ndarray, "n t l e"]
    mask: Bool[np.ndarray, "n t"]


def pad_sentences(texts: TextStates, sentences: Sequence[str]) -> list[PaddedSentences]:
    """Encodes sentences and groups them by padded length: one group for each length that occurs."""
    num_tokens = np.minimum(texts.tokenizer.count(sentences), PADDED_LENGTHS[-1])
    padded_length = np.searchsorted(PADDED_LENGTHS, num_tokens)
    groups = []
    for i, length in enumerate(PADDED_LENGTHS):
        rows = np.flatnonzero(padded_length == i)
        if len(rows):
            states, mask = texts([sentences[row] for row in rows.tolist()], length)
            groups.append(PaddedSentences(rows, states, mask))
    return groups


class TrainedHead(NamedTuple):
    """A head and its weights."""

    graphdef: nnx.GraphDef
    params: nnx.State

    def amodal_logits(self, groups: Sequence[PaddedSentences]) -> Float[np.ndarray, " n"]:
        """Returns the logits of all sentences in their original order; above 0 is amodal."""
        logits = np.zeros(sum(len(group.rows) for group in groups))
        for group in groups:
            for start in range(0, len(group.rows), BATCH_SIZE):
                rows = group.rows[start : start + BATCH_SIZE]
                # Repeated until the batch is full, so that one program serves all batches.
                chosen = np.resize(np.arange(start, start + len(rows)), BATCH_SIZE)
                inputs = (group.states[chosen], group.mask[chosen])
                logits[rows] = _apply_head(self.graphdef, self.params, *inputs)[: len(rows)]
        return logits


@partial(jax.jit, static_argnums=0)
def _apply_head(
    graphdef: nnx.GraphDef, params: nnx.State, states: jax.Array, mask: jax.Array
) -> jax.Array:
    head = nnx.merge(graphdef, params)
    return head(states[None].astype(jnp.float32), mask[None])[0]


def train_head(
    name: str,
    groups: Sequence[PaddedSentences],
    is_amodal: Bool[np.ndarray, " n"],
    optimizer: optax.GradientTransformation,
    *,
    num_steps: int,
    seed: int = 0,
) -> TrainedHead:
    """Trains a head of the registry. `is_amodal` labels the sentences in their original order.

    Pass the same `optimizer` for all seeds and heads: programs are compiled once for it.
    """
    num_layers, text_dim = groups[0].states.shape[-2:]
    graphdef, params = nnx.split(LEARNED[name](text_dim, num_layers, rngs=nnx.Rngs(seed)))
    state = init_state(params, optimizer)
    rng = np.random.default_rng(seed)
    sizes = np.array([len(group.rows) for group in groups])
    # A batch has one padded length.
    for i in rng.choice(len(groups), num_steps, p=sizes / sizes.sum()):
        group = groups[i]
        chosen = rng.integers(0, len(group.rows), BATCH_SIZE)
        # The default share: a head that is trained alone belongs to no run with a configuration.
        mask = drop_tokens(group.mask[chosen], DataConfig.token_drop, rng)
        labels = is_amodal[group.rows[chosen]]
        grads = _type_gradient(graphdef, state.params, group.states[chosen], mask, labels)
        state = _update(state, grads, optimizer, 0.0)
    return TrainedHead(graphdef, state.params)


# A step is two programs, since compiling takes as long as training: the gradient is compiled for
# each padded length, the update, which is the larger of the two, only once.


@partial(jax.jit, static_argnums=0)
def _type_gradient(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    states: jax.Array,
    mask: jax.Array,
    is_amodal: jax.Array,
) -> nnx.State:
    def loss_fn(params: nnx.State) -> jax.Array:
        head = nnx.merge(graphdef, params)
        logits = member_logits(head, states[None].astype(jnp.float32), mask[None])
        return type_loss(logits, is_amodal[None], LossConfig()).mean()

    return jax.grad(loss_fn)(params)


_update = jax.jit(update, static_argnums=(2, 3))
