import json
import pickle

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from r2sm_jax.errors import InputError
from r2sm_jax.models.layers import Linear
from r2sm_jax.models.weights import (
    INDEX,
    KeyTable,
    file_sha256,
    fill,
    find_model,
    key_table,
    match,
    place,
    read_published,
    read_tensors,
    weight_files,
    weights_sha256,
)


class Small(nnx.Module):
    """One of every kind of parameter."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.words = nnx.Embed(7, 4, rngs=rngs)
        self.dense = Linear(4, 3, rngs=rngs)
        self.norm = nnx.LayerNorm(3, rngs=rngs)
        self.conv = nnx.Conv(3, 5, (2, 6), rngs=rngs)


TABLE = KeyTable(
    {"words.weight": "words.embedding", "fc.*": "dense.*", "norm.*": "norm.*", "conv.*": "conv.*"}
)


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {
        "words.weight": (7, 4),
        "fc.weight": (3, 4),
        "fc.bias": (3,),
        "norm.weight": (3,),
        "norm.bias": (3,),
        "conv.weight": (5, 3, 2, 6),
        "conv.bias": (5,),
    }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def abstract() -> tuple[nnx.GraphDef, nnx.State]:
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Small(rngs=nnx.Rngs(0))))
    return graphdef, state


def shard(tensors, folder, count=3) -> None:
    """Writes tensors as `count` shards with an index, as the hub has them."""
    weight_map = {
        key: f"model-{i % count + 1:05d}-of-{count:05d}.safetensors"
        for i, key in enumerate(sorted(tensors))
    }
    for name in set(weight_map.values()):
        save_file({k: v for k, v in tensors.items() if weight_map[k] == name}, folder / name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_layouts_of_torch_become_ours(tmp_path, tensors, abstract):
    save_file(tensors, tmp_path / "model.safetensors")
    model = nnx.merge(
        abstract[0], fill(abstract[1], read_tensors(tmp_path), TABLE, source=tmp_path)
    )
    np.testing.assert_array_equal(model.dense.kernel[...], tensors["fc.weight"].T)
    np.testing.assert_array_equal(model.words.embedding[...], tensors["words.weight"])
    np.testing.assert_array_equal(model.norm.scale[...], tensors["norm.weight"])
    np.testing.assert_array_equal(
        model.conv.kernel[...], np.einsum("oihw->hwio", tensors["conv.weight"])
    )


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_files_are_read_as_they_are(tmp_path, tensors, abstract, stored):
    save_file({k: v.astype(stored) for k, v in tensors.items()}, tmp_path / "model.safetensors")
    read = read_tensors(tmp_path)
    assert {v.dtype for v in read.values()} == {np.dtype(stored)}
    model = nnx.merge(abstract[0], fill(abstract[1], read, TABLE, source=tmp_path))
    assert model.dense.kernel[...].dtype == jnp.float32
    np.testing.assert_array_equal(
        model.dense.bias[...], tensors["fc.bias"].astype(stored).astype(np.float32)
    )


def test_shards_are_read_as_one_and_hashed_together(tmp_path, tensors):
    shard(tensors, tmp_path)
    read = read_tensors(tmp_path)
    assert read.keys() == tensors.keys() and all((read[k] == tensors[k]).all() for k in tensors)
    before = weights_sha256(tmp_path)
    assert before not in [file_sha256(file) for file in weight_files(tmp_path)]
    last = weight_files(tmp_path)[-1]
    save_file({k: v + 1 for k, v in load_file(last).items()}, last)
    assert weights_sha256(tmp_path) != before


def test_a_missing_shard_is_named(tmp_path, tensors):
    shard(tensors, tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        InputError, match=r"model-00002-of-00003\.safetensors: missing; .* must be there"
    ):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    "index", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../../x.safetensors"}}']
)
def test_a_damaged_index_is_named(tmp_path, tensors, index):
    shard(tensors, tmp_path)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(InputError, match=INDEX):
        read_tensors(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 60, -8])
def test_a_truncated_file_is_named(tmp_path, tensors, keep):
    save_file(tensors, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:keep])
    with pytest.raises(
        InputError, match=r"model\.safetensors: truncated or not a safetensors file"
    ):
        read_tensors(tmp_path)


class Bomb:
    """Unpickled, it would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "sam_vit_b_01ec64.pth", "model.pt"])
