"""`data compose` and `data cutouts`: composed photographs as a dataset file, and their cut-outs as a folder."""

import json
from pathlib import Path
from typing import Any

from PIL import Image
from tyro.conf import Positional

from r2sm_jax.data.dataset import Source
from r2sm_jax.errors import InputError, refuse_overwrite, writing
from r2sm_jax.synthetic.compose import MIN_CUTOUTS, ComposeSource
from r2sm_jax.synthetic.photos import Photos
from r2sm_jax.tools.convert import Conversion, write_json
from r2sm_jax.tools.entries import Entry


def compose(
    file: Positional[Path],
    /,
    out: Path,
    images: Path | None = None,
    splits: tuple[str, ...] = ("train", "val"),
    count: int = 1000,
    size: int = 256,
    seed: int = 0,
    queries: int = 8,
    overwrite: bool = False,
) -> None:
    """Composes photographs of an instances file, and writes them with queries as OUT/SPLIT.json and OUT/images.

    They are those that `--data.source compose:FILE` gives for the same seed, size and number of queries.

    Args:
        file: Photos with a mask of each object, in the format of COCO's instances files.
        out: The folder to write, which `json:OUT` reads.
        images: Folder of the photos, where they do not lie beside the file.
        splits: train, dev, val, val_phrasing or val_hard; no photo and no cut-out is in two of train, dev and val.
        count: How many pictures to compose for each split.
        size: The longer side of a picture in pixels.
        seed: Another seed gives other pictures.
        queries: How many queries to write for a picture.
        overwrite: Replace dataset files and pictures if they exist.
    """
    if min(count, size, queries) < 1 or seed < 0:
        raise InputError(
            "compose: --count, --size and --queries must be 1 or more, --seed 0 or more"
        )
    for split in splits:
        refuse_overwrite(out / f"{split}.json", overwrite)
    options: dict[str, Any] = {"size": size, "seed": seed, "queries": queries}
    sources = {
        split: ComposeSource(file, split, count, images=images, **options) for split in splits
    }
    for split, source in sources.items():
        records = write_pictures(
            source, out, f"composed of {file.name}: {split}, {options}", overwrite
        )
        write_json(out / f"{split}.json", records, overwrite)
        print(
            f"wrote {out / split}.json: {count} images, {len(records['annotations'])} annotations, "
            f"{len(records['queries'])} queries"
        )


def write_pictures(
    source: Source, out: Path, description: str, overwrite: bool
) -> dict[str, list[dict]]:
    """Writes the pictures of a source as PNG files in OUT/images, and returns the records of a dataset file."""
    found = Conversion()
    for index in range(len(source)):
        sample = source[index]
        shape = sample.image.shape[0], sample.image.shape[1]
        number = found.add_image(
            Entry(out, sample.file_name, {}), [sample.file_name], index + 1, shape
        )
        _save(Image.fromarray(sample.image), out / "images" / sample.file_name, overwrite)
        ids = {
            i.id: found.add_annotation(
                number, i.category, i.modal, i.amodal, **({"ignore": True} if i.ignore else {})
            )
            for i in sample.instances
        }
        for query in sample.queries:
            targets = [ids[i] for i in query.instance_ids]
            found.add_query(number, query.text, query.mask_type, targets, **query.kind)
    return found.records(description)


def cutouts(
    file: Positional[Path], /, out: Path, images: Path | None = None, overwrite: bool = False
) -> None:
    """Cuts the complete objects out of photos: a folder of RGBA images with labels, which `cutouts:OUT` reads.

    Args:
        file: Photos with a mask of each object, in the format of COCO's instances files.
        out: The folder to write.
        images: Folder of the photos, where they do not lie beside the file.
        overwrite: Replace index.json and the images if they exist.
    """
    refuse_overwrite(out / "index.json", overwrite)
    photos = Photos(file, images)
    chosen = [
        cutout for cutout in photos.find_cutouts(range(len(photos.dataset))) if cutout.complete
    ]
    if len(chosen) < MIN_CUTOUTS:
        raise InputError(
            f"{file}: {len(chosen)} complete objects can be cut out, {MIN_CUTOUTS} are needed; add photos"
        )
    index: dict[str, dict[str, str]] = {}
    for cutout in chosen:
        photo = Path(photos.dataset.images[cutout.photo]["file_name"]).with_suffix("")
        name = f"{'_'.join(photo.parts)}_{cutout.annotation}.png"
        while name in index:  # of p.jpg and p.png, or of a/b.jpg and a_b.jpg
            name = f"_{name}"
        _save(photos.read_cutout(cutout)[0], out / name, overwrite)
        index[name] = {"file": name, "label": cutout.category}
    with writing(out / "index.json", overwrite) as part:
        part.write_text(json.dumps([*index.values()], ensure_ascii=False) + "\n", encoding="utf-8")
    print(
        f"wrote {out}: {len(index)} cut-outs of {len({record['label'] for record in index.values()})} classes"
    )


def _save(image: Image.Image, path: Path, overwrite: bool) -> None:
    with writing(path, overwrite) as part:
        image.save(part, "PNG", compress_level=3)
