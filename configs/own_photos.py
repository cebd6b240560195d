"""Your own photos with masks: the released model, trained on with them.

Task: R2SM, arXiv 2506.01795. `compose:` takes any COCO instances file (docs/photos.md), `json:` a
dataset file with queries (docs/data.md). It starts from `photos-small`, so a fifth of the steps of
`configs/photos.py` do: 13 to 22 minutes on two busy CPU cores. gIoU of held-out photos, for that
of `photos-small` itself: groceries 0.413 for 0.294, animals 0.709 for 0.695, plates under food with
amodal masks 0.934 for 0.320 (docs/results.md).

    python -m r2sm_jax.train configs/own_photos.py \\
        --data.source compose:INSTANCES.json --data.images DIR
"""

from dataclasses import replace
from pathlib import Path

from r2sm_jax.cli import load_config_file
from r2sm_jax.config import Config


def get_config() -> Config:
    config = load_config_file(Path(__file__).with_name("photos.py"))
    return replace(
        config,
        init="photos-small",
        data=replace(config.data, scenes=1024),
        # Large steps would destroy what it knows.
        optimizer=replace(config.optimizer, learning_rate=2e-4, muon_learning_rate=0.004),
        train=replace(
            config.train,
            steps=200,
            evaluate_every=100,
            evaluate_samples=48,
            checkpoint_every=100,
            report_samples=60,
        ),
    )
