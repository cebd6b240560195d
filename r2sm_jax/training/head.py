"""Trains heads alone, on token states of sentences, without images.

The language model is frozen and a head reads only its token states, so a head trains in seconds.
Of a mask-type head, loss, optimizer and token dropout are those of `train.py`, which trains the
same head together with the masks. The target head is only trained here, before the first step of a
run.
Neither is a task of loop.py: nothing of so short a training is saved or resumed.
"""

from collections.abc import Iterator, Sequence
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
from r2sm_jax.language.states import TextStates
from r2sm_jax.language.target import is_named
from r2sm_jax.models.mask_type_heads import LEARNED, TargetHead, member_logits
from r2sm_jax.models.matching import flat_weights
from r2sm_jax.query import Sentence
from r2sm_jax.training.losses import type_loss
from r2sm_jax.training.step import init_state, update

BATCH_SIZE = 128
PADDED_LENGTHS = (12, 16, 22, 32, 48)
"""Sentences are padded to the next of these numbers of tokens; longer ones are cut to the last."""
TARGET_ROUNDS = 8
"""So often a target head sees each sentence, but for at most `MAX_TARGET_STEPS` steps."""
MAX_TARGET_STEPS = 800
TARGET_RATE = 1e-3
NAMED_WEIGHT = 4.0
"""Weight in its loss of the tokens that name what is meant."""


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


def draw_batches(
    groups: Sequence[PaddedSentences], num_steps: int, seed: int
) -> Iterator[PaddedSentences]:
    """Yields random batches of sentences, with some tokens hidden. A batch has one padded length;
    each group gives as many as it has sentences."""
    rng = np.random.default_rng(seed)
    sizes = np.array([len(group.rows) for group in groups])
    for i in rng.choice(len(groups), num_steps, p=sizes / sizes.sum()):
        group = groups[i]
        chosen = rng.integers(0, len(group.rows), BATCH_SIZE)
        # The default share: a head that is trained alone belongs to no run with a configuration.
        mask = drop_tokens(group.mask[chosen], DataConfig.token_drop, rng)
        yield PaddedSentences(group.rows[chosen], group.states[chosen], mask)


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
    for batch in draw_batches(groups, num_steps, seed):
        labels = is_amodal[batch.rows]
        grads = _type_gradient(graphdef, state.params, batch.states, batch.mask, labels)
        state = _update(state, grads, optimizer, 0.0)
    return TrainedHead(graphdef, state.params)


def train_target_head(
    texts: TextStates, sentences: Sequence[Sentence], seed: int
) -> dict[str, jax.Array]:
    """Trains a `TargetHead` on the sentences whose target is known. Returns its weights by dotted
    path in the segmenter."""
    known, labels = [], []
    for sentence in sentences:
        if sentence.target is not None:
            spans = texts.tokenizer.spans(sentence.text)
            named = is_named(sentence.text, sentence.target, spans)
            if named is not None:
                known.append(sentence.text)
                labels.append(named)
    groups = pad_sentences(texts, known)
    num_layers, text_dim = groups[0].states.shape[-2:]
    graphdef, params = nnx.split(TargetHead(text_dim, num_layers, rngs=nnx.Rngs(seed)))
    num_steps = min(MAX_TARGET_STEPS, TARGET_ROUNDS * len(known) // BATCH_SIZE + 1)
    optimizer = optax.adamw(optax.cosine_decay_schedule(TARGET_RATE, num_steps))
    state = init_state(params, optimizer)
    for batch in draw_batches(groups, num_steps, seed):
        named = np.zeros_like(batch.mask)
        for row, number in enumerate(batch.rows):
            label = labels[number][: named.shape[1]]
            named[row, : len(label)] = label
        grads = _target_gradient(graphdef, state.params, batch.states, batch.mask, named)
        state = _update(state, grads, optimizer, 0.0)
    return {f"target_head.{path}": value for path, value in flat_weights(state.params).items()}


@partial(jax.jit, static_argnums=0)
def _target_gradient(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    states: jax.Array,
    mask: jax.Array,
    is_named: jax.Array,
) -> nnx.State:
    def loss_fn(params: nnx.State) -> jax.Array:
        head = nnx.merge(graphdef, params)
        logits = head(states[None].astype(jnp.float32), mask[None])[0]
        losses = optax.sigmoid_binary_cross_entropy(logits, is_named)
        # Few tokens name something, and a run without them is no answer at all.
        weights = jnp.where(is_named, NAMED_WEIGHT, 1.0) * mask
        return (losses * weights).sum() / weights.sum()

    return jax.grad(loss_fn)(params)


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
