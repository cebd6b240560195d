"""The benchmark tool-box: `python -m r2sm_jax.data convert|show ... --help`."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from tyro.conf import Positional
from tyro.extras import SubcommandApp

from r2sm_jax.data.queries import write_queries
from r2sm_jax.data.readers.cocoa import Cocoa, read_cocoa
from r2sm_jax.data.schema import refuse_overwrite, write_json
from r2sm_jax.data.sheet import sample_row, save_sheet
from r2sm_jax.data.sources import open_source
from r2sm_jax.errors import InputError, exit_cleanly

app = SubcommandApp()
convert = SubcommandApp()
app.command(convert, name="convert")


@convert.command
def cocoa(
    sources: Positional[tuple[Path, ...]],
    /,
    out: Path,
    images: Path | None = None,
    queries: int = 8,
    seed: int = 0,
    overwrite: bool = False,
) -> None:
    """Turns original COCOA annotations into one dataset file, with queries written for every image.

    Image names in the file are relative to its folder where the images lie below it.

    Args:
        sources: COCOA JSON files, or folders of them.
        out: The dataset file to write, such as cocoa/train.json.
        images: Folder of the images; without it they are looked for beside each JSON file.
        queries: How many queries to write for an image; 0 for none.
        seed: Another seed gives other queries.
        overwrite: Replace the dataset file if it exists.
    """
    if not sources:
        raise InputError("convert cocoa: there is nothing to read; give COCOA JSON files or folders of them")
    if queries < 0 or seed < 0:
        raise InputError("convert cocoa: --queries and --seed cannot be negative; give 0 or more")
    refuse_overwrite(out, overwrite)
    found = read_cocoa(sources, images)
    elsewhere = _name_images(found, out)
    written = [
        {"id": 0, "image_id": image["id"], "text": query.text, "mask_type": query.mask_type}
        | {"instance_ids": list(query.instance_ids), "kind": dict(query.kind)}
        for image in found.images
        if found.things[image["id"]] and queries
        for query in write_queries(
            found.things[image["id"]], rng=np.random.default_rng((seed, image["id"])), count=queries
        )
    ]
    for number, query in enumerate(written, start=1):
        query["id"] = number
    records: dict[str, Any] = {
        "images": found.images,
        "annotations": found.annotations,
        "categories": [{"id": number, "name": name} for name, number in found.categories.items()],
        "queries": written,
        "info": {"description": "converted from original COCOA annotations", "queries_seed": seed},
    }
    write_json(out, records, overwrite)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    types = Counter(query["mask_type"] for query in written)
    print(
        f"wrote {out}: {len(found.images)} images, {len(found.annotations)} annotations, "
        f"{len(found.categories)} categories, {len(written)} queries "
        f"({types['modal']} modal, {types['amodal']} amodal)"
    )
    if elsewhere:
        print(f"the images are not below {out.parent}; pass {elsewhere} with the dataset")


@app.command
def show(
    data: str,
    out: Path,
    split: str = "train",
    count: int = 6,
    queries: int = 3,
    seed: int = 0,
    size: int = 96,
    images: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Draws a sheet of samples: images, queries, and the masks that they ask for.

    Args:
        data: What to show: scenes, json:FILE or json:FOLDER.
        out: The PNG file to write.
        split: The split to choose samples from.
        count: How many images to show, one in a row.
        queries: How many queries of every image to show.
        seed: Another seed shows other samples.
        size: Side of procedural scenes in pixels.
        images: Folder of the images, where they do not lie beside the dataset file.
        overwrite: Replace the PNG file if it exists.
    """
    if out.suffix.lower() != ".png":
        raise InputError(f"--out {out}: the sheet is a PNG; give a name that ends in .png")
    if count < 1 or queries < 0 or size < 1 or seed < 0:
        raise InputError("show: --count and --size must be 1 or more, --queries and --seed 0 or more")
    refuse_overwrite(out, overwrite)
    folder = None if images is None else str(images)
    source = open_source(data, split, count=count, seed=seed, size=size, images_dir=folder)
    chosen = np.random.default_rng(seed).permutation(len(source))[:count]
    rows = [sample_row(source[int(index)], queries, seed) for index in sorted(chosen)]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        save_sheet(out, rows, title=f"{data}, {split}")
    except OSError as error:
        raise InputError(f"{out}: cannot write there ({error.strerror}); give another path") from error
    print(f"wrote {out}: {len(rows)} samples")


def _name_images(found: Cocoa, out: Path) -> str:
    """Sets every image's `file_name`: relative to the folder of `out` if all lie below it, else bare.

    Returns what the user must pass along in the second case. Raises InputError for ambiguous bare names.
    """
    folder = out.resolve().parent
    paths = {image_id: path.resolve() for image_id, path in found.image_paths.items()}
    below = all(path.is_relative_to(folder) for path in paths.values())
    for image in found.images:
        path = paths[image["id"]]
        image["file_name"] = path.relative_to(folder).as_posix() if below else path.name
    if below:
        return ""
    name, times = Counter(path.name for path in paths.values()).most_common(1)[0]
    if times > 1:
        raise InputError(
            f"{out}: the image name {name} occurs in several folders, none below {out.parent}; "
            "write the dataset file into a folder above them all"
        )
    folders = {path.parent for path in found.image_paths.values()}
    if len(folders) > 1:
        return "a folder that holds them all (--data.images DIR)"
    return f"--data.images {folders.pop()}"


def main() -> None:
    """Runs the command that the arguments name."""
    app.cli(
        prog="python -m r2sm_jax.data",
        description="Tools for datasets of modal and amodal queries.",
        config=(tyro.conf.FlagCreatePairsOff,),
    )


if __name__ == "__main__":
    exit_cleanly(main)
