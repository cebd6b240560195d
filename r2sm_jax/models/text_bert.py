"""The BERT layout of a frozen language model: BERT, MiniLM, RoBERTa, XLM-RoBERTa.

Layout and numerics follow `transformers` (models/bert/modeling_bert.py, models/roberta/modeling_roberta.py): post-norm
blocks, exact GELU, LayerNorm epsilon from the config, padding masked. RoBERTa's positions start behind its padding id.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from r2sm_jax.models.layers import Linear, attend
from r2sm_jax.models.text_encoder import TextEncoder, layer_norm, positions_of, square

_LAYER = r"encoder\.layer\.(\d+)\."


class BertBlock(nnx.Module):
    """One post-norm transformer layer."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        self.heads = config.num_attention_heads
        self.query = square(config, rngs=rngs)
        self.key = square(config, rngs=rngs)
        self.value = square(config, rngs=rngs)
        self.out = square(config, rngs=rngs)
        self.attention_norm = layer_norm(config, rngs=rngs)
        self.up = Linear(config.hidden_size, config.intermediate_size, rngs=rngs)
        self.down = Linear(config.intermediate_size, config.hidden_size, rngs=rngs)
        self.output_norm = layer_norm(config, rngs=rngs)

    def __call__(self, x: Float[Array, "b t e"], mask: Bool[Array, "b t"]) -> Float[Array, "b t e"]:
        attended = attend(self.query(x), self.key(x), self.value(x), heads=self.heads, mask=mask)
        x = self.attention_norm(x + self.out(attended))
        return self.output_norm(x + self.down(jax.nn.gelu(self.up(x), approximate=False)))


class BertEncoder(TextEncoder):
    """BERT-layout encoder."""

    KEYS = (
        (r"embeddings\.word_embeddings\.weight", r"words.embedding"),
        (r"embeddings\.position_embeddings\.weight", r"positions.embedding"),
        (r"embeddings\.token_type_embeddings\.weight", r"token_types.embedding"),
        (r"embeddings\.LayerNorm\.(weight|bias)", r"norm.\1"),
        (_LAYER + r"attention\.self\.(query|key|value)\.(weight|bias)", r"blocks.\1.\2.\3"),
        (_LAYER + r"attention\.output\.dense\.(weight|bias)", r"blocks.\1.out.\2"),
        (_LAYER + r"attention\.output\.LayerNorm\.(weight|bias)", r"blocks.\1.attention_norm.\2"),
        (_LAYER + r"intermediate\.dense\.(weight|bias)", r"blocks.\1.up.\2"),
        (_LAYER + r"output\.dense\.(weight|bias)", r"blocks.\1.down.\2"),
        (_LAYER + r"output\.LayerNorm\.(weight|bias)", r"blocks.\1.output_norm.\2"),
    )
    PREFIX = r"bert\.|roberta\."
    # The pooler's dense layer, heads of the training task, and a buffer that old files carry.
    UNUSED = r"pooler\..*|cls\..*|lm_head\..*|embeddings\.position_ids"
    POOL = "mean"
    PRE_NORM = False

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        self.first_position = 0 if config.model_type == "bert" else config.pad_token_id + 1
        super().__init__(config, config.max_position_embeddings - self.first_position, rngs=rngs)
        self.positions = nnx.Embed(config.max_position_embeddings, self.dim, rngs=rngs)
        self.token_types = nnx.Embed(config.type_vocab_size, self.dim, rngs=rngs)
        self.norm = layer_norm(config, rngs=rngs)
        self.blocks = nnx.List([BertBlock(config, rngs=rngs) for _ in range(self.depth)])

    def hidden_states(self, ids: Int[Array, "b t"], mask: Bool[Array, "b t"]) -> list[Float[Array, "b t e"]]:
        x = self.embed(ids) + positions_of(self.positions, ids.shape[1], self.first_position)
        states = [self.norm(x + self.token_types.embedding[0].astype(jnp.float32))]
        for block in self.blocks:
            states.append(block(states[-1], mask))
        return states
