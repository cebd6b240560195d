"""Training of the outliner: prompts, examples, losses, learning."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_crops import OUTLINER as SIZES, disc, trained

from r2sm_jax.data import masks
from r2sm_jax.data.crops import CropWindow
from r2sm_jax.data.dataset import Instance, Sample
from r2sm_jax.evaluation.completion import prompt_figures
from r2sm_jax.evaluation.crop_selection import fit_outliner
from r2sm_jax.inference.crop_models import MaskOutliner
from r2sm_jax.models.calibration import NOT_CALIBRATED
from r2sm_jax.models.crop_unet import CropOutput, make_outliner
from r2sm_jax.training.crops import object_weight
from r2sm_jax.training.outliner import (
    LOSS_WEIGHTS,
    OUTLINER,
    OutlineTargets,
    cut_prompt_examples,
    negative_clicks,
    outline_losses,
    positive_clicks,
    random_prompt,
    shown_share,
)
from r2sm_jax.training.step import total_loss


def disc_picture(rng) -> Sample:
    """A bright disc on a dark ground."""
    mask = disc(48, 64, rng.uniform(16, 48), rng.uniform(14, 34), rng.uniform(6, 13))
    image = rng.integers(0, 60, (48, 64, 3)).astype(np.uint8)
    image[mask] += 150
    return Sample(1, "a.png", image, (Instance(1, "ball", mask, mask),), ())


@pytest.mark.parametrize("seed", range(5))
def test_clicks_lie_on_the_object_and_beside_it(seed):
    rng = np.random.default_rng(seed)
    mask = disc(40, 60, 20, 25, 9) & ~disc(40, 60, 24, 25, 6)
    for click in positive_clicks(mask, 3, rng):
        assert click.is_positive and mask[int(click.y), int(click.x)]
    for click in negative_clicks(mask, 3, rng):
        assert not click.is_positive and not mask[int(click.y), int(click.x)]


def test_prompts_of_all_kinds_are_drawn_and_examples_show_what_they_mean():
    rng = np.random.default_rng(0)
    prompts = [random_prompt(disc(40, 60, 30, 20, 10), rng) for _ in range(200)]
    assert any(len(prompt.clicks) > 1 for prompt in prompts)
    assert any(not click.is_positive for prompt in prompts for click in prompt.clicks)
    # A prompt without a box has a positive click, or nothing would say what is meant.
    for prompt in prompts:
        assert prompt.box or any(click.is_positive for click in prompt.clicks)
    kinds = set()
    for _ in range(40):
        for example in cut_prompt_examples(disc_picture(rng), 32, rng):
            assert example.shape == (32, 32, 9) and example[..., 7].any()
            kinds.add((bool(example[..., 4].any()), bool(example[..., 5].any())))
            bright = example[..., 0][example[..., 7] == 255]
            assert not bright.size or bright.min() >= 100
    assert kinds == {(True, False), (True, True), (False, True)}


def test_crops_around_clicks_also_show_parts_of_an_object_and_say_how_much():
    rng = np.random.default_rng(0)
    visible = disc(300, 400, 150, 200, 90)
    image = np.zeros((300, 400, 3), np.uint8)
    sample = Sample(1, "a.png", image, (Instance(1, "ball", visible, visible),), ())
    examples = [example for _ in range(60) for example in cut_prompt_examples(sample, 32, rng)]
    shares = [int(example[0, 0, 8]) for example in examples]
    assert max(shares) == 255 and min(shares) < 100

    x0, y0, x1, y1 = masks.box(visible)
    assert shown_share(CropWindow(x0, y0, x1 - x0), visible) == 1
    quarter = CropWindow((x0 + x1) // 2, (y0 + y1) // 2, 200)
    assert shown_share(quarter, visible) == pytest.approx(0.25, abs=0.01)


def test_the_loss_of_outlines_falls_with_a_better_mask_and_a_better_predicted_iou():
    target = jnp.asarray(disc(16, 16, 8, 8, 5), jnp.float32)[None]
    good, bad = 8 * (target - 0.5), 8 * (jnp.roll(target, 6, axis=2) - 0.5)

    def losses_of(logits, iou, target, shown_share=1.0):
        crops, shares = jnp.zeros((1, 32, 32, 7)), jnp.full(len(target), shown_share)
        targets = OutlineTargets(crops, target, shares, object_weight(target > 0.5))
        losses = outline_losses(CropOutput(logits, iou, None), targets)
        return float(total_loss(losses, LOSS_WEIGHTS)), losses

    loss_of_good, losses = losses_of(good, jnp.ones(1), target)
    assert losses["iou"] == 1 and loss_of_good < losses_of(bad, jnp.ones(1), target)[0]
    assert loss_of_good < losses_of(good, jnp.zeros(1), target)[0]
    # Where the crop shows a quarter of the object, no mask has more than a quarter of it.
    assert losses_of(good, jnp.ones(1), target, 0.25)[1]["iou"] == pytest.approx(0.25)
    # An example without an object counts nothing.
    padded = [jnp.concatenate([x, jnp.zeros_like(x)]) for x in (good, jnp.ones(1), target)]
    assert losses_of(*padded)[0] == pytest.approx(loss_of_good, rel=1e-5)


def test_the_outliner_learns_and_leaves_the_backbone_alone():
    rng = np.random.default_rng(0)
    model = make_outliner(SIZES, rngs=nnx.Rngs(0))
    _, params, constants = nnx.split(model, nnx.Param, ...)
    assert set(constants) == {"efficientnet"} and "efficientnet" not in params
    batches = [
        np.stack([next(cut_prompt_examples(disc_picture(rng), 32, rng)) for _ in range(16)])
        for _ in range(150)
    ]
    weights, _ = trained(model, OUTLINER.loss, batches)
    samples = [disc_picture(rng) for _ in range(8)]
    fitted, figures = fit_outliner(MaskOutliner(SIZES, weights), samples)
    assert figures["box"]["objects"] == 8
    # Eight objects are too few to fit anything.
    assert set(fitted.calibration.values()) == {NOT_CALIBRATED}
    assert prompt_figures(fitted, samples)["click"] == figures["click"]
    assert figures["box"]["iou"] > figures["filled box"]["iou"] + 0.05
    assert figures["click"]["iou"] > 0.6
