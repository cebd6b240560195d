"""Speed of scoring masks, against a plain loop: `python scripts/benchmark_evaluation.py [--queries 78204]`.

Makes as many queries as R2SM's validation has, ten an image of 640 x 480, with predictions of one to three instances,
and scores them as `evaluate --predictions` does. The plain loop decodes masks one by one with pycocotools, counts
pixels in numpy and runs COCOeval; it is given a part of the queries (`--loop`), and its figures must be the same.
"""

import contextlib
import io
import json
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from scipy.ndimage import minimum_filter

from r2sm_jax.cli import parse_flags
from r2sm_jax.data import masks
from r2sm_jax.data.dataset import read_json
from r2sm_jax.errors import cli_main
from r2sm_jax.evaluation.instances import instance_figures
from r2sm_jax.evaluation.predictions import score_predictions
from r2sm_jax.evaluation.report import split_figures

HEIGHT, WIDTH, INSTANCES, PER_IMAGE = 480, 640, 6, 10
BOUNDARY = 16
"""Pixels, a fiftieth of the diagonal."""


@dataclass(frozen=True)
class Options:
    """How much is scored."""

    queries: int = 78_204
    loop: int = 4000
    """Queries of the comparison with a plain loop."""


def blob(rng: np.random.Generator) -> np.ndarray:
    """A rotated, dented ellipse."""
    angles = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    radius = rng.uniform(20, 110) * (1 + 0.25 * rng.standard_normal(24).cumsum() / 5)
    centre = rng.uniform([60, 60], [WIDTH - 60, HEIGHT - 60])
    points = centre + radius[:, None].clip(5) * np.stack([np.cos(angles), np.sin(angles)], 1)
    image = Image.new("1", (WIDTH, HEIGHT))
    ImageDraw.Draw(image).polygon([tuple(p) for p in points], fill=1)
    return np.asarray(image)


