"""SAM's mask decoder with words in place of points and boxes; test_parity.py has its numbers."""

from dataclasses import replace

import numpy as np
from flax import nnx
from tiny_models import TINY, fake_inputs

from r2sm_jax.config import DecoderConfig
from r2sm_jax.models.r2sm import R2SM


@nnx.jit
def run(model, inputs):
    return model(**inputs)


def test_answers_depend_on_their_own_query_and_its_real_tokens_only():
    config = replace(TINY, decoder=DecoderConfig("sam", dim=32, depth=2, heads=2, slots=2))
    model, inputs = R2SM(config, rngs=nnx.Rngs(0)), fake_inputs(config, 2, 3)
    # The first query keeps its words and has other padding; the others have other words.
    text = fake_inputs(config, 2, 3, seed=9)["text"]
    is_real = inputs["text_mask"][:, 0, :, None, None]
    text[:, 0] = np.where(is_real, inputs["text"][:, 0], np.float16(77))
    one, two = run(model, inputs), run(model, inputs | {"text": text})
    for name, a, b in zip(one._fields, one, two, strict=True):
        np.testing.assert_allclose(a[:, 0], b[:, 0], atol=2e-5, rtol=1e-4, err_msg=name)
    assert np.abs(np.asarray(one.masks[:, 1] - two.masks[:, 1])).max() > 1e-3
    modal, amodal = np.moveaxis(np.asarray(one.masks), 3, 0)
    assert (amodal >= modal).all() and ((one.iou >= 0) & (one.iou <= 1)).all()
