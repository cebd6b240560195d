"""Tiny models: one configuration of the segmenter with random inputs for it, and random language
models in Hugging Face's layout, a BERT and a Llama."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from r2sm_jax.config import DataConfig, DecoderConfig, ModelConfig, TextConfig, VisionConfig
from r2sm_jax.models.r2sm import input_spec
from r2sm_jax.sources import open_split

WIDTH, LAYERS = 32, 2
"""Of the language models."""

TINY = ModelConfig(
    VisionConfig(image_size=32, patch_size=8, dim=32, depth=1, heads=2, mlp_dim=64, out_dim=32),
    TextConfig(layers=(1, 2), max_tokens=24, dim=WIDTH),
    DecoderConfig(dim=32, depth=1, heads=2, mlp_dim=64, slots=2, fine_dim=16, mask_dim=8),
)
"""The segmenter of all tests. Its language model is a folder that conftest.py makes."""


def fake_inputs(config: ModelConfig, batch: int, queries: int, seed: int = 0) -> dict[str, Any]:
    """Random inputs of `input_spec`'s shapes; every query has at least one real token."""
    rng = np.random.default_rng(seed)
    spec = input_spec(config, batch, queries)
    lengths = rng.integers(1, config.text.max_tokens + 1, (batch, queries, 1))
    return {
        "image": rng.integers(0, 256, spec["image"].shape, dtype=np.uint8),
        "image_mask": np.ones(spec["image_mask"].shape, bool),
        "text": rng.normal(size=spec["text"].shape).astype(np.float16),
        "text_mask": np.arange(config.text.max_tokens) < lengths,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def write_bert(folder: Path, seed: int = 0) -> Path:
    """A random BERT whose word-piece tokenizer knows the words of the scenes' queries."""
    folder.mkdir(parents=True)
    vocabulary = write_tokenizer(folder)
    config = {
        "model_type": "bert",
        "vocab_size": vocabulary,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
    }
    write_json(folder / "config.json", config)

    square = (WIDTH, WIDTH)
    kernels = {f"attention.self.{name}": square for name in ("query", "key", "value")}
    kernels["attention.output.dense"] = square
    kernels["intermediate.dense"] = (64, WIDTH)
    kernels["output.dense"] = (WIDTH, 64)
    shapes = {
        "embeddings.word_embeddings.weight": (vocabulary, WIDTH),
        "embeddings.position_embeddings.weight": (128, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(LAYERS):
        prefix = f"encoder.layer.{layer}"
        for name, shape in kernels.items():
            shapes[f"{prefix}.{name}.weight"] = shape
            shapes[f"{prefix}.{name}.bias"] = shape[:1]
        norms += [f"{prefix}.attention.output.LayerNorm", f"{prefix}.output.LayerNorm"]

    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        tensors[name] = rng.normal(scale=0.3, size=shape).astype(np.float32)
    for name in norms:
        tensors[f"{name}.weight"] = rng.uniform(0.8, 1.2, WIDTH).astype(np.float32)
        tensors[f"{name}.bias"] = rng.normal(scale=0.1, size=WIDTH).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_tokenizer(folder: Path) -> int:
    """Writes a word-piece tokenizer. Returns the size of its vocabulary."""
    source = open_split(DataConfig(), count=30)
    words = Counter[str]()
    for index in range(30):
        for query in source.queries_at(index):
            letters_only = "".join(c if c.isalpha() else " " for c in query.text.lower())
            words.update(letters_only.split())

    special = {
        f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")
    }
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,;:?!'-()"
    pieces = [*special.values(), *letters, *(f"##{letter}" for letter in letters)]
    pieces += sorted(word for word in words if len(word) > 1)
    ids = {piece: number for number, piece in enumerate(pieces)}

    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    # As the published file of MiniLM does.
    tokenizer.enable_padding(length=128)
    tokenizer.save(str(folder / "tokenizer.json"))
    fast = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 128}
    write_json(folder / "tokenizer_config.json", fast | special)
    return len(pieces)


def write_llama(folder: Path, bert_folder: Path) -> Path:
    """A random Llama in bfloat16 with the BERT's words; its tokenizer has no padding token."""
    folder.mkdir(parents=True)
    shutil.copy(bert_folder / "tokenizer.json", folder)
    fast = {"tokenizer_class": "PreTrainedTokenizerFast"}
    write_json(folder / "tokenizer_config.json", fast)
    vocabulary = json.loads((bert_folder / "config.json").read_text())["vocab_size"]
    config = {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    write_json(folder / "config.json", config)

    shapes = {"model.embed_tokens.weight": (vocabulary, WIDTH), "model.norm.weight": (WIDTH,)}
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        for name in ("input", "post_attention"):
            shapes[f"{layer}.{name}_layernorm.weight"] = (WIDTH,)
        for name, width in {"q": WIDTH, "o": WIDTH, "k": WIDTH // 2, "v": WIDTH // 2}.items():
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (width, WIDTH)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (48, WIDTH)
        shapes[f"{layer}.mlp.up_proj.weight"] = (48, WIDTH)
        shapes[f"{layer}.mlp.down_proj.weight"] = (WIDTH, 48)
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in shapes.items():
        tensors[name] = rng.normal(scale=0.3, size=shape).astype(ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    return folder
