"""`python -m r2sm_jax.predict RUN|EXPORT IMAGE "QUERY"`: the mask type that a sentence asks for, and the mask.

Writes `mask.png` (what was asked for), `modal.png`, `amodal.png`, `occluded.png`, `overlay.png` and
`prediction.json`. For a folder or a pattern in place of IMAGE, or a file of `--queries`, the answers go into one
`predictions.json`, see docs/predict.md.
"""

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.images import frames, open_image
from r2sm_jax.data.sheet import with_words
from r2sm_jax.errors import InputError, exit_cleanly, refuse_overwrite, writing
from r2sm_jax.flags import parse_flags
from r2sm_jax.predict_many import find_tasks, is_pattern, predict_many
from r2sm_jax.prediction import MASKS, Prediction, WordShare
from r2sm_jax.predictor import CutQuery, check_query
from r2sm_jax.runs import open_run

FILES = (*(f"{name}.png" for name in MASKS), "overlay.png", "prediction.json")


@dataclass(frozen=True)
class PredictConfig:
    """Segments what a sentence means in one image."""

    run: Annotated[str, tyro.conf.Positional]
    """Run folder, such as runs/latest, export, or OWNER/NAME of one on the Hugging Face hub."""
    image: Annotated[str, tyro.conf.Positional]
    """JPEG, PNG or WebP file, a folder of such, or a pattern in quotes, such as 'photos/*.jpg'."""
    query: Annotated[str | None, tyro.conf.Positional] = None
    """What to segment, such as "the complete shape of the red mug"; none with --queries."""
    queries: str | None = None
    """File of queries: a data set (.json), or text with one query a line, about every image, or IMAGE, a tab, QUERY."""
    mask_type: Literal["auto", "modal", "amodal"] = "auto"
    """auto: the sentence decides."""
    abstain: float = 0.0
    """Margin of the probability around 0.5 within which the answer is undecided: both masks are given, 0 to 0.5."""
    explain: bool = False
    """Also give the influence of each word on the decision: in the JSON, and below the overlay."""
    out: str | None = None
    """Folder for what is written; default: predictions/IMAGE (or the folder's name), or none with --json."""
    json: bool = False
    """Print one JSON object, and nothing else, on stdout."""
    overwrite: bool = False
    """Replace the files of an earlier prediction; several images: start anew instead of resuming."""
    checkpoint: str = "best"
    """best (dev gIoU), latest, or a step."""


def to_json(prediction: Prediction, words: Sequence[WordShare] = ()) -> dict[str, Any]:
    """A prediction as JSON values; masks are COCO RLE at the image's own resolution."""
    return {
        "query": prediction.query,
        "mask_type": prediction.mask_type,
        "amodal_probability": prediction.amodal_probability,
        **({"undecided": True} if prediction.undecided else {}),
        **({"words": [{"word": word, "share": round(share, 4)} for word, share in words]} if words else {}),
        "score": prediction.score,
        **{name: prediction.rle(name) for name in MASKS},
        "instances": [
            {"score": i.score, **{name: masks.encode(getattr(i, name)) for name in MASKS[:3]}}
            for i in prediction.instances
        ],
        "size": list(prediction.mask.shape),
    }


def write_prediction(folder: Path, image: np.ndarray, prediction: Prediction, words: Sequence[WordShare] = ()) -> None:
    """Writes `FILES` into `folder`; masks are 0 or 255 at the image's own resolution. `words` go below the overlay.

    Raises:
        InputError: the folder cannot be written.
    """
    overlay = prediction.overlay(image)
    with writing(folder / "prediction.json") as part:
        for name in MASKS:
            (folder / f"{name}.png").write_bytes(prediction.png(name))
        Image.fromarray(with_words(overlay, words) if words else overlay).save(folder / "overlay.png")
        part.write_text(json.dumps(to_json(prediction, words)) + "\n")


