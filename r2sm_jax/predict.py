"""`python -m r2sm_jax.predict RUN|EXPORT IMAGE "QUERY"`: decides the mask type and segments.

One query about one image gives a folder of masks of its own. Several images or queries give
`predictions.json`; a call that was stopped goes on where it was (inference/batch.py).
`--teach NAME` stores an example of a name instead (inference/taught_names.py).
"""

import json
import sys
import warnings
from itertools import chain
from pathlib import Path

from r2sm_jax.cli import cli_main
from r2sm_jax.flags import PredictConfig, check_flags, read_flags

if __name__ == "__main__":
    # A slip in a flag is told at once: the imports below take seconds.
    check_flags(PredictConfig)

from r2sm_jax.config import ProcessConfig
from r2sm_jax.data.masks import Mask
from r2sm_jax.errors import InputError, refuse_overwrite
from r2sm_jax.inference.batch import PREDICTIONS, predict_images, read_image
from r2sm_jax.inference.decision import TruncatedQuery, check_abstain, check_query
from r2sm_jax.inference.given_masks import clean, read_mask_file
from r2sm_jax.inference.output_names import claim_folder, numbered, slug
from r2sm_jax.inference.prediction import FILES
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.inference.prompts import read_prompts
from r2sm_jax.inference.run import enable_compilation_cache, load
from r2sm_jax.inference.tasks import find_tasks, is_many
from r2sm_jax.training.sharding import running

DEFAULT_OUT = Path("predictions")
MAX_NAMES = 5
"""Of skipped files, in the message about them."""


def predict_one(args: PredictConfig) -> None:
    """Predicts one query about one image; writes a folder of masks, or prints JSON. A mask, a box
    or points may stand in place of the sentence."""
    # Cheap checks come first, loading the model last.
    if args.query is not None:
        check_query(args.query)
    check_abstain(args.abstain)
    if args.out:
        # Raises if a file is there.
        refuse_overwrite(Path(args.out) / FILES[0], overwrite=True)
    image = read_image(Path(args.image))
    given = read_given_mask(args, image.shape[:2])
    boxes = None if args.box is None else [args.box]
    points = read_points(args)
    # Also checked here, before the model is loaded.
    read_prompts(boxes, points, 1, image.shape[:2])

    predictor = load_predictor(args)
    load_names(args, predictor)
    predictor.set_image(image)
    with warnings.catch_warnings(record=True, action="always", category=TruncatedQuery) as caught:
        (prediction,) = predictor.predict(
            [args.query],
            args.mask_type,
            abstain=args.abstain,
            masks=given,
            boxes=boxes,
            points=points,
        )
    # Python's own format of warnings would show a line of code.
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)

    print(json.dumps(prediction.to_json()) if args.json else prediction.summary())
    if args.out or not args.json:
        folder = output_folder(args)
        prediction.write(folder, image)
        print(f"wrote {folder}", file=sys.stderr if args.json else sys.stdout)


def output_folder(args: PredictConfig) -> Path:
    """Where the files of one answer go: a folder of its own, unless --overwrite is given."""
    name = slug(args.query or "prompt")
    default = DEFAULT_OUT / Path(args.image).stem / name
    first = Path(args.out) if args.out else default
    if args.overwrite:
        return first
    further = first / name if args.out else default
    return claim_folder(chain([first], numbered(further)), FILES)


def predict_many(args: PredictConfig) -> None:
    """Predicts several queries or images into one file."""
    if args.json or args.abstain:
        raise InputError("--json and --abstain are for one query about one image; leave them out")
    if args.mask or args.clean:
        raise InputError(
            "--mask and --clean are for one query about one image; complete the masks of many "
            "images with python -m r2sm_jax.data complete"
        )
    if has_place(args):
        raise InputError(
            "--box, --point and --not-point are for one query about one image; leave them out"
        )
    tasks = find_tasks(args.image, args.query, args.queries)
    name = tasks.root.name if is_many(args.image) else Path(args.image).stem
    out = Path(args.out) if args.out else DEFAULT_OUT / (name or "images")
    refuse_overwrite(out / PREDICTIONS, overwrite=True)  # raises if `out` is a file
    if tasks.skipped:
        names = ", ".join(tasks.skipped[:MAX_NAMES])
        more = ", ..." if len(tasks.skipped) > MAX_NAMES else ""
        print(
            f"skipped {len(tasks.skipped)} in {args.image} that are no image files: {names}{more}",
            file=sys.stderr,
        )

    predictor = load_predictor(args)
    load_names(args, predictor)
    result = predict_images(
        predictor,
        tasks,
        out,
        mask_type=args.mask_type,
        overwrite=args.overwrite,
        overlays=args.overlays,
        may_number=not args.out,
    )
    num_truncated = len(predictor.text_encoder.truncated)
    if num_truncated:
        limit = predictor.text_encoder.max_tokens
        print(
            f"warning: {num_truncated} queries are longer than {limit} tokens, and their ends were "
            "not read",
            file=sys.stderr,
        )
    for reason in result.failed.values():
        print(f"not answered: {reason}", file=sys.stderr)
    print(
        f"{result.num_predicted} images answered, {result.num_earlier} answered earlier, "
        f"{len(result.failed)} not readable"
    )
    print(f"wrote {result.folder / PREDICTIONS}")


