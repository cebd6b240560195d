"""Small TIPS checkpoints with random weights in the published layout, and TIPS's arithmetic in
NumPy as google-deepmind/tips writes it (scenic/models/vit.py, text.py)."""

from pathlib import Path

import numpy as np

DIM, HEADS, MLP_DIM, DEPTH = 32, 4, 48, 3
PATCH, SIDE = 6, 4
Arrays = dict[str, np.ndarray]


# Checkpoints


def random_block(name: str, rng: np.random.Generator, dim: int, heads: int, mlp_dim: int) -> Arrays:
    """The arrays of a transformer block, as flax names and shapes them."""
    head_dim = dim // heads
    shapes: dict[str, tuple[int, ...]] = {}
    for part in ("query", "key", "value"):
        shapes[f"MultiHeadDotProductAttention_0/{part}/kernel"] = (dim, heads, head_dim)
        shapes[f"MultiHeadDotProductAttention_0/{part}/bias"] = (heads, head_dim)
    shapes["MultiHeadDotProductAttention_0/out/kernel"] = (heads, head_dim, dim)
    shapes["MultiHeadDotProductAttention_0/out/bias"] = (dim,)
    shapes["MlpBlock_0/Dense_0/kernel"] = (dim, mlp_dim)
    shapes["MlpBlock_0/Dense_0/bias"] = (mlp_dim,)
    shapes["MlpBlock_0/Dense_1/kernel"] = (mlp_dim, dim)
    shapes["MlpBlock_0/Dense_1/bias"] = (dim,)
    arrays = {part: random_array(rng, shape) for part, shape in shapes.items()}
    for norm in ("LayerNorm_0", "LayerNorm_1"):
        arrays |= random_norm(norm, rng, dim)
    return {f"{name}/{part}": value for part, value in arrays.items()}


