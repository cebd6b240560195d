"""Mask-type heads: from token states of the frozen language model to the logit that a query asks
for the amodal mask.

A learned head is a module `(states, mask) -> logit`. Add it to `LEARNED` here, and its name to
`LearnedHead` in config.py; then `--model.head NAME` and `decide` accept it. The `decoder` head
reads a token of the mask decoder, which also sees the image. References (query.py) learn nothing:
they read the sentence or the truth on the host, and every report compares with them. `none` decides
nothing: one mask for both types, as the R2SM paper's baselines have.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float

from r2sm_jax.models.layers import MLP, Linear, attend

ENSEMBLE_SIZE = 4
"""Members of the attention head."""


def mean_pool(states: Float[Array, "b k t e"], mask: Bool[Array, "b k t"]) -> Float[Array, "b k e"]:
    """Mean of the states of real tokens."""
    weights = mask[..., None].astype(states.dtype)
    return (states * weights).sum(-2) / jnp.maximum(weights.sum(-2), 1)


class LinearHead(nnx.Module):
    """A linear probe on the mean of the last layer, scaled to zero mean and unit variance."""

    def __init__(self, text_dim: int, num_layers: int, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(text_dim, use_bias=False, use_scale=False, rngs=rngs)
        self.out = Linear(text_dim, 1, rngs=rngs)

    def __call__(
        self, states: Float[Array, "b k t l e"], mask: Bool[Array, "b k t"]
    ) -> Float[Array, "b k"]:
        pooled = mean_pool(states[..., -1, :], mask)
        return self.out(self.norm(pooled))[..., 0]


class MLPHead(nnx.Module):
    """Two dense layers on the means of all layers."""

    def __init__(self, text_dim: int, num_layers: int, *, rngs: nnx.Rngs):
        self.mlp = MLP((num_layers * text_dim, 128, 1), dtype=jnp.dtype("float32"), rngs=rngs)

    def __call__(
        self, states: Float[Array, "b k t l e"], mask: Bool[Array, "b k t"]
    ) -> Float[Array, "b k"]:
        pooled = mean_pool(rearrange(states, "b k t l e -> b k t (l e)"), mask)
        return self.mlp(pooled)[..., 0]


class TokenTransformer(nnx.Module):
    """One small transformer layer over tokens that each hold all layers' states."""

    def __init__(
        self, text_dim: int, num_layers: int, *, rngs: nnx.Rngs, dim: int = 128, heads: int = 4
    ):
        self.heads = heads
        self.down = Linear(num_layers * text_dim, dim, rngs=rngs)
        self.norm1 = nnx.LayerNorm(dim, epsilon=1e-5, rngs=rngs)
        self.qkv = Linear(dim, 3 * dim, rngs=rngs)
        self.attention_out = Linear(dim, dim, rngs=rngs)
        self.norm2 = nnx.LayerNorm(dim, epsilon=1e-5, rngs=rngs)
        self.mlp = MLP((dim, 2 * dim, dim), dtype=jnp.float32, rngs=rngs)
        self.norm3 = nnx.LayerNorm(dim, epsilon=1e-5, rngs=rngs)

    def tokens(
        self, states: Float[Array, "b k t l e"], mask: Bool[Array, "b k t"]
    ) -> Float[Array, "b k t d"]:
        """Computes the tokens after the layer."""
        x = self.down(rearrange(states, "b k t l e -> b k t (l e)"))

        query, key, value = jnp.split(self.qkv(self.norm1(x)), 3, axis=-1)
        x = x + self.attention_out(attend(query, key, value, heads=self.heads, mask=mask))
        return self.norm3(x + self.mlp(self.norm2(x)))