def teach_name(args: PredictConfig) -> None:
    """Adds the image and its mask to the file of names, as the example of a name."""
    if args.names is None or not args.mask:
        raise InputError(
            "--teach: an example has a mask, and goes into a file of names; give --mask FILE and "
            "--names FILE"
        )
    if args.query is not None or args.queries is not None or has_place(args):
        raise InputError(
            "--teach answers no query; leave out the sentence, --queries, --box and --point, and "
            "predict in a second call"
        )
    if is_many(args.image):
        raise InputError("--teach: an example is one image; give an image file")
    path = Path(args.names)
    # Raises if a folder is there.
    refuse_overwrite(path, overwrite=True)
    image = read_image(Path(args.image))
    given = read_given_mask(args, image.shape[:2])
    assert given is not None  # for the type checker: there is a mask

    predictor = load_predictor(args)
    if path.exists():
        predictor.load_names(path)
    predictor.teach(args.teach or "", image, given[0], replace=args.overwrite)
    predictor.save_names(path)
    count = len(predictor.names)
    print(f"taught {args.teach!r}; {path} has {count} name{'' if count == 1 else 's'}")


def load_names(args: PredictConfig, predictor: Predictor) -> None:
    """Loads the file of `--names`, if there is one."""
    if args.names is not None:
        predictor.load_names(args.names)


def read_given_mask(args: PredictConfig, size: tuple[int, int]) -> list[Mask] | None:
    """The mask of `--mask` for the one query, None without the flag.

    Args:
        size: height and width of the image.
    """
    if not args.mask:
        if args.clean:
            raise InputError("--clean: there is no given mask to clean; give one with --mask FILE")
        return None
    # The flag may be repeated only so that several masks are refused here, in a sentence. A plain
    # flag would take the last one and say nothing.
    path, *others = args.mask
    if others:
        raise InputError(
            f"--mask: there are {len(args.mask)} masks for one query; give one, or predict once "
            "for each"
        )
    mask = read_mask_file(Path(path), size)
    return [clean(mask) if args.clean else mask]


def has_place(args: PredictConfig) -> bool:
    """Whether a box or points say where the object is."""
    return args.box is not None or bool(args.point or args.not_point)


def read_points(args: PredictConfig) -> list[list[tuple[float, float, bool]]] | None:
    """The points of the one query, with whether each lies on the object; None without the flags."""
    if not (args.point or args.not_point):
        return None
    points = [(x, y, True) for x, y in args.point]
    points += [(x, y, False) for x, y in args.not_point]
    return [points]


def load_predictor(args: PredictConfig) -> Predictor:
    """Opens the run or the export."""
    run = load(args.run, checkpoint=args.checkpoint, matmul_precision=args.matmul_precision)
    return run.predictor


def main() -> None:
    """Command line."""
    args = read_flags(PredictConfig)
    if not args.image:
        raise InputError(
            "IMAGE is empty; give an image file, a folder of images, or a pattern in quotes"
        )
    if args.teach is not None:
        enable_compilation_cache()
        teach_name(args)
        return
    has_prompt = has_place(args) or bool(args.mask)
    if args.query is None and args.queries is None and not has_prompt:
        raise InputError(
            "there is no query; say what to segment, such as 'the red mug', or give --queries FILE"
        )
    enable_compilation_cache()

    if args.queries is not None or is_many(args.image):
        with running(args.distributed):
            predict_many(args)
        return
    if args.distributed != ProcessConfig():
        raise InputError(
            "--distributed: several processes divide a folder of images; leave it out for one image"
        )
    predict_one(args)


if __name__ == "__main__":
    cli_main(main)
