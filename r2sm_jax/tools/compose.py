"""`data compose` and `data cutouts`: write composed photographs and their cut-outs as files."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image
from tyro.conf import Positional

from r2sm_jax.config import Crowds
from r2sm_jax.data.dataset import ImageTruth, Source, truth_of_sample, write
from r2sm_jax.errors import InputError, atomic_write, refuse_overwrite
from r2sm_jax.synthetic.compose import ComposeSource
from r2sm_jax.synthetic.paste import MIN_CUTOUTS
from r2sm_jax.synthetic.photos import Photos, read_cutout


def compose(
    file: Positional[Path],
    /,
    out: Path,
    images: Path | None = None,
    splits: tuple[str, ...] = ("train", "dev", "val"),
    count: int = 1000,
    size: int = 256,
    seed: int = 0,
    queries: int = 8,
    crowds: Crowds = "ignore",
    overwrite: bool = False,
) -> None:
    """Composes photographs of an instances file, and writes them with queries.

    The dataset files are OUT/SPLIT.json, the pictures are in OUT/images. They are the pictures that
    `--data.source compose:FILE` gives for the same seed, size and number of queries.

    Args:
        file: Photos with a mask of each object, in the format of COCO's instances files.
        out: The folder to write, which `json:OUT` reads.
        images: Folder of the photos, if they are not beside the file.
        splits: train, dev, val, val_phrasing or val_hard; no photo and no cut-out is in two of
            train, dev and val.
        count: How many pictures to compose for each split.
        size: The longer side of a picture in pixels.
        seed: Another seed gives other pictures.
        queries: How many queries to write for a picture.
        crowds: What `iscrowd` 1 marks: a region to ignore, or an object, as in files of CVAT.
        overwrite: Replace dataset files and pictures if they exist.
    """
    if min(count, size, queries) < 1 or seed < 0:
        raise InputError(
            "compose: --count, --size and --queries must be 1 or more, --seed 0 or more"
        )
    for split in splits:
        refuse_overwrite(out / f"{split}.json", overwrite)
    options: dict[str, Any] = {"size": size, "seed": seed, "queries": queries}
    # All splits are opened before any is written: an unknown one is refused first.
    sources = {
        split: ComposeSource(file, split, count, images=images, crowds=crowds, **options)
        for split in splits
    }
    for split, source in sources.items():
        num_complete = sum(cutout.is_whole for cutout in source.cutouts)
        print(
            f"{split}: {len(source.photo_indices)} photos, {len(source.cutouts)} objects to lay "
            f"over them, {num_complete} of them complete"
        )
        info = {"description": f"composed of {file.name}: {split}, {options}"}
        pictures = write_pictures(source, out, overwrite)
        records = write(out / f"{split}.json", pictures, info, overwrite=overwrite)
        print(
            f"wrote {out / split}.json: {count} images, {len(records['annotations'])} annotations, "
            f"{len(records['queries'])} queries"
        )


def write_pictures(source: Source, out: Path, overwrite: bool) -> Iterator[ImageTruth]:
    """Writes the pictures of a source as PNG files in OUT/images. Yields the truth of each."""
    for index in range(len(source)):  # one picture is in memory at a time
        sample = source[index]
        _save(Image.fromarray(sample.image), out / "images" / sample.file_name, overwrite)
        yield replace(truth_of_sample(sample), image_id=index + 1)


def cutouts(
    file: Positional[Path],
    /,
    out: Path,
    images: Path | None = None,
    crowds: Crowds = "ignore",
    overwrite: bool = False,
) -> None:
    """Cuts the complete objects out of photos.

    It writes a folder of RGBA images with labels, which `cutouts:OUT` reads.

    Args:
        file: Photos with a mask of each object, in the format of COCO's instances files.
        out: The folder to write.
        images: Folder of the photos, if they are not beside the file.
        crowds: What `iscrowd` 1 marks: a region to ignore, or an object, as in files of CVAT.
        overwrite: Replace index.json and the images if they exist.
    """
    refuse_overwrite(out / "index.json", overwrite)
    photos = Photos(file, images, crowds)
    all_cutouts = photos.find_cutouts(range(len(photos)))
    complete_cutouts = [cutout for cutout in all_cutouts if cutout.is_whole]
    if len(complete_cutouts) < MIN_CUTOUTS:
        raise InputError(
            f"{file}: {len(complete_cutouts)} complete objects can be cut out of {len(photos)} "
            f"photos, {MIN_CUTOUTS} are needed; add photos with "
            f"{MIN_CUTOUTS - len(complete_cutouts)} more"
        )
    index: dict[str, dict[str, str]] = {}
    for cutout in complete_cutouts:
        photo = photos.name_of(cutout.photo)
        parts = Path(photo).with_suffix("").parts
        name = f"{'_'.join(parts)}_{cutout.annotation}.png"
        while name in index:  # of p.jpg and p.png, or of a/b.jpg and a_b.jpg
            name = f"_{name}"
        _save(read_cutout(photos, cutout)[0], out / name, overwrite)
        index[name] = {"file": name, "label": cutout.category, "photo": photo}
    with atomic_write(out / "index.json", overwrite) as part:
        content = json.dumps([*index.values()], ensure_ascii=False)
        part.write_text(content + "\n", encoding="utf-8")
    num_classes = len({record["label"] for record in index.values()})
    print(f"wrote {out}: {len(index)} cut-outs of {num_classes} classes")


def _save(image: Image.Image, path: Path, overwrite: bool) -> None:
    with atomic_write(path, overwrite) as part:
        image.save(part, "PNG", compress_level=3)
