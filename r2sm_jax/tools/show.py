"""`data show`: a sheet of samples, with queries and the masks that they ask for."""

from pathlib import Path

import numpy as np

from r2sm_jax.config import Crowds, DataConfig
from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Sample
from r2sm_jax.data.sheet import CELL, Panel, paint, save_sheet
from r2sm_jax.errors import InputError, refuse_overwrite
from r2sm_jax.sources import open_split


def show(
    data: str,
    out: Path,
    split: str = "train",
    count: int = 6,
    queries: int = 3,
    seed: int = 0,
    size: int = 96,
    images: Path | None = None,
    backgrounds: Path | None = None,
    crowds: Crowds = "ignore",
    overwrite: bool = False,
) -> None:
    """Draws a sheet of samples: images, queries, and the masks that they ask for.

    Args:
        data: What to show: scenes, compose:FILE, cutouts:DIR, json:FILE or json:FOLDER.
        out: The PNG file to write.
        split: The split to choose samples from.
        count: How many images to show, one in a row.
        queries: How many queries of every image to show.
        seed: Another seed shows other samples.
        size: Side of procedural and composed scenes in pixels.
        images: Folder of the images, if they are not beside the dataset file.
        backgrounds: Folder of photos to lay cut-outs over.
        crowds: What `iscrowd` 1 marks in a file that is composed: a region to ignore, or an object.
        overwrite: Replace the PNG file if it exists.
    """
    if out.suffix.lower() != ".png":
        raise InputError(f"--out {out}: the sheet is a PNG; give a name that ends in .png")
    if count < 1 or queries < 0 or size < 1 or seed < 0:
        raise InputError(
            "show: --count and --size must be 1 or more, --queries and --seed 0 or more"
        )
    refuse_overwrite(out, overwrite)
    config = DataConfig(
        data,
        images=str(images) if images else None,
        backgrounds=str(backgrounds) if backgrounds else None,
        crowds=crowds,
        seed=seed,
    )
    source = open_split(config, split, size=size, count=count)
    indices = np.random.default_rng(seed).permutation(len(source))[:count]
    rows = [sample_row(source[int(index)], queries, seed) for index in sorted(indices)]
    save_sheet(out, rows, title=f"{data}, {split}")
    print(f"wrote {out}: {len(rows)} of the {len(source)} pictures of the split {split}")


def sample_row(sample: Sample, queries: int = 3, seed: int = 0) -> list[Panel]:
    """A sample as panels: its image, then up to `queries` of its queries with their masks.

    Queries are chosen at random, but both mask types are shown if the sample has both.
    """
    shape = sample.image.shape[:2]
    ratio = CELL / max(shape)
    nothing = np.zeros(shape, bool)
    num_instances = sum(not instance.ignore for instance in sample.instances)
    text = f"{sample.file_name}\n{num_instances} instances"
    row = [Panel(paint(sample.image, nothing, nothing, None, ratio), text)]

    # The first query of each mask type comes first, so that it is not cut off by the number.
    order = np.random.default_rng(seed).permutation(len(sample.queries)).tolist()
    first_of_type = {sample.queries[i].mask_type: i for i in reversed(order)}
    indices = list(dict.fromkeys([*first_of_type.values(), *order]))[:queries]
    by_id = {instance.id: instance for instance in sample.instances}
    for index in sorted(indices):
        query = sample.queries[index]
        targets = [by_id[number] for number in query.instance_ids]
        visible = masks.union((target.modal for target in targets), shape)
        complete = masks.union((target.complete for target in targets), shape)
        names = ", ".join(sorted({target.category for target in targets})) or "no target"
        unknown = ", amodal mask unknown" if any(t.amodal is None for t in targets) else ""
        share = masks.occlude_rate(visible, complete)
        text = f"{query.text}\n{query.mask_type}: {names}, {share:.0%} hidden{unknown}"
        row.append(Panel(paint(sample.image, visible, complete, query.mask_type, ratio), text))
    return row
