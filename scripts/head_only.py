"""Trains a mask-type head alone, on token states of sentences.

The language model is frozen and the head reads only its states. So heads can be compared in seconds, without images.
`train.py` trains the same head with the same loss and optimizer, together with the masks.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Bool, Float, Float16, Int

from r2sm_jax.config import DataConfig, LossConfig, OptimizerConfig
from r2sm_jax.data.batches import drop_tokens
from r2sm_jax.data.text_states import TextStates
from r2sm_jax.models.mask_type_heads import LEARNED, readings
from r2sm_jax.query import Sentence
from r2sm_jax.synthetic.queries.sentences import (
    SentenceList,
    intent_sentences,
    write_text_only_queries,
)
from r2sm_jax.synthetic.scenes.source import SceneSource
from r2sm_jax.training.losses import type_loss
from r2sm_jax.training.optimizer import make_optimizer

BATCH = 128
LENGTHS = (12, 16, 22, 32, 48)
"""Sentences are padded to one of these numbers of tokens; longer ones are cut to the last."""


class Sentences(NamedTuple):
    """Sentences and what they ask for."""

    texts: tuple[str, ...]
    amodal: Bool[np.ndarray, " n"]
    families: tuple[str, ...]
    """Mask type and wording, such as "amodal: as if"."""

    def without(self, families: Sequence[str]) -> "Sentences":
        """All but some families."""
        return self.pick([i for i, name in enumerate(self.families) if name not in families])

    def only(self, family: str) -> "Sentences":
        """One family."""
        return self.pick([i for i, name in enumerate(self.families) if name == family])

    def joined(self, other: "Sentences") -> "Sentences":
        """These and others."""
        amodal = np.concatenate([self.amodal, other.amodal])
        return Sentences(self.texts + other.texts, amodal, self.families + other.families)

    def pick(self, rows: Sequence[int]) -> "Sentences":
        """Some of them."""
        texts, families = (tuple(values[i] for i in rows) for values in (self.texts, self.families))
        return Sentences(texts, self.amodal[np.asarray(rows, int)], families)


def scene_sentences(split: str, scenes: int) -> Sentences:
    """The different queries about the first scenes of a split."""
    source = SceneSource(split, scenes)
    found = {q.text: q for index in range(scenes) for q in source.queries_at(index)}
    return listed(
        [
            Sentence(q.text, q.mask_type, f"{q.mask_type}: {q.kind['wording']}")
            for q in found.values()
        ]
    )


def text_only_queries(count: int, *, without: Sequence[str] = ()) -> Sentences:
    """Sentences about anything (queries/sentences.py), maybe `without` those of some authors."""
    return listed(write_text_only_queries(count, seed=0, without=without))


def listed(rows: Sequence[Sentence]) -> Sentences:
    """Rows as `Sentences`. In the lists of docs/intent.md, families are the authors, or what the list has there."""
    amodal = np.array([row.mask_type == "amodal" for row in rows])
    return Sentences(tuple(row.text for row in rows), amodal, tuple(row.family for row in rows))


def intent_list(name: SentenceList) -> Sentences:
    """One of the lists of docs/intent.md."""
    return listed(intent_sentences(name))


class Padded(NamedTuple):
    """Sentences of similar length, as a head reads them."""

    rows: Int[np.ndarray, " n"]
    """Their positions among all sentences."""
    states: Float16[np.ndarray, "n t l e"]
    mask: Bool[np.ndarray, "n t"]


def pad(texts: TextStates, sentences: Sequence[str]) -> list[Padded]:
    """Token states of all sentences, in one array for each of `LENGTHS` that occurs."""
    texts.encode(sentences)
    sizes = np.array([texts.count_tokens(s) for s in sentences])
    groups, low = [], 0
    for length in LENGTHS:
        last = length == LENGTHS[-1]
        rows = np.flatnonzero((sizes > low) & ((sizes <= length) | last))
        if len(rows):
            groups.append(Padded(rows, *texts([sentences[int(i)] for i in rows], length)))
        low = length
    return groups


class TrainedHead(NamedTuple):
    """A head and its weights."""

    graphdef: nnx.GraphDef
    params: nnx.State

    @property
    def parameters(self) -> int:
        """Number of trained parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def logits(self, groups: Sequence[Padded]) -> Float[np.ndarray, " n"]:
        """For every sentence; above 0: amodal."""
        found = np.zeros(sum(len(group.rows) for group in groups))
        for group in groups:
            for start in range(0, len(group.rows), BATCH):
                part = slice(start, start + BATCH)
                states, mask = (_filled(x[part]) for x in (group.states, group.mask))
                found[group.rows[part]] = _apply(self.graphdef, self.params, states, mask)[
                    : len(group.rows[part])
                ]
        return found


