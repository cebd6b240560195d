"""The benchmark tool-box: `python -m r2sm_jax.data
convert|check|stats|show|queries|build|compose|cutouts|complete|labels`."""

import sys
from pathlib import Path

import tyro
from tyro.conf import Positional
from tyro.extras import SubcommandApp

from r2sm_jax.cli import cli_main, refuse_repeated
from r2sm_jax.errors import InputError
from r2sm_jax.sources import SourceSpec, load_json_split, stored_splits
from r2sm_jax.tools.check import check
from r2sm_jax.tools.complete import complete
from r2sm_jax.tools.compose import compose, cutouts
from r2sm_jax.tools.convert import FORMATS
from r2sm_jax.tools.labels import labels
from r2sm_jax.tools.queries import parse, requests, template
from r2sm_jax.tools.show import show
from r2sm_jax.tools.stats import stats


def build(
    data: Positional[str], /, out: Path, images: Path | None = None, splits: tuple[str, ...] = ()
) -> None:
    """Writes a TFDS data set (array_record, encoded images, RLE masks) that `--data.source
    tfds:OUT` reads.

    Args:
        data: json:FILE or json:FOLDER.
        out: The folder to write; it must not hold such a data set yet.
        images: Folder of the images, if they are not beside the dataset file.
        splits: Splits to write; default: train, dev and val of a file; every *.json of a folder,
            and dev beside train.
    """
    from r2sm_jax.data.tfds import NAME, write_tfds  # imports slowly

    spec = SourceSpec.parse(data)
    if spec.kind != "json" or spec.path is None:
        raise InputError(f"build: {data} is not json:FILE or json:FOLDER; give one of these")
    # A build that failed leaves its folder without this file.
    if any((out / NAME).rglob("dataset_info.json")):
        raise InputError(f"{out}: there is a {NAME} data set already; give another --out")

    if not splits:
        stored = stored_splits(spec.path) if spec.path.is_dir() else ["train", "val"]
        names = {*stored, "dev"} if "train" in stored else set(stored)
        splits = tuple(sorted(names))
    datasets = {split: load_json_split(spec.path, split, images_dir=images) for split in splits}
    counts = write_tfds(datasets, out)
    print(f"wrote {out}: " + ", ".join(f"{n} images in {split}" for split, n in counts.items()))


def main() -> None:
    """Runs the command that the arguments name."""
    convert = SubcommandApp()
    for name, command in FORMATS.items():
        convert.command(name=name)(command)
    queries = SubcommandApp()
    for command in (requests, parse, template):
        queries.command(command)

    app = SubcommandApp()
    app.command(convert, name="convert")
    for command in (check, stats, show, build, compose, cutouts, complete, labels):
        app.command(command)
    app.command(queries, name="queries")
    refuse_repeated(sys.argv[1:])
    app.cli(
        prog="python -m r2sm_jax.data",
        description="Tools for datasets of modal and amodal queries.",
        config=(tyro.conf.FlagCreatePairsOff,),
    )


if __name__ == "__main__":
    cli_main(main)
