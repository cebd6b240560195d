"""Whether what a sentence names is in an image, as the classifier of a published backbone sees it.

An EfficientNet was trained to tell 1,000 classes of ImageNet apart. Its last two layers do so in
each cell of its last features, also of features that were trained on. A sentence weights the
classes by how near their names are to it, and the cell with the most of these classes counts.
"""

from collections.abc import Callable, Sequence
from importlib.resources import files

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float

from r2sm_jax.models.layers import Buffer, Linear, freeze, resize

CLASSES = "imagenet_classes.txt"
"""Has the names of the classes and of what they are kinds of; its head says whose they are."""
NUM_CLASSES = 1000
HIDDEN_DIM = 1280
"""Channels before the classes, of all sizes of EfficientNet-Lite."""
TEMPERATURE = 0.05
"""A class weighs e times less if its similarity with the sentence is so much lower."""
WINDOW = 0.15
"""Classes that are this much less similar than the nearest one do not count."""
WEIGHT = 0.7
"""Of the evidence beside the decoder's own presence, chosen on dev (docs/log.md)."""
LEAST = 1e-6
"""Is added to probabilities, so that no class is ruled out."""

Encode = Callable[[Sequence[str]], tuple[Float[np.ndarray, "k t l e"], Bool[np.ndarray, "k t"]]]
"""Sentences -> the states of their tokens, and which tokens are real."""


class Classifier(nnx.Module):
    """Last features of an EfficientNet -> classes of each cell; these and a sentence -> evidence.

    All of it is constant: the layers are published, vectors are computed when a run starts.
    """

    def __init__(self, dim: int, text_dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        """`dim`: channels of the last features; `text_dim`: of token states."""
        self.hidden = Linear(dim, HIDDEN_DIM, dtype=dtype, rngs=rngs)
        self.out = Linear(HIDDEN_DIM, NUM_CLASSES, dtype=dtype, rngs=rngs)
        self.class_vectors = Buffer(jnp.zeros((NUM_CLASSES, text_dim), jnp.int8))
        self.sentence_mean = Buffer(jnp.zeros(text_dim))
        freeze(self)

    def __call__(
        self, features: Float[Array, "b h w c"], image_mask: Bool[Array, "b H W"]
    ) -> Float[Array, "b n k"]:
        """Computes the probability of each class k in each of n cells; 0 in padding."""
        logits = self.out(jax.nn.relu6(self.hidden(features))).astype(jnp.float32)
        probabilities = jax.nn.softmax(logits)
        share = resize(image_mask[..., None].astype(jnp.float32), features.shape[1])
        # A strip can be narrower than half a cell. Some CPUs round equal shares differently.
        enough = jnp.minimum(0.5, 0.99 * share.max((1, 2), keepdims=True))
        return rearrange(jnp.where(share >= enough, probabilities, 0), "b h w k -> b (h w) k")

    def presence_logit(
        self,
        probabilities: Float[Array, "b n c"],
        text: Float[Array, "b k t l e"],
        text_mask: Bool[Array, "b k t"],
    ) -> Float[Array, "b k"]:
        """Computes what the classes of the cells add to the logit that a sentence has a target."""
        sentences = unit(sentence_vectors(text, text_mask) - self.sentence_mean[...])
        names = unit(self.class_vectors[...].astype(jnp.float32))
        similarity = jnp.einsum("bke,ce->bkc", sentences, names)
        gap = similarity.max(-1, keepdims=True) - similarity
        weights = jnp.where(gap < WINDOW, jnp.exp(-gap / TEMPERATURE), 0)
        evidence = jnp.einsum("bkc,bnc->bkn", weights, probabilities).max(-1)
        return WEIGHT * jnp.log(evidence + LEAST)


def unit(x: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
    """Makes vectors as long as 1; zeros stay."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6)


def sentence_vectors(
    text: Float[Array, "*b t l e"], text_mask: Bool[Array, "*b t"]
) -> Float[Array, "*b e"]:
    """Returns the mean state of the tokens of each sentence in the last of the layers, as long
    as 1."""
    last = text[..., -1, :].astype(jnp.float32)
    return unit(jnp.where(text_mask[..., None], last, 0).sum(-2))


# Constants that a language model computes


def make_constants(encode: Encode, sentences: Sequence[str]) -> dict[str, np.ndarray]:
    """Computes the vectors of a `Classifier`, by dotted path in the segmenter.

    That of a class is the mean of those of its names, less the mean of all classes.

    Args:
        encode: the language model.
        sentences: such as are asked; their mean is what all sentences share.
    """

    def vectors(texts: Sequence[str]) -> np.ndarray:
        states, mask = encode(texts)
        return np.asarray(sentence_vectors(jnp.asarray(states), jnp.asarray(mask)))

    names_of = class_names()
    names = sorted({name for of_class in names_of for name in of_class})
    vector_of = dict(zip(names, vectors(names), strict=True))
    means = np.stack([np.mean([vector_of[name] for name in some], 0) for some in names_of])
    means /= np.linalg.norm(means, axis=-1, keepdims=True)
    centred = means - means.mean(0)
    # 8 bits are enough, and an export stores them.
    steps = np.round(127 * centred / np.abs(centred).max(-1, keepdims=True))
    return {
        "classifier.class_vectors": steps.astype(np.int8),
        "classifier.sentence_mean": vectors(sentences).mean(0),
    }


def class_names() -> list[list[str]]:
    """Returns the names of each class: its own, and those of all that it is a kind of."""
    own, above = [], []
    for line in files("r2sm_jax.models").joinpath(CLASSES).read_text("utf-8").splitlines():
        if not line.startswith("#"):
            names, *parents = line.split("; ")
            own.append(names.lower().split(", "))
            above.append([int(parent) for parent in parents])
    names_of = []
    for number in range(NUM_CLASSES):
        kinds, todo = set(), [number]
        while todo:
            kind = todo.pop()
            kinds.add(kind)
            todo += above[kind]
        names_of.append(sorted({name for kind in kinds for name in own[kind]}))
    return names_of