class TransformerHead(TokenTransformer):
    """A transformer layer over the tokens, then attention pooling."""

    def __init__(
        self, text_dim: int, num_layers: int, *, rngs: nnx.Rngs, dim: int = 128, heads: int = 4
    ):
        super().__init__(text_dim, num_layers, rngs=rngs, dim=dim, heads=heads)
        self.pool = Linear(dim, 1, rngs=rngs)
        self.out = Linear(dim, 1, rngs=rngs)

    def __call__(
        self, states: Float[Array, "b k t l e"], mask: Bool[Array, "b k t"]
    ) -> Float[Array, "b k"]:
        x = self.tokens(states, mask)
        # -1e9 and not -inf: a row of padding alone must not give NaN.
        scores = jnp.where(mask, self.pool(x)[..., 0], -1e9)
        pooled = jnp.einsum("bkt,bktd->bkd", jax.nn.softmax(scores, axis=-1), x)
        return self.out(pooled)[..., 0]


class AttentionHead(nnx.Module):
    """An ensemble of transformer heads: the mean of their logits.

    Each member has a loss of its own (`member_logits`), so they are wrong on different wordings.
    Members that were trained on their mean were no better than one.
    """

    def __init__(self, text_dim: int, num_layers: int, *, rngs: nnx.Rngs):
        members = [TransformerHead(text_dim, num_layers, rngs=rngs) for _ in range(ENSEMBLE_SIZE)]
        self.members = nnx.List(members)

    def __call__(
        self, states: Float[Array, "b k t l e"], mask: Bool[Array, "b k t"]
    ) -> Float[Array, "b k"]:
        return member_logits(self, states, mask).mean(0)


class LayersHead(nnx.Module):
    """A transformer head on a learned mix of the layers, each scaled to unit variance."""

    def __init__(self, text_dim: int, num_layers: int, *, rngs: nnx.Rngs):
        self.mix = nnx.Param(jnp.zeros(num_layers))
        self.transformer = TransformerHead(text_dim, 1, rngs=rngs, dim=64, heads=2)

    def __call__(
        self, states: Float[Array, "b k t l e"], mask: Bool[Array, "b k t"]
    ) -> Float[Array, "b k"]:
        shares = jax.nn.softmax(self.mix[...])
        scales = jax.lax.rsqrt(jnp.square(states).mean(-1) + 1e-6) * shares
        mixed = (states * scales[..., None]).sum(-2)
        return self.transformer(mixed[..., None, :], mask)


class TargetHead(TokenTransformer):
    """A transformer layer over the tokens, then for each the logit that its word names what is
    meant.

    It is no mask-type head and is constant in training: it learns from sentences alone before the
    first step (training/head.py).
    """

    def __init__(self, text_dim: int, num_layers: int, *, rngs: nnx.Rngs):
        super().__init__(text_dim, num_layers, rngs=rngs)
        self.out = Linear(128, 1, rngs=rngs)

    def __call__(
        self, states: Float[Array, "b k t l e"], mask: Bool[Array, "b k t"]
    ) -> Float[Array, "b k t"]:
        return self.out(self.tokens(states, mask))[..., 0]


def member_logits(
    head: Callable[..., Array], states: Float[Array, "b k t l e"], mask: Bool[Array, "b k t"]
) -> Float[Array, "r b k"]:
    """The logits that a head is trained on.

    Returns those of each of the r members of an ensemble: of `AttentionHead`, which predicts with
    their mean. A head of another kind is its only member, so r is 1.
    """
    members = head.members if isinstance(head, AttentionHead) else [head]
    return jnp.stack([member(states, mask) for member in members])


class DecoderHead(nnx.Module):
    """Two dense layers on the state of the mask decoder's type token, which has attended to words
    and image."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        self.mlp = MLP((dim, dim, 1), dtype=jnp.dtype("float32"), rngs=rngs)

    def __call__(self, state: Float[Array, "b k d"]) -> Float[Array, "b k"]:
        return self.mlp(state.astype(jnp.float32))[..., 0]


LEARNED: dict[str, Callable[..., Any]] = {
    "linear": LinearHead,
    "mlp": MLPHead,
    "layers": LayersHead,
    "attention": AttentionHead,
}
"""Heads that decide from the words alone; config.LEARNED_HEADS has the same names."""