def make(folder: Path, count: int, seed: int = 0) -> tuple[Path, Path]:
    """A dataset file and predictions for it, with masks from a pool: drawing them is not the point."""
    rng = np.random.default_rng(seed)
    pool = [blob(rng) for _ in range(80)]
    shifted = [np.roll(mask, tuple(rng.integers(-9, 10, 2)), (0, 1)) for mask in pool]
    rles, drawn = [masks.encode(m) for m in pool], [masks.encode(m) for m in shifted]
    cut = {}
    data: dict[str, Any] = {
        "images": [],
        "annotations": [],
        "categories": [{"id": 1, "name": "thing"}],
        "queries": [],
    }
    predictions = []
    for image in range(1, -(-count // PER_IMAGE) + 1):
        data["images"].append(
            {"id": image, "file_name": f"{image}.jpg", "height": HEIGHT, "width": WIDTH}
        )
        chosen, first = (
            rng.choice(len(pool), INSTANCES, replace=False),
            len(data["annotations"]) + 1,
        )
        for k in chosen:
            front = int(rng.choice(chosen))
            if (k, front) not in cut:
                cut[k, front] = masks.encode(pool[k] & ~pool[front] if front != k else pool[k])
            record = {
                "id": len(data["annotations"]) + 1,
                "image_id": image,
                "category_id": 1,
                "iscrowd": 0,
            }
            record |= {
                "segmentation": rles[k],
                "visible_mask": cut[k, front],
                "bbox": [0, 0, 1, 1],
                "area": 1,
            }
            data["annotations"].append(record)
        for _ in range(min(PER_IMAGE, count - len(data["queries"]))):
            meant = rng.choice(INSTANCES, rng.integers(1, 4), replace=False)
            number, kind = len(data["queries"]) + 1, str(rng.choice(["modal", "amodal"]))
            data["queries"].append(
                {
                    "id": number,
                    "image_id": image,
                    "text": "the thing",
                    "mask_type": kind,
                    "instance_ids": [int(first + i) for i in meant],
                }
            )
            predictions += [
                {
                    "query_id": number,
                    "segmentation": drawn[chosen[i]],
                    "score": round(float(rng.random()), 3),
                }
                for i in meant
            ]
    (folder / "data.json").write_text(json.dumps(data), "utf-8")
    (folder / "predictions.json").write_text(json.dumps(predictions), "utf-8")
    return folder / "data.json", folder / "predictions.json"


def ours(data: Path, predictions: Path) -> dict[str, Any]:
    """All figures by this package."""
    (data.parent / "1.jpg").touch()  # that images are there is checked, none is opened
    scored = score_predictions(predictions, read_json(data))
    figures, seconds = timed(instance_figures, scored.instances)
    return {
        **split_figures(scored.results, scored.instances)["all"],
        **figures,
        "ap_seconds": seconds,
    }


def plain_loop(data: Path, predictions: Path) -> dict[str, float]:
    """gIoU, cIoU, occluded and boundary IoU, AP and AR by decoding every mask and by COCOeval."""
    records, found = json.loads(data.read_text("utf-8")), json.loads(predictions.read_text("utf-8"))
    annotations = {a["id"]: a for a in records["annotations"]}
    by_query: dict[int, list[Any]] = {}
    for entry in found:
        by_query.setdefault(entry["query_id"], []).append(entry)
    ious, hidden_ious, outlines, both, either = [], [], [], 0, 0
    truth = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "thing"}]}
    results = []
    for query in records["queries"]:
        meant = [annotations[i] for i in query["instance_ids"]]
        key = "segmentation" if query["mask_type"] == "amodal" else "visible_mask"
        wanted, seen, whole, drawn = (
            np.stack([masks.coco.decode(x) for x in group]).any(0)
            for group in (
                [a[key] for a in meant],
                [a["visible_mask"] for a in meant],
                [a["segmentation"] for a in meant],
                [e["segmentation"] for e in by_query[query["id"]]],
            )
        )
        intersection, union = int(np.sum(wanted & drawn)), int(np.sum(wanted | drawn))
        ious.append(intersection / (union + 1e-5) if union else 1.0)
        both, either = both + intersection, either + union
        inner = [minimum_filter(x, 2 * BOUNDARY + 1, mode="constant") for x in (wanted, drawn)]
        edges = wanted & (inner[0] == 0), drawn & (inner[1] == 0)
        outlines.append(np.sum(edges[0] & edges[1]) / (np.sum(edges[0] | edges[1]) + 1e-5))
        hidden = whole & ~seen
        if query["mask_type"] == "amodal" and hidden.any():
            outside = drawn & ~seen
            hidden_ious.append(np.sum(outside & hidden) / (np.sum(outside | hidden) + 1e-5))
        truth["images"].append({"id": query["id"], "height": HEIGHT, "width": WIDTH})
        for a in meant:
            number = len(truth["annotations"]) + 1
            truth["annotations"].append(
                {
                    "id": number,
                    "image_id": query["id"],
                    "category_id": 1,
                    "iscrowd": 0,
                    "bbox": [0, 0, 1, 1],
                    "area": float(masks.coco.area(a[key])),
                    "segmentation": a[key],
                }
            )
        for e in by_query[query["id"]]:
            results.append(
                {"image_id": query["id"], "category_id": 1}
                | {k: e[k] for k in ("segmentation", "score")}
            )
    with contextlib.redirect_stdout(io.StringIO()):
        reference: Any = COCO()
        reference.dataset = truth
        reference.createIndex()
        evaluation = COCOeval(reference, reference.loadRes(results), "segm")
        evaluation.params.useCats = 0
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    stats = evaluation.stats
    figures = {"giou": np.mean(ious), "ciou": both / either, "occluded_iou": np.mean(hidden_ious)}
    figures |= {"boundary_iou": np.mean(outlines), "ap": stats[0], "ap75": stats[2], "ar": stats[8]}
    return {name: float(value) for name, value in figures.items()}


def timed(work: Any, *arguments: Any) -> tuple[dict[str, Any], float]:
    start = time.perf_counter()
    figures = work(*arguments)
    return figures, time.perf_counter() - start


def main() -> None:
    options = parse_flags(Options, sys.argv[1:], prog="python scripts/benchmark_evaluation.py")
    with tempfile.TemporaryDirectory() as name:
        files = make(Path(name), min(options.loop, options.queries))
        mine, seconds = timed(ours, *files)
        plain, plain_seconds = timed(plain_loop, *files)
        for key, value in plain.items():
            if abs(mine[key] - value) > 1e-9:
                raise SystemExit(f"{key}: {mine[key]} here, {value} by the plain loop")
        print(
            f"{min(options.loop, options.queries)} queries: {seconds:.1f} s, plain loop {plain_seconds:.1f} s",
            end="",
        )
        print(
            f" ({plain_seconds / seconds:.1f} times as long), the same {', '.join(plain)}",
            flush=True,
        )
        files = make(Path(name), options.queries)
        figures, seconds = timed(ours, *files)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"{options.queries} queries: {seconds:.0f} s, at most {memory:.1f} GiB; gIoU {figures['giou']:.4f}"
        )
        print(f"of these, AP and AR of all queries {figures['ap_seconds']:.1f} s")


if __name__ == "__main__":
    cli_main(main)
