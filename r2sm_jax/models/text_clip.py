"""The text tower of CLIP and SigLIP as a frozen language model.

Layout and numerics follow `transformers` (models/clip/modeling_clip.py, models/siglip/modeling_siglip.py): pre-norm
blocks; CLIP is causal, SigLIP is not. As there, the last hidden state is the one before the final norm, which is
therefore not loaded.
"""

from typing import Any

from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from r2sm_jax.models.layers import Linear, attend
from r2sm_jax.models.text_encoder import ACTIVATIONS, TextEncoder, causal_bias, layer_norm, positions_of, square

_LAYER = r"encoder\.layers\.(\d+)\."


class ClipBlock(nnx.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        self.heads = config.num_attention_heads
        self.activation = config.hidden_act
        self.norm1 = layer_norm(config, rngs=rngs)
        self.query = square(config, rngs=rngs)
        self.key = square(config, rngs=rngs)
        self.value = square(config, rngs=rngs)
        self.out = square(config, rngs=rngs)
        self.norm2 = layer_norm(config, rngs=rngs)
        self.up = Linear(config.hidden_size, config.intermediate_size, rngs=rngs)
        self.down = Linear(config.intermediate_size, config.hidden_size, rngs=rngs)

    def __call__(
        self, x: Float[Array, "b t e"], mask: Bool[Array, "b t"], bias: Float[Array, "t t"] | None
    ) -> Float[Array, "b t e"]:
        y = self.norm1(x)
        x = x + self.out(attend(self.query(y), self.key(y), self.value(y), heads=self.heads, mask=mask, bias=bias))
        return x + self.down(ACTIVATIONS[self.activation](self.up(self.norm2(x))))


class ClipTextEncoder(TextEncoder):
    """Text tower of CLIP or SigLIP."""

    KEYS = (
        (r"embeddings\.token_embedding\.weight", r"words.embedding"),
        (r"embeddings\.position_embedding\.weight", r"positions.embedding"),
        (_LAYER + r"layer_norm([12])\.(weight|bias)", r"blocks.\1.norm\2.\3"),
        (_LAYER + r"self_attn\.q_proj\.(weight|bias)", r"blocks.\1.query.\2"),
        (_LAYER + r"self_attn\.k_proj\.(weight|bias)", r"blocks.\1.key.\2"),
        (_LAYER + r"self_attn\.v_proj\.(weight|bias)", r"blocks.\1.value.\2"),
        (_LAYER + r"self_attn\.out_proj\.(weight|bias)", r"blocks.\1.out.\2"),
        (_LAYER + r"mlp\.fc1\.(weight|bias)", r"blocks.\1.up.\2"),
        (_LAYER + r"mlp\.fc2\.(weight|bias)", r"blocks.\1.down.\2"),
    )
    PREFIX = r"text_model\."
    # The final norm and projection, the vision tower beside, the contrastive scale, and a buffer of old files.
    UNUSED = (
        r"final_layer_norm\..*|(text|visual)_projection\..*|head\..*|vision_model\..*|logit_(scale|bias)|"
        r"embeddings\.position_ids"
    )
    POOL = "last"
    PRE_NORM = True

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        super().__init__(config, config.max_position_embeddings, rngs=rngs)
        self.causal = config.model_type == "clip_text_model"
        self.reads_padding = not self.causal
        self.positions = nnx.Embed(config.max_position_embeddings, self.dim, rngs=rngs)
        self.blocks = nnx.List([ClipBlock(config, rngs=rngs) for _ in range(self.depth)])

    def hidden_states(self, ids: Int[Array, "b t"], mask: Bool[Array, "b t"]) -> list[Float[Array, "b t e"]]:
        states = [self.embed(ids) + positions_of(self.positions, ids.shape[1])]
        bias = causal_bias(ids.shape[1]) if self.causal else None
        for block in self.blocks:
            states.append(block(states[-1], mask, bias))
        return states
