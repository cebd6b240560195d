"""The report on composed photographs says how often a system finds what is there and refuses what
is not."""

import json
from pathlib import Path

import numpy as np
from made_pictures import PHOTO_CLASSES, write_photos

from r2sm_jax.data.masks import encode
from r2sm_jax.data.sources import open_source
from r2sm_jax.evaluation.predictions import score_predictions
from r2sm_jax.evaluation.report import make_report
from r2sm_jax.evaluation.tables import report_markdown

SIZE = 96


def test_no_target_accuracy_of_a_system_that_knows_all_and_of_one_that_never_refuses(
    tmp_path: Path,
):
    """One that knows all refuses all of `val_absent`; one that draws everywhere never refuses."""
    path = write_photos(tmp_path / "photos")
    names = (*PHOTO_CLASSES, "pizza", "clock")  # no photo has the last two
    categories = [{"id": k, "name": name} for k, name in enumerate(names, 1)]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"categories": categories}))
    sources = {
        split: open_source(f"compose:{path}", split, count=3, size=SIZE)
        for split in ("val", "val_absent")
    }
    for knows in (True, False):
        evaluated = {}
        for split, source in sources.items():
            entries = []
            for sample, query in (
                (s, q) for s in map(source.__getitem__, range(3)) for q in s.queries
            ):
                mask = np.full(sample.image.shape[:2], not knows)
                for i in sample.instances:
                    if knows and i.id in query.instance_ids:
                        mask |= i.complete if query.mask_type == "amodal" else i.modal
                entries.append(
                    {
                        "query_id": query.id,
                        "segmentation": encode(mask),
                        "score": 1.0,
                        "fused": True,
                    }
                )
            (tmp_path / f"{split}.json").write_text(json.dumps(entries))
            evaluated[split] = source, score_predictions(tmp_path / f"{split}.json", source)
        report = make_report(evaluated, source="compose", predictions="p.json")
        val, absent = (report["splits"][split] for split in sources)
        assert (
            val["variants"]["gres"]["target_accuracy"],
            val["variants"]["gres"]["no_target_accuracy"],
        ) == (1, None)
        assert (
            absent["variants"]["gres"]["target_accuracy"] is None and absent["all"]["queries"] > 3
        )
        assert (
            absent["variants"]["gres"]["no_target_accuracy"]
            == absent["all"]["giou"]
            == float(knows)
        )
        assert absent["predicted_iou"] == {"error": None, "curve": []}
        assert (
            val["predicted_iou"]["error"] < 1e-5 if knows else val["predicted_iou"]["error"] > 0.5
        )
        assert "Is it there, and how good is the mask?" in report_markdown(report)
