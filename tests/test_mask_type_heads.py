"""Mask-type heads."""

from dataclasses import replace
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import TINY, fake_inputs

from r2sm_jax.config import (
    DECODER_HEAD,
    LEARNED_HEADS,
    NO_HEAD,
    LossConfig,
    ReferenceHead,
)
from r2sm_jax.models import mask_type_heads as heads
from r2sm_jax.models.r2sm import R2SM, input_spec
from r2sm_jax.query import REFERENCES
from r2sm_jax.training.losses import type_loss


def test_the_configuration_names_all_heads():
    assert tuple(heads.LEARNED) == LEARNED_HEADS and tuple(REFERENCES) == get_args(ReferenceHead)


@pytest.mark.parametrize("name", heads.LEARNED)
def test_learned_heads_give_one_logit_and_ignore_padding(name):
    head = heads.LEARNED[name](32, 2, rngs=nnx.Rngs(0))
    inputs = fake_inputs(TINY, 2, 3)
    text, mask = jnp.asarray(inputs["text"], jnp.float32), jnp.asarray(inputs["text_mask"])
    logit = head(text, mask)
    assert logit.shape == (2, 3) and logit.dtype == np.float32 and np.unique(logit).size == 6
    other_padding = jnp.where(mask[..., None, None], text, 50.0)
    np.testing.assert_allclose(head(other_padding, mask), logit, atol=1e-5)
    np.testing.assert_allclose(heads.member_logits(head, text, mask).mean(0), logit, atol=1e-6)


def test_the_members_of_the_attention_head_start_and_learn_apart():
    head = heads.AttentionHead(32, 2, rngs=nnx.Rngs(0))
    inputs = fake_inputs(TINY, 2, 3)
    text, mask = jnp.asarray(inputs["text"], jnp.float32), jnp.asarray(inputs["text_mask"])
    logits = heads.member_logits(head, text, mask)
    assert logits.shape == (len(head.members), 2, 3) and np.unique(logits).size == logits.size
    is_amodal = jnp.arange(6).reshape(2, 3) % 2 == 0

    def gradients(head):
        graphdef, params = nnx.split(head, nnx.Param)

        def loss(params):
            logits = heads.member_logits(nnx.merge(graphdef, params), text, mask)
            return type_loss(logits, is_amodal, LossConfig()).mean()

        return jax.grad(loss)(params)["members"]

    before = gradients(head)
    head.members[1].out.kernel[...] = -9 * head.members[1].out.kernel[...]
    after = gradients(head)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-7), after[0], before[0])
    assert np.abs(after[1]["out"]["kernel"][...] - before[1]["out"]["kernel"][...]).max() > 1e-4


def test_the_decoder_head_reads_the_words_and_looks_at_the_image():
    model = R2SM(replace(TINY, head=DECODER_HEAD), rngs=nnx.Rngs(0))
    inputs = jax.tree.map(jnp.asarray, fake_inputs(TINY, 2, 3))
    other = fake_inputs(TINY, 2, 3, seed=1)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def answer(params, inputs):
        return nnx.merge(graphdef, params, rest)(**inputs).amodal_logit

    logit = answer(params, inputs)
    assert logit.shape == (2, 3) and np.unique(logit).size == 6
    assert np.abs(logit - answer(params, inputs | {"image": other["image"]})).min() > 0
    assert np.abs(logit - answer(params, inputs | {"text": other["text"]})).min() > 0
    padded = jnp.where(inputs["text_mask"][..., None, None], inputs["text"], jnp.float16(77))
    np.testing.assert_allclose(answer(params, inputs | {"text": padded}), logit, atol=1e-5)
    grads = jax.jit(jax.grad(lambda p: (answer(p, inputs) ** 2).sum()))(params)
    for module in ("decoder_head", "decoder", "vision"):
        assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads[module])), module


@pytest.mark.parametrize("name", [*REFERENCES, NO_HEAD])
def test_heads_that_learn_nothing_have_no_parameters(name):
    model = nnx.eval_shape(lambda: R2SM(replace(TINY, head=name), rngs=nnx.Rngs(0)))
    assert model.head is None
    out = nnx.eval_shape(lambda m, i: m(**i), model, input_spec(TINY, 1, 2))
    assert out.amodal_logit.shape == (1, 2)


def test_references_read_the_sentence_or_the_truth():
    text = "the mug, including the hidden parts"
    answers = {name: rule(text, "modal") for name, rule in REFERENCES.items()}
    assert answers == {
        "keyword": "amodal",
        "always_modal": "modal",
        "always_amodal": "amodal",
        "oracle": "modal",
    }
