"""The BERT layout of a frozen language model: BERT, MiniLM.

Layout and numerics follow `transformers` (models/bert/modeling_bert.py): post-norm blocks, exact GELU, LayerNorm
epsilon from the config (1e-12), additive attention mask.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from r2sm_jax.models.layers import Linear, attend
from r2sm_jax.models.weights import KeyTable

BERT_KEYS: KeyTable = (
    (r"embeddings\.word_embeddings\.weight", r"words.embedding"),
    (r"embeddings\.position_embeddings\.weight", r"positions.embedding"),
    (r"embeddings\.token_type_embeddings\.weight", r"token_types.embedding"),
    (r"embeddings\.LayerNorm\.(weight|bias)", r"norm.\1"),
    (r"encoder\.layer\.(\d+)\.attention\.self\.(query|key|value)\.(weight|bias)", r"blocks.\1.\2.\3"),
    (r"encoder\.layer\.(\d+)\.attention\.output\.dense\.(weight|bias)", r"blocks.\1.out.\2"),
    (r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.(weight|bias)", r"blocks.\1.attention_norm.\2"),
    (r"encoder\.layer\.(\d+)\.intermediate\.dense\.(weight|bias)", r"blocks.\1.up.\2"),
    (r"encoder\.layer\.(\d+)\.output\.dense\.(weight|bias)", r"blocks.\1.down.\2"),
    (r"encoder\.layer\.(\d+)\.output\.LayerNorm\.(weight|bias)", r"blocks.\1.output_norm.\2"),
)
BERT_PREFIX = r"bert\."
# Not part of the token states: the pooler's dense layer and a buffer that old files carry.
BERT_UNUSED = r"pooler\..*|embeddings\.position_ids"


@dataclass(frozen=True)
class BertConfig:
    """The fields of a Hugging Face BERT `config.json` that shape the encoder."""

    vocab_size: int = 30522
    hidden_size: int = 384
    num_hidden_layers: int = 6
    num_attention_heads: int = 12
    intermediate_size: int = 1536
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12


class BertBlock(nnx.Module):
    """One post-norm transformer layer."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        d, eps = config.hidden_size, config.layer_norm_eps
        self.heads = config.num_attention_heads
        self.query = Linear(d, d, rngs=rngs)
        self.key = Linear(d, d, rngs=rngs)
        self.value = Linear(d, d, rngs=rngs)
        self.out = Linear(d, d, rngs=rngs)
        self.attention_norm = nnx.LayerNorm(d, epsilon=eps, rngs=rngs)
        self.up = Linear(d, config.intermediate_size, rngs=rngs)
        self.down = Linear(config.intermediate_size, d, rngs=rngs)
        self.output_norm = nnx.LayerNorm(d, epsilon=eps, rngs=rngs)

    def __call__(self, x: Float[Array, "b t e"], mask: Bool[Array, "b t"]) -> Float[Array, "b t e"]:
        attended = attend(self.query(x), self.key(x), self.value(x), heads=self.heads, mask=mask)
        x = self.attention_norm(x + self.out(attended))
        return self.output_norm(x + self.down(nnx.gelu(self.up(x), approximate=False)))


class BertEncoder(nnx.Module):
    """BERT-layout encoder."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        d = config.hidden_size
        self.config = config
        self.words = nnx.Embed(config.vocab_size, d, rngs=rngs)
        self.positions = nnx.Embed(config.max_position_embeddings, d, rngs=rngs)
        self.token_types = nnx.Embed(config.type_vocab_size, d, rngs=rngs)
        self.norm = nnx.LayerNorm(d, epsilon=config.layer_norm_eps, rngs=rngs)
        self.blocks = nnx.List([BertBlock(config, rngs=rngs) for _ in range(config.num_hidden_layers)])

    def __call__(
        self, ids: Int[Array, "b t"], mask: Bool[Array, "b t"], layers: tuple[int, ...]
    ) -> Float[Array, "b t l e"]:
        """Token states after each of `layers` (0 = the embeddings, counted as `transformers` does).

        `mask` is True on real tokens; states on padding tokens are meaningless.
        """
        x = self.words(ids) + self.positions(jnp.arange(ids.shape[1])) + self.token_types(jnp.zeros_like(ids))
        states = [self.norm(x)]
        for block in self.blocks:
            states.append(block(states[-1], mask))
        return jnp.stack([states[layer] for layer in layers], axis=2)