def summary(prediction: Prediction, words: Sequence[WordShare] = ()) -> str:
    """The answer in two lines; a third one lists the words of most influence, with their logits for amodal."""
    count = len(prediction.instances)
    strongest = sorted(words, key=lambda word: -abs(word.share))[:5]
    influence = "\nwords: " + ", ".join(f"{word} {share:+.1f}" for word, share in strongest) if words else ""
    decision = f"undecided, rather {prediction.mask_type}" if prediction.undecided else prediction.mask_type
    return (
        f"{prediction.query}\n"
        f"{decision} (probability of amodal {prediction.amodal_probability:.3f}), "
        f"{prediction.mask.mean():.1%} of the image, {count} instance{'' if count == 1 else 's'}, "
        f"predicted IoU {prediction.score:.2f}{influence}"
    )


def main() -> None:
    """Command line."""
    if len(list(takewhile(lambda word: not word.startswith("--"), sys.argv[1:]))) > 3:
        raise InputError("these are several images; give their folder, or a pattern in quotes: 'photos/*.jpg'")
    args = parse_flags(PredictConfig, sys.argv[1:], prog="python -m r2sm_jax.predict")
    if args.query is None and args.queries is None:
        raise InputError("there is no query; say what to segment, such as 'the red mug', or give --queries FILE")
    if args.queries is not None or Path(args.image).is_dir() or is_pattern(args.image):
        _predict_many(args)
    else:
        _predict_one(args, args.query or "")


def _predict_many(args: PredictConfig) -> None:
    """Answers about several images, or several queries."""
    if args.json:
        raise InputError("--json prints one answer; for several, leave it out and read predictions.json in --out")
    if args.explain or args.abstain:
        raise InputError("--explain and --abstain are for one query about one image; leave them out for several")
    tasks = find_tasks(args.image, args.query, args.queries)
    place = Path(args.image)
    name = place.parent.name if is_pattern(args.image) else place.stem
    out = Path(args.out) if args.out else Path("predictions") / (name or "images")
    predictor = open_run(Path(args.run), checkpoint=args.checkpoint).predictor
    outcome = predict_many(predictor, tasks, out, mask_type=args.mask_type, overwrite=args.overwrite)
    if cut := predictor.texts.truncated:
        limit = f"longer than {predictor.texts.max_tokens} tokens"
        print(f"warning: {len(cut)} queries are {limit}, and their ends were not read", file=sys.stderr)
    for sentence in outcome.failed.values():
        print(f"not answered: {sentence}", file=sys.stderr)
    print(
        f"{outcome.answered} images answered, {outcome.earlier} answered earlier, {len(outcome.failed)} not readable\n"
        f"wrote {outcome.file}"
    )


def _predict_one(args: PredictConfig, query: str) -> None:
    """Answers one query about one image. Cheap checks come first, loading the model last."""
    check_query(query)
    if not 0 <= args.abstain <= 0.5:
        raise InputError(f"--abstain {args.abstain}: a margin of probability lies between 0 and 0.5")
    out = Path(args.out) if args.out else None if args.json else Path("predictions") / Path(args.image).stem
    if out is not None:
        for name in FILES:
            refuse_overwrite(out / name, args.overwrite)
    image = open_image(args.image)
    if (count := frames(args.image)) > 1:
        print(f"warning: {args.image}: it has {count} frames; the first one is looked at", file=sys.stderr)
    predictor = open_run(Path(args.run), checkpoint=args.checkpoint).predictor
    predictor.set_image(image)
    with warnings.catch_warnings(record=True, action="always", category=CutQuery) as cut:
        (prediction,) = predictor.predict([query], args.mask_type, abstain=args.abstain)
    for warning in cut:
        print(f"warning: {warning.message}", file=sys.stderr)
    words = predictor.explain(query) if args.explain else []
    if out:
        write_prediction(out, image, prediction, words)
    if args.json:
        print(json.dumps(to_json(prediction, words)))
    else:
        print(f"{summary(prediction, words)}\nwrote {out}")


if __name__ == "__main__":
    exit_cleanly(main)
