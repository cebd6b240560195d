"""A tiny model learns a few scenes by heart."""

from dataclasses import replace

import numpy as np
import pytest

from r2sm_jax.data import masks
from r2sm_jax.evaluation.evaluator import evaluate_source
from r2sm_jax.evaluation.report import split_figures
from r2sm_jax.evaluation.scorer import query_truths
from r2sm_jax.inference.load import load_run
from r2sm_jax.sources import open_split
from r2sm_jax.train import train

pytestmark = pytest.mark.slow

SCENES, SIDE = 4, 48


def best_without_learning(source) -> float:
    """gIoU of the best single mask for everything: all pixels that are covered often enough, at any
    threshold."""
    expected = [
        masks.decode(t.masks.amodal if t.query.mask_type == "amodal" else t.masks.modal)
        for t in query_truths(source)
    ]
    often = np.mean(expected, axis=0)
    drawn = [often >= level for level in np.linspace(0, often.max(), 20)]
    return max(
        float(np.mean([(m & t).sum() / max(1, (m | t).sum()) for t in expected])) for m in drawn
    )


@pytest.mark.usefixtures("steps_alone")
def test_a_tiny_model_learns_a_handful_of_scenes_by_heart(tiny_config, tmp_path):
    steps = 200
    config = replace(
        tiny_config,
        run=str(tmp_path / "run"),
        model=replace(tiny_config.model, vision=replace(tiny_config.model.vision, image_size=SIDE)),
        data=replace(tiny_config.data, scenes=SCENES, queries=8, instances=8, mirror=False),
        optimizer=replace(tiny_config.optimizer, learning_rate=4e-3, warmup_steps=10),
        train=replace(
            tiny_config.train,
            steps=steps,
            batch_size=SCENES,
            log_every=25,
            evaluate_every=steps,
            checkpoint_every=steps,
            evaluate_samples=1,
            report_samples=1,
        ),
    )
    run = load_run(train(config))
    source = open_split(config.data, count=SCENES, size=SIDE)
    figures = split_figures(evaluate_source(run.predictor, source).rows)
    guess = best_without_learning(source)
    print(f"gIoU {figures['all']['giou']:.3f}, without learning {guess:.3f}", figures["mask_type"])
    assert guess < 0.3 and figures["all"]["giou"] > 0.5
    assert figures["mask_type"]["accuracy"] > 0.9
