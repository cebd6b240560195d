"""Text-guided segmentation that knows which mask you mean: modal (visible) or amodal (complete)."""

__version__ = "0.1.0"


def load(path):
    """A `Predictor` from a run folder, an export, a released model of this package such as "photos-small", or
    `hf:owner/name` of an export on the Hugging Face hub.

    Raises InputError where there is none, or one of its files is missing or was changed.
    """
    from pathlib import Path

    from r2sm_jax.runs import open_run

    return open_run(Path(path)).predictor
