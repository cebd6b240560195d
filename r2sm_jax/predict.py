"""`python -m r2sm_jax.predict RUN|EXPORT IMAGE "QUERY"`: decides the mask type and segments.

One query about one image gives a folder of masks of its own. A folder of images, a data set or a
file of queries gives `predictions.json` (inference/many.py).
"""

import json
import sys
import warnings
from itertools import chain, count
from pathlib import Path
from typing import Any

from r2sm_jax.cli import cli_main, parse_shard
from r2sm_jax.flags import PredictConfig, check_flags, read_flags

if __name__ == "__main__":
    # A slip in a flag is told at once: the imports below take seconds.
    check_flags(PredictConfig)


from r2sm_jax.data.mask_reader import INVERTED, covers_corners, read_mask, read_union
from r2sm_jax.errors import InputError, refuse_overwrite
from r2sm_jax.finders import from_transformers
from r2sm_jax.inference.decision import check_abstain
from r2sm_jax.inference.load import enable_compilation_cache, load_run
from r2sm_jax.inference.many import (
    PREDICTIONS,
    find_tasks,
    is_dataset,
    is_many,
    other_files,
    predict_images,
    read_image,
    slug,
)
from r2sm_jax.inference.prediction import FILES
from r2sm_jax.inference.prompts import read_requests

DEFAULT_OUT = Path("predictions")


def predict_one(args: PredictConfig) -> None:
    """Predicts one query about one image; writes a folder of masks, or prints JSON. A mask, a box
    or points may stand in place of the sentence."""
    image = read_image(Path(args.image))
    size = image.shape[:2]
    given: dict[str, Any] = {}
    if args.mask is not None:
        mask = read_mask(Path(args.mask), size, args.mask)
        if covers_corners(mask):
            warnings.warn(f"{args.mask}: {INVERTED}", stacklevel=1)
        given["masks"] = [mask]
    if args.box is not None:
        given["boxes"] = [args.box]
    if args.point or args.not_point:
        clicks = [(*point, True) for point in args.point]
        given["points"] = [clicks + [(*point, False) for point in args.not_point]]
    # Cheap checks come first, loading the model last.
    check_abstain(args.abstain)
    query = args.query[0] if args.query else None
    read_requests([query], size, args.mask_type, **given)
    if args.others is not None:
        given["others"] = [read_union(Path(args.others), size, args.others)]
    if args.finder is not None:
        given["finder"] = from_transformers(args.finder)

    predictor = load_run(args.run, matmul_precision=args.matmul_precision).predictor
    predictor.set_image(image)
    (prediction,) = predictor.predict(
        [query], mask_type=args.mask_type, abstain=args.abstain, **given
    )
    print(json.dumps(prediction.to_json()) if args.json else prediction.summary())
    if args.out or not args.json:
        folder = output_folder(args)
        prediction.write(folder)
        print(f"wrote {folder}", file=sys.stderr if args.json else sys.stdout)


def output_folder(args: PredictConfig) -> Path:
    """Returns where the files of one answer go: a folder without any, unless --overwrite is
    given."""
    name = slug(args.query[0] if args.query else "prompt")
    default = DEFAULT_OUT / Path(args.image).stem / name
    first = Path(args.out) if args.out else default
    further = first / name if args.out else default
    numbered = (further.with_name(f"{further.name}-{number}") for number in count(2))
    for folder in chain([first, further], numbered):
        if args.overwrite or not any((folder / file).exists() for file in FILES):
            return folder
    raise AssertionError("the numbers do not end")


def predict_many(args: PredictConfig) -> None:
    """Predicts several queries or images into one file."""
    if args.json or args.abstain or args.others or is_placed(args):
        raise InputError(
            "--json, --abstain, --mask, --others, --box, --point and --not-point are for one query "
            "about one image; leave them out"
        )
    tasks = find_tasks(args.image, args.query, args.queries)
    number, of = parse_shard(args.shard)
    file = f"predictions-{number}-of-{of}.json" if of > 1 else PREDICTIONS
    asked = slug(" ".join(args.query)) if args.query else Path(args.queries or args.image).stem
    out = Path(args.out) if args.out else DEFAULT_OUT / Path(args.image).resolve().stem / asked
    coco = Path(args.coco) if args.coco else None
    if coco:
        refuse_overwrite(coco, args.overwrite)
    if others := other_files(args.image):
        print(f"not read, since they are no images: {', '.join(others)}", file=sys.stderr)

    result = predict_images(
        load_run(args.run, matmul_precision=args.matmul_precision).predictor,
        tasks,
        out,
        file,
        mask_type=args.mask_type,
        overwrite=args.overwrite,
        overlays=args.overlays,
        coco=coco,
        shard=(number, of),
        finder=args.finder,
    )
    for _, reason in sorted(result.failed.items()):
        print(f"not answered: {reason}", file=sys.stderr)
    print(
        f"{result.num_answered} images answered, {result.num_earlier} answered earlier, "
        f"{len(result.failed)} not readable"
    )
    print(f"wrote {out / file}{f' and {coco}' if coco else ''}")


def is_placed(args: PredictConfig) -> bool:
    """Whether a mask, a box or points say where the object is."""
    return bool(args.mask or args.box or args.point or args.not_point)


def main() -> None:
    """Command line."""
    args = read_flags(PredictConfig)
    if not args.image:
        raise InputError("IMAGE is empty; give an image file, a folder of images or a data set")
    if args.finder and is_placed(args):
        raise InputError(
            "--finder finds what the words name; leave it out where a --mask, a --box or a --point "
            "says where that is"
        )
    if args.others and not is_placed(args) and not args.finder:
        raise InputError("--others are the neighbours of a --mask, a --box or a --point; give one")
    if len(args.query) > 1 and not any(" " in query for query in args.query):
        raise InputError(
            f"{' '.join(args.query)}: put a sentence into quotes, or give several words that are "
            "queries each as a file, one a line, with --queries FILE"
        )
    has_query = args.query or args.queries is not None or is_dataset(args.image)
    if not has_query and not is_placed(args):
        raise InputError(
            "there is no query; say what to segment, such as 'the red mug', or give --queries FILE"
        )
    is_of_many = args.queries is not None or len(args.query) > 1 or is_many(args.image)
    if args.coco and not is_of_many:
        raise InputError(
            "--coco is for a folder of images, a data set or several queries; one answer has its "
            "masks in its folder, and with --json as one JSON object"
        )
    if args.shard != "1/1" and not is_of_many:
        raise InputError("--shard divides a folder of images or a data set; leave it out for one")
    enable_compilation_cache()
    if is_of_many:
        predict_many(args)
    else:
        predict_one(args)


if __name__ == "__main__":
    cli_main(main)
