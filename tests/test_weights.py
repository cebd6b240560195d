import json
import pickle

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from r2sm_jax.errors import InputError
from r2sm_jax.models.hub import (
    INDEX,
    file_sha256,
    find_model,
    read_model_config,
    read_tensors,
    weight_files,
    weights_sha256,
)
from r2sm_jax.models.keys_sam import ENCODER_AND_DECODER
from r2sm_jax.models.layers import Linear
from r2sm_jax.models.matching import (
    KeyTable,
    fill_state,
    match_weights,
    parameter_shapes,
    put_weights,
    rename_keys,
)


class Small(nnx.Module):
    """One of every kind of parameter."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.words = nnx.Embed(7, 4, rngs=rngs)
        self.dense = Linear(4, 3, rngs=rngs)
        self.norm = nnx.LayerNorm(3, rngs=rngs)
        self.conv = nnx.Conv(3, 5, (2, 6), rngs=rngs)


TABLE = KeyTable(
    {
        "words.weight": "words.embedding",
        "fc.(weight|bias)": r"dense.\1",
        "norm.(weight|bias)": r"norm.\1",
        "conv.(weight|bias)": r"conv.\1",
    }
)


def match(state: nnx.State, tensors, table: KeyTable, source):
    """The report of a file that needs no fitting."""
    shapes = parameter_shapes(state, table)
    return match_weights(rename_keys(tensors, table), shapes, table, source=source)


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
        abstract[0], fill_state(abstract[1], read_tensors(tmp_path), TABLE, source=tmp_path)
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
    model = nnx.merge(abstract[0], fill_state(abstract[1], read, TABLE, source=tmp_path))
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
        InputError, match=r"--model\.vision\.sam .*notes\.txt: not a safetensors file"
    ):
        find_model(str(tmp_path / "notes.txt"), "--model.vision.sam")


def test_everything_that_does_not_fit_is_said_at_once(tmp_path, tensors, abstract):
    tensors["gain"] = np.ones(2, np.float32)
    tensors["fc.bias"] = np.ones(9, np.float32)
    del tensors["words.weight"], tensors["norm.bias"]
    with pytest.raises(InputError) as caught:
        fill_state(abstract[1], tensors, TABLE, source=tmp_path)
    message = str(caught.value)
    for part in (
        "unknown key gain",
        "fc.bias has shape (9,), not (3,)",
        "missing words.embedding",
        "missing norm.bias",
    ):
        assert part in message
    with pytest.raises(InputError, match="and 50 more"):
        fill_state(abstract[1], {f"k{i}": np.ones(1) for i in range(63)}, TABLE, source=tmp_path)


def test_part_of_a_file_can_be_loaded_and_the_rest_reported(tmp_path, tensors, abstract):
    model = Small(rngs=nnx.Rngs(1))
    state = nnx.state(model)
    table = TABLE._replace(
        prefixes=("net.",), unused=("old.*",), new=("dense.*",), within=("dense.*", "conv.*")
    )
    given = {f"net.{k}": v for k, v in tensors.items() if "conv" in k} | {"net.old.1.2": np.ones(1)}
    found = match(state, given, table, tmp_path)
    assert found.loaded["conv.kernel"] == "net.conv.weight" and found.unused == ["net.old.1.2"]
    assert sorted(found.initialised) == ["dense.bias", "dense.kernel"] and not found.copied
    assert (
        str(found) == "2 loaded, 0 copied, 2 initialised, 1 unused"
        and "unused       net.old.1.2" in found.lines()
    )
    nnx.update(model, put_weights(state, found.values))
    np.testing.assert_array_equal(model.conv.bias[...], tensors["conv.bias"])
    np.testing.assert_array_equal(
        model.dense.kernel[...], Small(rngs=nnx.Rngs(1)).dense.kernel[...]
    )
    with pytest.raises(InputError, match="missing dense"):
        match(state, given, table._replace(new=()), tmp_path)


def test_one_key_can_fill_several_parameters(tmp_path, tensors, abstract):
    del tensors["norm.bias"]
    renamed = rename_keys(tensors, TABLE)
    for weight in list(renamed.weights):
        if weight.path == "norm.scale":
            renamed.weights.append(weight._replace(path="norm.bias"))
    shapes = parameter_shapes(abstract[1], TABLE)
    report = match_weights(renamed, shapes, TABLE, source=tmp_path)
    model = nnx.merge(abstract[0], put_weights(abstract[1], report.values))
    np.testing.assert_array_equal(model.norm.bias[...], tensors["norm.weight"])
    assert report.copied == {"norm.bias": "norm.weight"}


@pytest.mark.parametrize("content", ["[1]", "{", "\xff"])
def test_a_config_that_is_no_object_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=r"config\.json: (this is not JSON|model_type 'none')"):
        read_model_config(tmp_path, lambda config: config)


def test_the_first_pattern_that_matches_a_whole_key_names_the_path():
    table = KeyTable({r"a.(\d+).gain": r"x.\1", "a.(.*)": r"rest.\1"})
    assert table.rename("a.0.gain") == "x.0" and table.rename("a.12.bias") == "rest.12.bias"
    assert table.rename("b.a.1") is None
    assert ENCODER_AND_DECODER.rename("mask_decoder.mask_tokens.weight") == "decoder.mask_tokens"
