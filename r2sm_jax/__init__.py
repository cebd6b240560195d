"""Text-guided segmentation that knows which mask you mean: modal (visible) or amodal (complete)."""

__version__ = "0.1.0"


def load(path):
    """A `Predictor` from a run folder. Raises InputError where there is no trained run."""
    from pathlib import Path

    from r2sm_jax.runs import open_run

    return open_run(Path(path)).predictor
