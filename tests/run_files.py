"""What tests read in a run folder, and a run folder of a completer."""

import json
from pathlib import Path

import jax
import numpy as np
from orbax import checkpoint as ocp

from r2sm_jax.cli import to_json
from r2sm_jax.config import FORMAT_VERSION, Config
from r2sm_jax.inference.crop_models import MaskCompleter
from r2sm_jax.training.run_folder import write_json, write_model


def with_flags(flags: list[str], *given: object) -> list[str]:
    """Flags with others in place of those of the same name: a flag given twice is refused."""
    words = [str(word) for word in given]
    kept, is_left_out = [], False
    for word in flags:
        if word.startswith("--"):
            is_left_out = word in words
        if not is_left_out:
            kept.append(word)
    return kept + words


def steps(run: Path) -> list[int]:
    """The steps that have a checkpoint."""
    return sorted(int(path.name) for path in (run / "checkpoints").iterdir())


def arrays(run: Path, step: int) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint by path."""
    with ocp.CheckpointManager((run / "checkpoints").absolute()) as manager:
        # The run may have had other devices than this process.
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        state = ocp.args.StandardRestore(fallback_sharding=here)
        content = manager.restore(step, args=ocp.args.Composite(state=state))
    return {name: np.asarray(value) for name, value in content["state"].items()}


def logged(run: Path, name: str = "train/loss") -> dict[int, dict[str, float]]:
    """The lines of metrics.jsonl that have a figure, by step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if name in line}


def save_completer(folder: Path, completer: MaskCompleter) -> None:
    """Writes a completer as its training does."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {"model_type": "r2sm", "format_version": FORMAT_VERSION, "compact": False}
    write_json(folder / "config.json", stored | {"config": to_json(Config())})
    entry = {"config": to_json(completer.config), "threshold": completer.threshold}
    write_model(folder, "completer", completer.weights, {"completer": entry, "step": 1})
