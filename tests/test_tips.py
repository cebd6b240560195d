"""TIPS: the same tokens as its published code computes, sizes from the file, and bad files."""

import io
import json
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
from flax import nnx
from published_tips import (
    PATCH,
    SIDE,
    vision_arrays,
    vision_tokens,
    write_vision,
)

import r2sm_jax
from r2sm_jax.cli import load_config_file
from r2sm_jax.config import ModelConfig, VisionConfig
from r2sm_jax.errors import InputError
from r2sm_jax.models import hub
from r2sm_jax.models.encoder_sizes import KNOWN_SIZES
from r2sm_jax.models.image_encoder import VisionEncoder
from r2sm_jax.models.keys_tips import tips_vit_sizes
from r2sm_jax.models.plain_vit import IMAGENET
from r2sm_jax.models.pretrained import load_pretrained, read_encoder_sizes
from r2sm_jax.models.r2sm import build_model
from r2sm_jax.models.tips import CHECKPOINTS, find_tips

VIT_FLAG = "--model.vision.vit"
BLOCK = "encoder/transformer/encoderblock_1"


@nnx.jit
def run(module, x):
    return module(x)


def load(source: Path | str, grid: int = SIDE) -> VisionEncoder:
    """The image encoder of a segmenter with a vision tower alone."""
    vision = VisionConfig(
        encoder="vit", vit=str(source), image_size=8 * grid, patch_size=8, out_dim=16
    )
    config = ModelConfig(vision)
    sizes = read_encoder_sizes(config)
    model = build_model(config, sizes, rngs=nnx.Rngs(0))
    graphdef, params, frozen = nnx.split(model, nnx.Param, ...)
    params, frozen, reports = load_pretrained(config, sizes, params, frozen)
    (report,) = reports.values()
    assert report.initialised == ["vision.join.kernel"] and not report.unused
    return nnx.merge(graphdef, params, frozen).vision


def refused(source: Path | str) -> str:
    """The sentence with which a vision tower is refused."""
    with pytest.raises(InputError) as raised:
        load(source)
    message = str(raised.value)
    assert "\n" not in message
    return message


def spoiled(folder: Path, name: str, value: np.ndarray | None) -> Path:
    """A vision tower with another array of this name; None = without it."""
    arrays = vision_arrays()
    arrays.pop(name, None)
    if value is not None:
        arrays[name] = value
    file = folder / "spoiled_vision.npz"
    np.savez(file, **arrays)
    return file


# Image tower


@pytest.mark.parametrize("grid", [SIDE, 3, 7])
def test_tokens_are_those_of_the_published_code(grid, tmp_path):
    """The published grid; at 3 and 7 positions are interpolated."""
    file = write_vision(tmp_path)
    ours = load(file, grid).vit
    assert ours is not None
    size = grid * PATCH
    pixels = np.random.default_rng(grid).uniform(size=(2, size, size, 3))
    image = ((pixels - IMAGENET[0]) / IMAGENET[1]).astype(np.float32)
    tokens = np.asarray(run(ours, image))
    expected = vision_tokens(vision_arrays(), pixels)
    print(f"largest difference {np.abs(tokens - expected).max():.1e}, {expected.std():.2f}")
    assert 0.1 < expected.std() < 10
    np.testing.assert_allclose(tokens, expected, atol=1e-4)

    # The last block makes a difference, and so do both class tokens.
    attended = vision_tokens(vision_arrays(), pixels, values_alone=False)
    assert np.abs(attended - expected).max() > 0.01
    arrays = vision_arrays()
    arrays["encoder/ToTokenSequence_0/cls"][0, 1] *= -1
    assert np.abs(vision_tokens(arrays, pixels) - expected).max() > 0.01


@pytest.mark.parametrize(
    ("name", "dim", "heads", "side"), [("tips-s14", 384, 6, 16), ("tipsv2-b14", 768, 12, 32)]
)
def test_sizes_are_read_from_the_shapes(name, dim, heads, side, monkeypatch):
    """Those of S/14 and of the second version's B/14."""

    def zeros(rng, shape):
        return np.broadcast_to(np.float32(0), shape)

    monkeypatch.setattr("published_tips.random_array", zeros)
    arrays = vision_arrays(dim=dim, heads=heads, mlp_dim=4 * dim, depth=12, patch=14, side=side)
    assert tips_vit_sizes(arrays, Path("x.npz")) == KNOWN_SIZES[name].vit


