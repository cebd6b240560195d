"""Published tensors -> our parameters, and the account of every key and parameter."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from r2sm_jax.errors import InputError
from r2sm_jax.models.keys import SAM
from r2sm_jax.models.layers import Linear
from r2sm_jax.models.matching import KeyTable, match_weights, put_weights


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


def test_layouts_of_torch_become_ours(tmp_path, tensors, abstract):
    """In the types of our parameters, or in those of the file."""
    graphdef, state = abstract
    tensors["fc.bias"] = tensors["fc.bias"].astype(np.float16)
    values = match_weights(tensors, state, TABLE, tmp_path).values
    model = nnx.merge(graphdef, put_weights(state, values))
    np.testing.assert_array_equal(model.dense.kernel[...], tensors["fc.weight"].T)
    np.testing.assert_array_equal(model.dense.bias[...], tensors["fc.bias"].astype(np.float32))
    assert model.dense.bias[...].dtype == jnp.float32
    np.testing.assert_array_equal(model.words.embedding[...], tensors["words.weight"])
    np.testing.assert_array_equal(model.norm.scale[...], tensors["norm.weight"])
    kernel = np.einsum("oihw->hwio", tensors["conv.weight"])
    np.testing.assert_array_equal(model.conv.kernel[...], kernel)
    kept = nnx.merge(graphdef, put_weights(state, values, keep_types=True))
    assert kept.dense.bias[...].dtype == jnp.float16


def test_everything_that_does_not_fit_is_named_at_once(tmp_path, tensors, abstract):
    file = tmp_path / "model.safetensors"
    tensors["gain"] = np.ones(2, np.float32)
    tensors["fc.bias"] = np.ones(9, np.float32)
    del tensors["words.weight"], tensors["norm.bias"]
    with pytest.raises(InputError) as caught:
        match_weights(tensors, abstract[1], TABLE, file)
    for part in (
        "unknown key gain",
        "fc.bias has shape (9,), not (3,)",
        "missing words.embedding",
        "missing norm.bias",
    ):
        assert part in str(caught.value)
    with pytest.raises(InputError, match="70 problems in all"):
        match_weights({f"k{i}": np.ones(1) for i in range(63)}, abstract[1], TABLE, file)


def test_part_of_a_model_is_loaded_and_the_rest_reported(tmp_path, tensors):
    model = Small(rngs=nnx.Rngs(1))
    state = nnx.state(model)
    table = TABLE._replace(
        prefixes=("net.",), unused=("old.*",), new=("dense.*",), within=("dense.*", "conv.*")
    )
    tensors = {f"net.{k}": v for k, v in tensors.items() if "conv" in k}
    tensors["net.old.1.2"] = np.ones(1)
    report = match_weights(tensors, state, table, tmp_path / "x.safetensors")
    assert report.loaded["conv.kernel"] == "net.conv.weight"
    assert report.unused == ["net.old.1.2"]
    assert sorted(report.initialised) == ["dense.bias", "dense.kernel"]
    assert str(report) == "2 loaded, 2 initialised, 1 unused"
    nnx.update(model, put_weights(state, report.values))
    np.testing.assert_array_equal(model.conv.bias[...], tensors["net.conv.bias"])
    with pytest.raises(InputError, match="missing dense"):
        match_weights(tensors, state, table._replace(new=()), tmp_path / "x.safetensors")


def test_the_first_pattern_that_matches_a_complete_key_counts():
    table = KeyTable({r"a.(\d+).gain": r"x.\1", "a.(.*)": r"rest.\1"})
    assert table.rename("a.0.gain") == "x.0" and table.rename("a.12.bias") == "rest.12.bias"
    assert table.rename("b.a.1") is None
    assert SAM.rename("mask_decoder.mask_tokens.weight") == "decoder.mask_tokens"
