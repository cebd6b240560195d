"""What the three layouts of a frozen language model share (text_bert.py, text_clip.py, text_decoder.py)."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float16, Int

from r2sm_jax.models.layers import Linear
from r2sm_jax.models.weights import KeyTable


def quick_gelu(x: Array) -> Array:
    """OpenAI CLIP's approximation of GELU."""
    return x * jax.nn.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": quick_gelu,
    "silu": jax.nn.silu,
}
"""By the names that `config.json` uses."""


class TextEncoder(nnx.Module):
    """Token ids -> token states. All parameters are frozen: nothing trains them, no optimizer sees them.

    Weights stay in the type that the file has (bfloat16, float16 or float32); everything is computed in float32, each
    kernel being widened where it is used.
    """

    KEYS: ClassVar[KeyTable]
    PREFIX: ClassVar[str]
    """Pattern that is taken off published keys first."""
    UNUSED: ClassVar[str]
    """Pattern of published keys that token states do not depend on."""
    POOL: ClassVar[Literal["mean", "last"]]
    """Which token states make one vector: a causal model knows the sentence only at its last token."""
    PRE_NORM: ClassVar[bool]
    """Whether hidden layers are raw residual sums, whose size grows with depth, rather than normed states."""

    reads_padding: bool = False
    """SigLIP was trained on sentences padded to `max_tokens` and attends to the padding."""

    def __init__(self, config: Any, max_tokens: int, *, rngs: nnx.Rngs):
        """`config` is the text part of a `transformers` configuration."""
        self.dim: int = config.hidden_size
        self.depth: int = config.num_hidden_layers
        self.vocab_size: int = config.vocab_size
        self.max_tokens = max_tokens
        self.words = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs)

    def embed(self, ids: Int[Array, "b t"]) -> Float[Array, "b t e"]:
        """Rows of the word table, in float32; the table itself is never widened."""
        return self.words.embedding[...][ids].astype(jnp.float32)

    def hidden_states(self, ids: Int[Array, "b t"], mask: Bool[Array, "b t"]) -> list[Float[Array, "b t e"]]:
        """The embeddings and the states after every layer, as `transformers` counts `hidden_states`."""
        raise NotImplementedError  # abstract: every layout has its own

    def __call__(
        self, ids: Int[Array, "b t"], mask: Bool[Array, "b t"], layers: tuple[int, ...]
    ) -> Float[Array, "b t l e"]:
        """Token states after each of `layers` (0 = the embeddings).

        `mask` is True on real tokens, which come first; states on padding tokens are meaningless.
        """
        states = self.hidden_states(ids, mask)
        return jnp.stack([states[layer] for layer in layers], axis=2)

    def kept_states(
        self, ids: Int[Array, "b t"], mask: Bool[Array, "b t"], layers: tuple[int, ...]
    ) -> Float16[Array, "b t l e"]:
        """The same as the segmenter takes them: float16, and where hidden layers are raw residual sums, each divided
        by its root mean square."""
        states = self(ids, mask, layers)
        if self.PRE_NORM:
            states = states * jax.lax.rsqrt(jnp.square(states).mean(-1, keepdims=True) + 1e-12)
        return states.astype(jnp.float16)


def positions_of(table: nnx.Embed, tokens: Any, offset: int = 0) -> Float[Array, "t e"]:
    """Rows of a learned position table for the first tokens; of a symbolic number when a model is exported."""
    return table.embedding[...][offset + jnp.arange(tokens)].astype(jnp.float32)


def layer_norm(config: Any, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """A LayerNorm of the model's width, with the exact variance: residual sums have large means."""
    return nnx.LayerNorm(config.hidden_size, epsilon=config.layer_norm_eps, use_fast_variance=False, rngs=rngs)


def square(config: Any, *, rngs: nnx.Rngs) -> Linear:
    """A dense layer from the model's width to itself."""
    return Linear(config.hidden_size, config.hidden_size, rngs=rngs)


def causal_bias(tokens: Any) -> Float[Array, "t t"]:
    """Added to attention scores: no token sees a later one."""
    return jnp.where(jnp.tri(tokens, dtype=bool), 0.0, -1e9)
