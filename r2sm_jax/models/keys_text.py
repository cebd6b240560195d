"""Keys of published language models, as Hugging Face `transformers` names them -> paths of
text_encoder.py."""

from r2sm_jax.models.matching import KeyTable

BERT = KeyTable(
    {
        "embeddings.word_embeddings.weight": "words.embedding",
        "embeddings.position_embeddings.weight": "positions.embedding",
        "embeddings.token_type_embeddings.weight": "token_types.embedding",
        "embeddings.LayerNorm.(weight|bias)": r"norm_before.\1",
        r"encoder.layer.(\d+).attention.self.query.(weight|bias)": r"blocks.\1.query.\2",
        r"encoder.layer.(\d+).attention.self.key.(weight|bias)": r"blocks.\1.key.\2",
        r"encoder.layer.(\d+).attention.self.value.(weight|bias)": r"blocks.\1.value.\2",
        r"encoder.layer.(\d+).attention.output.dense.(weight|bias)": r"blocks.\1.out.\2",
        r"encoder.layer.(\d+).attention.output.LayerNorm.(weight|bias)": r"blocks.\1.norm1.\2",
        r"encoder.layer.(\d+).intermediate.dense.(weight|bias)": r"blocks.\1.up.\2",
        r"encoder.layer.(\d+).output.dense.(weight|bias)": r"blocks.\1.down.\2",
        r"encoder.layer.(\d+).output.LayerNorm.(weight|bias)": r"blocks.\1.norm2.\2",
    },
    prefixes=("bert.", "roberta."),
    # The pooler, heads of the training task, and a buffer of old files.
    unused=("pooler.*", "cls.*", "lm_head.*", "embeddings.position_ids"),
)
DECODER_ONLY = KeyTable(
    {
        "embed_tokens.weight": "words.embedding",
        r"layers.(\d+).input_layernorm.weight": r"blocks.\1.norm1.weight",
        r"layers.(\d+).post_attention_layernorm.weight": r"blocks.\1.norm2.weight",
        r"layers.(\d+).self_attn.q_proj.(weight|bias)": r"blocks.\1.query.\2",
        r"layers.(\d+).self_attn.k_proj.(weight|bias)": r"blocks.\1.key.\2",
        r"layers.(\d+).self_attn.v_proj.(weight|bias)": r"blocks.\1.value.\2",
        r"layers.(\d+).self_attn.o_proj.(weight|bias)": r"blocks.\1.out.\2",
        r"layers.(\d+).self_attn.q_norm.weight": r"blocks.\1.query_norm.weight",
        r"layers.(\d+).self_attn.k_norm.weight": r"blocks.\1.key_norm.weight",
        r"layers.(\d+).mlp.gate_proj.(weight|bias)": r"blocks.\1.gate.\2",
        r"layers.(\d+).mlp.up_proj.(weight|bias)": r"blocks.\1.up.\2",
        r"layers.(\d+).mlp.down_proj.(weight|bias)": r"blocks.\1.down.\2",
        "norm.weight": "norm_after.weight",
    },
    prefixes=("model.",),
    unused=("lm_head.weight", ".*rotary_emb.inv_freq"),
)
