"""How good the weights of a training step are, on the split that selects the best of a run.

Each function makes what `train` calls at every evaluation, with the weights, the step and the run
folder. That returns the score, of which the highest is the best, the figures for the log, and what
belongs to these weights in `config.json`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from r2sm_jax.config import Config
from r2sm_jax.data.dataset import Source
from r2sm_jax.data.sheet import save_sheet
from r2sm_jax.evaluation.evaluator import evaluate_source
from r2sm_jax.evaluation.fit_calibration import calibrate
from r2sm_jax.evaluation.page import example_rows, sample_queries
from r2sm_jax.evaluation.report import split_figures
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.language.states import TextStates
from r2sm_jax.models.r2sm import abstract_model
from r2sm_jax.synthetic.queries.sentences import intent_sentences

Evaluation = tuple[float, dict[str, Any], dict[str, Any]]
"""What `Evaluate` of training/loop.py gives."""
SHEET_ROWS = 6


def segmenter_evaluation(
    config: Config, texts: TextStates, dev: Source, *, fit_absence: bool
) -> Callable[..., Evaluation]:
    """Makes what calibrates and scores a segmenter, and saves a sheet of samples.

    `fit_absence`: whether training data have queries without a target.
    """
    graphdef, _ = nnx.split(abstract_model(config.model))
    untrained = Predictor(config.model, graphdef, nnx.State({}), texts)
    sentences = intent_sentences("calibration")
    split = config.train.select_on

    def evaluate(weights: nnx.State, step: int, folder: Path) -> Evaluation:
        # They may be divided among devices and processes; predicting uses one device.
        weights = jax.device_put(weights, jax.local_devices()[0])
        predictor = untrained.updated(weights=weights)
        calibration = calibrate(predictor, dev, sentences, split, fit_absence=fit_absence)
        calibrated = predictor.updated(calibration=calibration)
        results = evaluate_source(calibrated, dev, name=split)
        rows = example_rows(results, sample_queries(results, SHEET_ROWS))
        save_sheet(folder / "samples" / f"step_{step:06d}.png", rows, title=f"step {step}")

        found = split_figures(results.rows)
        figures = {
            "giou": found["all"]["giou"],
            "modal": found["modal"]["giou"],
            "amodal": found["amodal"]["giou"],
            "occluded_iou": found["all"]["occluded_iou"],
            "type_accuracy": found["mask_type"]["accuracy"],
        }
        shown = [f"{name} {value:.3f}" for name, value in figures.items() if value is not None]
        print(f"step {step}  {split}: {'  '.join(shown)}", flush=True)
        return float(figures["giou"] or 0), figures, {"calibration": calibration._asdict()}

    return evaluate
