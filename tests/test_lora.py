from dataclasses import replace

import jax
import numpy as np
from fake_inputs import fake_inputs
from flax import nnx

from r2sm_jax.config import DecoderConfig, ModelConfig, PlainViTConfig, TextConfig, VisionConfig
from r2sm_jax.models.layers import Buffer, merge_lora
from r2sm_jax.models.r2sm import build_model

PLAIN = PlainViTConfig("clip", dim=16, depth=1, heads=2, mlp_dim=24, patch_size=6, activation="quick_gelu")
VISION = VisionConfig(
    image_size=32, patch_size=8, stem="patch", dim=32, depth=2, heads=2, mlp_dim=64, out_dim=24, init="x", name="y",
    plain=PLAIN, lora_rank=2, lora_alpha=4.0,
)  # fmt: skip
DECODER = DecoderConfig(dim=32, depth=1, heads=2, mlp_dim=64, slots=2, fine_dim=16, mask_dim=8)
CONFIG = ModelConfig(VISION, TextConfig(layers=(1, 2), max_tokens=6, dim=20), DECODER)
ADAPTED = 2 * 2 + 4  # qkv and out in two blocks, four projections in the plain ViT's block


def names(state) -> set[str]:
    return {".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)}


def answer(graphdef, weights):
    return jax.jit(lambda w, i: nnx.merge(graphdef, w)(**i))(weights, fake_inputs(CONFIG, 1, 2))


def test_published_weights_are_constants_and_only_the_products_are_trained():
    _, params, constants = nnx.split(build_model(CONFIG, rngs=nnx.Rngs(0)), nnx.Param, ...)
    trained = {name for name in names(params) if name.startswith("vision.")}
    assert {name for name in trained if "lora" not in name} == {"vision.join.kernel"}
    assert len(trained) == 1 + 2 * ADAPTED
    assert all(type(leaf) is Buffer for _, leaf in nnx.to_flat_state(constants))
    plain = names(nnx.state(build_model(replace(CONFIG, vision=replace(VISION, lora_rank=0)), rngs=nnx.Rngs(0))))
    assert names(constants) | {name for name in names(params) if "lora" not in name} == plain


def test_it_starts_without_effect_and_merges_into_an_ordinary_model():
    graphdef, weights = nnx.split(build_model(CONFIG, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)

    def stir(path, leaf):
        return leaf + 0.1 * rng.normal(size=leaf.shape).astype(np.float32) if "lora_out" in str(path) else leaf

    stirred = jax.tree_util.tree_map_with_path(stir, weights)
    changed = answer(graphdef, stirred).modal
    before = [np.array(leaf) for leaf in jax.tree.leaves(stirred)]
    config, merged_graph, merged = merge_lora(CONFIG, graphdef, stirred)
    assert np.abs(np.asarray(changed - answer(graphdef, weights).modal)).max() > 1e-3
    assert config.vision.lora_rank == 0 and not any("lora" in name for name in names(merged))
    np.testing.assert_allclose(answer(merged_graph, merged).modal, changed, atol=2e-5)
    # The configuration alone makes the same tree, so an export can be opened from it.
    fresh = nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0)))
    assert names(nnx.state(fresh)) == names(merged)
    assert names(nnx.state(fresh, Buffer)) == names(merged.filter(Buffer))
    np.testing.assert_allclose(answer(nnx.graphdef(fresh), merged).modal, changed, atol=2e-5)
    assert all(np.array_equal(a, b) for a, b in zip(before, jax.tree.leaves(stirred), strict=True))


def test_a_model_without_it_is_left_alone():
    config = replace(CONFIG, vision=replace(VISION, lora_rank=0))
    graphdef, weights = nnx.split(build_model(config, rngs=nnx.Rngs(0)))
    assert all(a is b for a, b in zip(merge_lora(config, graphdef, weights), (config, graphdef, weights), strict=True))