def _filled(values: np.ndarray) -> np.ndarray:
    """A batch filled up to full size, so that nothing more is compiled."""
    return np.concatenate([values, np.repeat(values[:1], BATCH - len(values), axis=0)])


@partial(jax.jit, static_argnums=0)
def _apply(
    graphdef: nnx.GraphDef, params: nnx.State, states: jax.Array, mask: jax.Array
) -> jax.Array:
    return nnx.merge(graphdef, params)(states[None].astype(jnp.float32), mask[None])[0]


def count_parameters(name: str, groups: Sequence[Padded]) -> int:
    """Parameters of a head of the registry that reads such states."""
    layers, width = groups[0].states.shape[-2:]
    head = nnx.eval_shape(lambda: LEARNED[name](width, layers, rngs=nnx.Rngs(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(head)))


def train_head(
    name: str,
    groups: Sequence[Padded],
    amodal: Bool[np.ndarray, " n"],
    *,
    steps: int,
    seed: int = 0,
) -> TrainedHead:
    """Trains a head of the registry with the loss and optimizer of `train.py`. `amodal` is the label of every sentence.

    Batches hold sentences of one padded length; some tokens of each are hidden, as in `train.py`.
    """
    layers, width = groups[0].states.shape[-2:]
    graphdef, params = nnx.split(LEARNED[name](width, layers, rngs=nnx.Rngs(seed)))
    optimizer, update = _optimizer(steps)
    opt_state = optimizer.init(params)
    for states, mask, rows in _batches(groups, steps, np.random.default_rng(seed)):
        gradient = _gradient(graphdef, params, states, mask, amodal[rows])
        params, opt_state = update(gradient, opt_state, params)
    return TrainedHead(graphdef, params)


# Compiling takes as long as training. So both halves of a step are compiled once for all seeds. The update, the larger
# half, is compiled once for all lengths.


@partial(jax.jit, static_argnums=0)
def _gradient(
    graphdef: nnx.GraphDef, params: nnx.State, states: jax.Array, mask: jax.Array, amodal: jax.Array
) -> nnx.State:
    def loss(params: nnx.State) -> jax.Array:
        said = readings(nnx.merge(graphdef, params), states[None].astype(jnp.float32), mask[None])
        return type_loss(said, amodal[None], LossConfig()).mean()

    return jax.grad(loss)(params)


@lru_cache(maxsize=1)
def _optimizer(
    steps: int,
) -> tuple[optax.GradientTransformation, Callable[..., tuple[nnx.State, Any]]]:
    optimizer = make_optimizer(OptimizerConfig(), steps)

    @jax.jit
    def update(gradient: nnx.State, opt_state: Any, params: nnx.State) -> tuple[nnx.State, Any]:
        updates, new = optimizer.update(gradient, opt_state, params)
        return cast(nnx.State, optax.apply_updates(params, updates)), new

    return optimizer, update


def _batches(
    groups: Sequence[Padded], steps: int, rng: np.random.Generator
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    sizes = np.array([len(group.rows) for group in groups])
    for choice in rng.choice(len(groups), steps, p=sizes / sizes.sum()):
        group = groups[choice]
        rows = rng.integers(0, len(group.rows), BATCH)
        yield (
            group.states[rows],
            drop_tokens(group.mask[rows], DataConfig.token_drop, rng),
            group.rows[rows],
        )
