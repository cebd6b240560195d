"""Which names the dense losses of a step compare pixels with, where there are thousands.

Every pixel is compared with every name, so memory and time grow with the names. Of more than
`MAX_NAMES` a step takes those of the objects in its batch and random others, which stand for all
that are left out: the losses are those of all names on average.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

MAX_NAMES = 500
"""So many names of an attribute take part in a step."""


class NameSample(NamedTuple):
    """The names of each attribute that take part in a step."""

    names: dict[str, Float[Array, "_v e"]]
    """Their text embeddings."""
    weights: dict[str, Float[Array, " _v"]]
    """How many names each of them stands for: 1 for those in the batch. Attributes of which all
    names take part are left out."""
    labels: dict[str, Int[Array, "b m"]]
    """The labels of the batch as indices into the sample; -1 = unknown, or not in it."""


def sample_names(
    names: dict[str, Float[Array, "_v e"]], labels: dict[str, Int[Array, "b m"]], key: PRNGKeyArray
) -> NameSample:
    """Chooses the names of a step at random by `key`, so that a resumed run chooses the same.

    Args:
        names: text embeddings of the v names of each attribute.
        labels: for each attribute, the names of the m instances of b images; -1 = unknown.
        key: of the step.
    """
    sampled_names = dict(names)
    sampled_labels = dict(labels)
    weights = {}
    for number, (group, embeddings) in enumerate(sorted(names.items())):
        num_names = len(embeddings)
        if num_names <= MAX_NAMES:
            continue
        label = labels[group]
        # An unknown label is out of bounds here, and changes nothing.
        in_bounds = jnp.where(label < 0, num_names, label)
        is_present = jnp.zeros(num_names, bool).at[in_bounds].set(True, mode="drop")
        num_present = is_present.sum()

        # Those in the batch come first, the others in random order.
        order = jax.random.uniform(jax.random.fold_in(key, number), (num_names,)) + is_present
        _, chosen = jax.lax.top_k(order, MAX_NAMES)
        place = jnp.full(num_names, -1, label.dtype).at[chosen].set(jnp.arange(MAX_NAMES))

        num_others = jnp.maximum(MAX_NAMES - num_present, 1)
        stands_for = (num_names - num_present) / num_others
        sampled_names[group] = embeddings[chosen]
        sampled_labels[group] = jnp.where(label < 0, -1, place[label])
        weights[group] = jnp.where(is_present[chosen], 1.0, stands_for)
    return NameSample(sampled_names, weights, sampled_labels)
