"""Reads original COCOA annotations (Zhu et al., "Semantic Amodal Segmentation") into the one dataset format.

A file holds one annotator's regions of one image: `regions`, `image_id`, `url`. Each region has a flat amodal
polygon, a free-text `name`, a depth `order` (1 is in front) and, only where something hides it,
`visible_mask` and `invisible_mask`. A file that lists several such objects under `annotations` is read too.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.records import bad_record, is_id
from r2sm_jax.errors import InputError, load_json
from r2sm_jax.tools.readers.conversion import Conversion


def read_cocoa(sources: Sequence[Path], images_dir: Path | None = None) -> Conversion:
    """Reads COCOA files, or folders of them, into records; `file_name` is the image's bare name.

    An image is looked for in `images_dir`, or else beside its file, under the file's own stem and under the
    name in its url. Of several annotations of one image the first is kept. Raises InputError for a
    file that is not COCOA, an image that is missing, and regions that cannot be used.
    """
    found = Conversion()
    first_file: dict[int, Path] = {}
    for path, record in _records(sources, found.notes):
        image_id = record.get("image_id")
        if type(image_id) is not int or image_id < 0:
            raise InputError(f"{path}: there is no image_id; give an original COCOA annotation")
        if image_id in first_file:
            found.notes.append(f"{path}: left out, image {image_id} has been read from {first_file[image_id]}")
            continue
        first_file[image_id] = path
        _, height, width = found.add_image(_find_image(path, record, images_dir), image_id)
        _read_regions(found, path, record, image_id, (height, width))
    if not found.images:
        places = ", ".join(str(source) for source in sources)
        raise InputError(f"{places}: there is no COCOA annotation here; give its JSON files or their folder")
    return found


def _records(sources: Sequence[Path], notes: list[str]) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    for source in sources:
        if not source.exists():
            raise InputError(f"{source}: there is no such file or folder; check the path")
        for path in sorted(source.glob("*.json")) if source.is_dir() else [source]:
            content = load_json(path, "COCOA annotations")
            listed = content.get("annotations") if isinstance(content, dict) else None
            records = listed if isinstance(listed, list) else [content]
            if records and all(isinstance(r, dict) and isinstance(r.get("regions"), list) for r in records):
                yield from ((path, record) for record in records)
            elif source.is_dir():
                notes.append(f"{path}: left out, it has no COCOA regions")
            else:
                raise InputError(f"{path}: there is no list of 'regions'; give an original COCOA annotation")


def _find_image(path: Path, record: Mapping[str, Any], images_dir: Path | None) -> Path:
    names = [path.stem + suffix for suffix in (".jpg", ".jpeg", ".png")]
    if isinstance(record.get("url"), str) and record["url"]:
        names.append(PurePosixPath(record["url"]).name)
    folder = images_dir or path.parent
    for name in names:
        if (folder / name).is_file():
            return folder / name
    wanted = " nor ".join([names[0], *names[3:]])
    raise InputError(f"{path}: no image {wanted} in {folder}; give its folder with --images DIR")


def _read_regions(
    found: Conversion, path: Path, record: Mapping[str, Any], image_id: int, size: tuple[int, int]
) -> None:
    kept: list[dict[str, Any]] = []
    for index, region in enumerate(record["regions"], start=1):
        where = f"region {index}"
        if not isinstance(region, dict):
            raise bad_record(path, where, "it is not an object", "give an original COCOA annotation")
        amodal, modal = _region_masks(path, where, region, size)
        if not amodal.any():
            found.notes.append(f"{path}: {where}: left out, its polygon covers no pixel")
            continue
        order = region.get("order")
        found.add_annotation(
            image_id,
            str(region.get("name") or "").lower(),
            modal=modal,
            amodal=amodal,
            order=order if is_id(order) else index,
            isStuff=int(region.get("isStuff") == 1),
        )
        found.compare_rate(f"{path}: {where}", region.get("occlude_rate"))
        kept.append(found.annotations[-1])
    found.compare_order(str(path), kept, "order")


def _region_masks(
    path: Path, where: str, region: Mapping[str, Any], size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """The amodal and the modal mask `[H W]` of a region, modal ⊆ amodal."""
    key = "segmentation"
    try:
        amodal = masks.from_segmentation(region.get(key), *size)
        key = "visible_mask"
        if region.get(key) is None:
            return amodal, amodal
        modal = masks.from_segmentation(region[key], *size)
    except ValueError as error:
        problem = f"its {key} cannot be used ({error})"
        raise bad_record(path, where, problem, "give the annotation and the image that belong together") from error
    return amodal | modal, modal