def test_pickles_are_refused_and_never_opened(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    for ask in (
        lambda: read_tensors(tmp_path),
        lambda: find_model(str(tmp_path / name), "--model.vision.sam"),
    ):
        with pytest.raises(
            InputError, match=rf"{name} is a pickle .* runs any code .* convert it once with torch"
        ):
            ask()
    assert not (tmp_path / "ran").exists()


def test_a_file_of_tensors_can_stand_for_a_folder(tmp_path, tensors):
    save_file(tensors, tmp_path / "sam.safetensors")
    found = find_model(str(tmp_path / "sam.safetensors"), "--model.vision.sam")
    assert read_tensors(found).keys() == tensors.keys() and weights_sha256(found) == file_sha256(
        found
    )
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(
        InputError, match=r"--model\.vision\.init .*notes\.txt: not a safetensors file"
    ):
        find_model(str(tmp_path / "notes.txt"), "--model.vision.sam")


def test_everything_that_does_not_fit_is_said_at_once(tmp_path, tensors, abstract):
    tensors["gain"] = np.ones(2, np.float32)
    tensors["fc.bias"] = np.ones(9, np.float32)
    del tensors["words.weight"], tensors["norm.bias"]
    with pytest.raises(InputError) as caught:
        fill(abstract[1], tensors, TABLE, source=tmp_path)
    message = str(caught.value)
    for part in (
        "unknown key gain",
        "fc.bias has shape (9,), not (3,)",
        "missing words.embedding",
        "missing norm.bias",
    ):
        assert part in message
    with pytest.raises(InputError, match="and 50 more"):
        fill(abstract[1], {f"k{i}": np.ones(1) for i in range(63)}, TABLE, source=tmp_path)


def test_part_of_a_file_can_be_loaded_and_the_rest_reported(tmp_path, tensors, abstract):
    model = Small(rngs=nnx.Rngs(1))
    state = nnx.state(model)
    table = TABLE._replace(
        prefixes=["net."], unused=["old.**"], fresh=["dense.**"], within=["dense.**", "conv.**"]
    )
    given = {f"net.{k}": v for k, v in tensors.items() if "conv" in k} | {"net.old.1.2": np.ones(1)}
    found = match(state, given, table, source=tmp_path)
    assert found.loaded["conv.kernel"] == "net.conv.weight" and found.unused == ["net.old.1.2"]
    assert sorted(found.initialised) == ["dense.bias", "dense.kernel"] and not found.copied
    assert (
        str(found) == "2 loaded, 0 copied, 2 initialised, 1 unused"
        and "unused       net.old.1.2" in found.lines()
    )
    nnx.update(model, place(state, found.values))
    np.testing.assert_array_equal(model.conv.bias[...], tensors["conv.bias"])
    np.testing.assert_array_equal(
        model.dense.kernel[...], Small(rngs=nnx.Rngs(1)).dense.kernel[...]
    )
    with pytest.raises(InputError, match="missing dense"):
        match(state, given, table._replace(fresh=[]), source=tmp_path)


def test_a_value_may_be_changed_to_fit_and_fill_several_places(tmp_path, tensors, abstract):
    tensors["words.weight"] = np.arange(14 * 4, dtype=np.float32).reshape(14, 4)
    del tensors["norm.bias"]

    def fit(path, value, shape):
        return value[::2] if path == "words.embedding" and value.shape != shape else value

    def targets(path):
        return ["norm.scale", "norm.bias"] if path == "norm.scale" else [path]

    found = match(abstract[1], tensors, TABLE, source=tmp_path, fit=fit, targets=targets)
    model = nnx.merge(abstract[0], place(abstract[1], found.values))
    np.testing.assert_array_equal(model.words.embedding[...], tensors["words.weight"][::2])
    np.testing.assert_array_equal(model.norm.bias[...], tensors["norm.weight"])
    assert found.copied == {"norm.bias": "norm.weight"}


@pytest.mark.parametrize("content", ["[1]", "{", "\xff"])
def test_a_config_that_is_no_object_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=r"config\.json: (this is not JSON|model_type 'none')"):
        read_published(tmp_path, lambda config: config)


def test_the_notation_of_the_key_tables():
    table = KeyTable({"a.#.b#.*": "x.#.y.#.*", "a.#.gain": "x.#", "a.**": "rest.**"})
    assert table.rename("a.12.b3.bias") == "x.12.y.3.bias" and table.rename("a.0.gain") == "x.0"
    assert table.rename("a.12.b3.gain") == "rest.12.b3.gain" and table.rename("b.a.1") is None
    assert (
        key_table("clip").rename("encoder.layers.1.mlp.fc2.bias")
        == "vision.plain.blocks.1.mlp.layers.1.bias"
    )
    assert key_table("sam").rename("mask_decoder.mask_tokens.weight") == "decoder.mask_tokens"