def random_array(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(scale=0.15, size=shape).astype(np.float32)


def random_norm(name: str, rng: np.random.Generator, dim: int) -> Arrays:
    return {
        f"{name}/scale": rng.uniform(0.5, 1.5, dim).astype(np.float32),
        f"{name}/bias": random_array(rng, (dim,)),
    }


def vision_arrays(
    *,
    dim: int = DIM,
    heads: int = HEADS,
    mlp_dim: int = MLP_DIM,
    depth: int = DEPTH,
    patch: int = PATCH,
    side: int = SIDE,
) -> Arrays:
    """A vision tower."""
    rng = np.random.default_rng(0)
    arrays = {
        "encoder/ToTokenSequence_0/embedding/kernel": random_array(rng, (patch, patch, 3, dim)),
        "encoder/ToTokenSequence_0/embedding/bias": random_array(rng, (dim,)),
        "encoder/ToTokenSequence_0/posembed_input": random_array(rng, (1, side, side, dim)) * 3,
        "encoder/ToTokenSequence_0/cls": random_array(rng, (1, 2, dim)) * 3,
    }
    for number in range(depth):
        name = f"encoder/transformer/encoderblock_{number}"
        arrays |= random_block(name, rng, dim, heads, mlp_dim)
    return arrays | random_norm("encoder/encoder_norm", rng, dim)


def write_vision(folder: Path, **sizes: int) -> Path:
    """Writes a vision tower; returns its file."""
    file = folder / "tips_small_vision.npz"
    np.savez(file, **vision_arrays(**sizes))
    return file


TEXT_DIM, TEXT_MLP_DIM = 24, 40
PIECES = (
    ("<pad>", 0.0, 3),
    ("<unk>", 0.0, 2),
    ("\u2581", -2.0, 1),
    ("\u2581the", -3.0, 1),
    ("\u2581mug", -4.0, 1),
    ("\u2581red", -4.0, 1),
    ("\u2581mugs", -9.0, 1),
    ("s", -4.5, 1),
    *((letter, -8.0, 1) for letter in "abcdefghijklmnopqrtuvwxyz.,?'"),
)
"""Text, score and kind (1 normal, 2 unknown, 3 control) of the pieces of a tokenizer."""


def text_arrays(
    *,
    vocab_size: int = len(PIECES),
    dim: int = TEXT_DIM,
    heads: int = HEADS,
    mlp_dim: int = TEXT_MLP_DIM,
    depth: int = DEPTH,
) -> Arrays:
    """A text tower."""
    rng = np.random.default_rng(1)
    arrays = {
        "token_emb/emb_var": random_array(rng, (vocab_size, dim)),
        "temperature_contrastive": np.array(0.01, np.float32),
    }
    for number in range(depth):
        name = f"transformer/encoderblock_{number}"
        arrays |= random_block(name, rng, dim, heads, mlp_dim)
    return arrays | random_norm("text_encoder_norm", rng, dim)


def write_text(folder: Path, **sizes: int) -> Path:
    """Writes a text tower and its tokenizer; returns the file of the tower."""
    file = folder / "tips_small_text.npz"
    np.savez(file, **text_arrays(**sizes))
    write_sentence_pieces(folder / "tokenizer.model")
    return file


def write_sentence_pieces(file: Path, kind: int = 1) -> None:
    """Writes a SentencePiece file. `kind` 1 is unigram, 2 BPE."""
    from transformers.convert_slow_tokenizer import import_protobuf

    model = import_protobuf().ModelProto()
    for text, score, piece_kind in PIECES:
        model.pieces.add(piece=text, score=score, type=piece_kind)
    model.trainer_spec.model_type = kind
    model.trainer_spec.unk_id = 1
    model.normalizer_spec.add_dummy_prefix = True
    model.normalizer_spec.remove_extra_whitespaces = True
    file.write_bytes(model.SerializeToString())


# Arithmetic


def layer_norm(arrays: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x * arrays[f"{name}/scale"] + arrays[f"{name}/bias"]


def project(arrays: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    """Channels -> heads x channels of a head."""
    return np.einsum("bnd,dhk->bnhk", x, arrays[f"{name}/kernel"]) + arrays[f"{name}/bias"]


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def attention(
    arrays: Arrays, name: str, x: np.ndarray, mask: np.ndarray | None = None
) -> np.ndarray:
    """flax's MultiHeadDotProductAttention. `mask` is True on the keys that are seen."""
    query = project(arrays, f"{name}/query", x)
    key = project(arrays, f"{name}/key", x)
    value = project(arrays, f"{name}/value", x)
    scores = np.einsum("bqhk,bshk->bhqs", query, key) / np.sqrt(query.shape[-1])
    if mask is not None:
        scores = np.where(mask[:, None, None], scores, np.finfo(np.float32).min)
    attended = np.einsum("bhqs,bshk->bqhk", softmax(scores), value)
    return output(arrays, name, attended)


def output(arrays: Arrays, name: str, heads: np.ndarray) -> np.ndarray:
    kernel, bias = arrays[f"{name}/out/kernel"], arrays[f"{name}/out/bias"]
    return np.einsum("bqhk,hkd->bqd", heads, kernel) + bias


def dense(arrays: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    return x @ arrays[f"{name}/kernel"] + arrays[f"{name}/bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    """flax's, which is the approximate one unless told otherwise."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def bilinear(source: int, target: int) -> np.ndarray:
    """The matrix of `jax.image.resize`: a triangle, as wide as an output cell where it shrinks."""
    scale = source / target
    centres = (np.arange(target) + 0.5) * scale - 0.5
    distance = np.abs(centres[:, None] - np.arange(source)) / max(scale, 1)
    weights = np.maximum(1 - distance, 0)
    return weights / weights.sum(-1, keepdims=True)


def vision_tokens(arrays: Arrays, image: np.ndarray, *, values_alone: bool = True) -> np.ndarray:
    """Image `[b H W 3]` in 0..1 -> patch tokens `[b h w d]`.

    `values_alone`: as TIPS's notebook for segmentation by words has the last block
    (`encode_image_value_attention`); without it as `VisionEncoder` gives them.
    """
    arrays = {name: value.astype(np.float64) for name, value in arrays.items()}
    start = "encoder/ToTokenSequence_0"
    kernel = arrays[f"{start}/embedding/kernel"]
    patch = len(kernel)
    b, height, width, _ = image.shape
    h, w = height // patch, width // patch
    patches = image.reshape(b, h, patch, w, patch, 3)
    x = np.einsum("bhywxc,yxcd->bhwd", patches, kernel) + arrays[f"{start}/embedding/bias"]
    positions = arrays[f"{start}/posembed_input"][0]
    side = len(positions)
    x = x + np.einsum("hH,wW,HWd->hwd", bilinear(side, h), bilinear(side, w), positions)
    x = x.reshape(b, h * w, -1)
    cls = np.tile(arrays[f"{start}/cls"], (b, 1, 1))
    x = np.concatenate([cls, x], axis=1)

    depth = sum(name.endswith("LayerNorm_0/scale") for name in arrays)
    for number in range(depth):
        block = f"encoder/transformer/encoderblock_{number}"
        name = f"{block}/MultiHeadDotProductAttention_0"
        y = layer_norm(arrays, f"{block}/LayerNorm_0", x)
        if values_alone and number == depth - 1:
            attended = output(arrays, name, project(arrays, f"{name}/value", y))
        else:
            attended = attention(arrays, name, y)
        x = attended + x
        y = layer_norm(arrays, f"{block}/LayerNorm_1", x)
        y = gelu(dense(arrays, f"{block}/MlpBlock_0/Dense_0", y))
        x = dense(arrays, f"{block}/MlpBlock_0/Dense_1", y) + x
    x = layer_norm(arrays, "encoder/encoder_norm", x)
    return x[:, cls.shape[1] :].reshape(b, h, w, -1)


def text_states(arrays: Arrays, ids: np.ndarray, paddings: np.ndarray) -> list[np.ndarray]:
    """Token ids and paddings `[b t]` -> the embeddings and the states after each block, the last of
    them normed, `[b t e]`. Their mean over the tokens is the published vector."""
    arrays = {name: value.astype(np.float64) for name, value in arrays.items()}
    table = arrays["token_emb/emb_var"]
    dim = table.shape[1]
    mask = paddings == 0

    count = dim // 2
    step = np.log(10_000 / 1) / max(count - 1, 1)
    scales = np.exp(np.arange(count) * -step)
    times = np.arange(ids.shape[1])[:, None] * scales
    positions = np.concatenate([np.sin(times), np.cos(times)], axis=1)
    states = [table[ids] * dim**0.5 + np.pad(positions, ((0, 0), (0, dim % 2)))]
    depth = sum(name.endswith("LayerNorm_0/scale") for name in arrays)
    for number in range(depth):
        block = f"transformer/encoderblock_{number}"
        x = states[-1]
        y = layer_norm(arrays, f"{block}/LayerNorm_0", x)
        x = attention(arrays, f"{block}/MultiHeadDotProductAttention_0", y, mask) + x
        y = layer_norm(arrays, f"{block}/LayerNorm_1", x)
        y = np.maximum(dense(arrays, f"{block}/MlpBlock_0/Dense_0", y), 0) * mask[..., None]
        states.append(x + dense(arrays, f"{block}/MlpBlock_0/Dense_1", y) * mask[..., None])
    states[-1] = layer_norm(arrays, "text_encoder_norm", states[-1])
    return states