def test_arrays_of_other_shapes_are_named(tmp_path):
    for name, shape in (
        (f"{BLOCK}/MultiHeadDotProductAttention_0/key/kernel", (32, 2, 16)),
        (f"{BLOCK}/MlpBlock_0/Dense_1/bias", (31,)),
        ("encoder/ToTokenSequence_0/posembed_input", (1, 4, 3, 32)),
        ("encoder/ToTokenSequence_0/cls", (2, 32)),
        ("encoder/encoder_norm/scale", (64,)),
        (
            "encoder/transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel",
            (32, 5, 6),
        ),
    ):
        file = spoiled(tmp_path, name, np.zeros(shape, np.float32))
        message = refused(file)
        assert str(file) in message and name in message and str(shape) in message


def test_missing_and_unknown_arrays_are_named(tmp_path):
    name = f"{BLOCK}/MlpBlock_0/Dense_1/bias"
    assert "blocks.1.mlp.layers.1.bias" in refused(spoiled(tmp_path, name, None))
    name = "encoder/ToTokenSequence_0/cls"
    assert name in refused(spoiled(tmp_path, name, None))
    name = "encoder/another"
    assert name in refused(spoiled(tmp_path, name, np.zeros(3, np.float32)))
    np.savez(tmp_path / "torch_vision.npz", cls_token=np.zeros((1, 1, 32), np.float32))
    assert "JAX" in refused(tmp_path / "torch_vision.npz")


def test_nothing_is_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path(tmp_path, "sprung").touch, ())

    name = f"{BLOCK}/MlpBlock_0/Dense_1/bias"
    trap = np.empty(1, object)
    trap[0] = Trap()
    message = refused(spoiled(tmp_path, name, trap))
    assert name in message and not (tmp_path / "sprung").exists()


def test_damaged_files_are_one_sentence(tmp_path):
    file = write_vision(tmp_path)
    content = file.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"<html>", content[:-3000] + bytes(3000)):
        file.write_bytes(damaged)
        assert str(file) in refused(file)
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").rename(file)
    assert str(file) in refused(file)
    name = f"{BLOCK}/MlpBlock_0/Dense_1/bias"
    assert name in refused(spoiled(tmp_path, name, np.zeros(32, np.int32)))


# Finding


def test_a_folder_or_a_file(tmp_path):
    file = write_vision(tmp_path)
    assert find_tips(str(file), "vision", VIT_FLAG) == file
    assert find_tips(str(tmp_path), "vision", VIT_FLAG) == file
    assert find_tips(str(tmp_path), "text", VIT_FLAG) is None
    assert find_tips("hf:facebook/dinov2-small", "vision", VIT_FLAG) is None
    (tmp_path / "second_vision.npz").touch()
    assert "second_vision.npz" in refused(tmp_path)
    assert "tips-s14" in refused(tmp_path / "none.npz")


def test_a_published_file_is_downloaded_once(tmp_path, monkeypatch):
    addresses = []

    def answer(address, timeout):
        addresses.append(address)
        if len(addresses) == 1:
            raise URLError("no network")
        return io.BytesIO(b"content")

    monkeypatch.setattr(hub, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr("urllib.request.urlopen", answer)
    name = "tipsv2-b14"
    with pytest.raises(InputError, match="no network") as raised:
        find_tips(name, "vision", VIT_FLAG)
    assert addresses[0] in str(raised.value)
    assert not list(tmp_path.rglob("*.npz"))
    for _ in range(2):
        file = find_tips(name, "vision", VIT_FLAG)
        assert file is not None and file.read_bytes() == b"content"
    assert addresses[0].endswith(f"{CHECKPOINTS[name]}_vision.npz") and len(addresses) == 2


@pytest.mark.slow
def test_the_configuration_of_photos_takes_ten_steps(tmp_path, tiny_config):
    """At reduced size, with drawn scenes, and with a random tower in the published layout."""
    from r2sm_jax.train import train

    config = load_config_file(Path(__file__).parents[1] / "configs" / "photos_tips.py")
    tiny = tiny_config.model
    vision = replace(
        config.model.vision,
        image_size=64,
        dim=32,
        depth=1,
        heads=2,
        mlp_dim=64,
        out_dim=32,
        encoder="conv",
        efficientnet=None,
        vit=str(write_vision(tmp_path)),
        vit_grid=SIDE,
    )
    model = replace(tiny, vision=vision, decoder=replace(tiny.decoder, refine_exponent=1.0))
    data = replace(
        config.data, scenes=8, queries=2, text_only_queries=64, cache_dir=str(tmp_path / "cache")
    )
    loop = replace(tiny_config.train, steps=10, evaluate_every=10, checkpoint_every=10)
    folder = train(replace(config, run=str(tmp_path / "run"), model=model, data=data, train=loop))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == 10 and np.isfinite(losses).all()
    # The run has the tower's weights, and opens without the file.
    (tmp_path / "tips_small_vision.npz").unlink()
    predictor = r2sm_jax.load(folder)
    predictor.set_image(np.zeros((40, 60, 3), np.uint8))
    assert predictor.predict(["the red mug"])[0].mask.shape == (40, 60)
