"""Reads COCO files of all dialects, COCO results, original COCOA and dataset files, in one loop.

What is in a file is read by listing.py.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

import msgspec

from r2sm_jax.data import masks
from r2sm_jax.data.collector import Collector
from r2sm_jax.data.contradictions import MaskComparison, refuse_systematic
from r2sm_jax.data.dataset import NO_NAME, ImageTruth, Instance, make_instance, make_query
from r2sm_jax.data.images import (
    check_stated_size,
    find_image,
    image_folders,
    image_size,
    leads_outside,
)
from r2sm_jax.data.masks import RLE
from r2sm_jax.data.readers.listing import (
    DRAWN_FROM,
    OF_IMAGE,
    COCOOptions,
    ListedImage,
    Listing,
    Raws,
    decode_annotation,
    decode_as,
    name_of_mask,
    read_listing,
    shown,
)
from r2sm_jax.data.validation import QueryRecord, is_text
from r2sm_jax.query import Query

ANY = COCOOptions()
FindImage = Callable[[ListedImage, bool], tuple[str, tuple[int, int]]]
"""(an image, whether it has annotations) -> the name of its file, height and width."""


def read_coco(
    path: Path,
    images_dir: Path | None = None,
    options: COCOOptions = ANY,
    collector: Collector | None = None,
    may_be_missing: bool = False,
) -> Iterator[ImageTruth]:
    """Reads the annotations of each image of a COCO file, in the order of its images.

    Ids are kept. Images with annotations must lie in `images_dir`, and have the size that the file
    states. Without `images_dir` images are looked for as `image_folders` says. Then, and if
    `may_be_missing`, a missing image is no fault if the file states its size. Records
    that cannot be used are left to `collector`; without one the first is an InputError. Raises
    InputError for a file that is not of the kind, or whose masks are exchanged, inverted or of
    other objects.
    """
    collector = collector or Collector(is_strict=True)
    listing = read_listing(path, options, collector, images_dir)
    find = partial(
        locate,
        path,
        folders=image_folders(path, images_dir),
        must_exist=images_dir is not None and not may_be_missing,
        crop=options.crop,
    )
    return read_images(listing, find, options, collector)


def read_images(
    listing: Listing, find: FindImage, options: COCOOptions, collector: Collector
) -> Iterator[ImageTruth]:
    """Yields each listed image with what of its annotations can be used. Raises InputError for
    masks that are exchanged, inverted or of other objects."""
    path = listing.path
    objects = _by_image(listing.annotations)
    queries = _by_image(listing.queries)
    comparison = MaskComparison()
    seen: set[int] = set()
    for index, record in enumerate(listing.images):
        name = f"image {shown(record, 'id')}" if "id" in record else f"images[{index}]"
        with collector.record(f"{path}: {name}"):
            image = decode_as(ListedImage, record, "id")
            if options.image_ids is not None and image.id not in options.image_ids:
                objects.pop(bytes(record["id"]), None)
                continue
            if not isinstance(image.id, int) or image.id in seen:
                raise ValueError(f"its id {image.id!r} is no whole number, or occurs twice")
            seen.add(image.id)
            key = bytes(record["id"])
            file_name, size = find(image, key in objects)
            instances: dict[int, Instance[RLE]] = {}
            for annotation in objects.pop(key, ()):
                name = f"{listing.word} {shown(annotation, 'id')}"
                with collector.record(f"{path}: {name}"):
                    instance = _read_instance(annotation, size, listing, options, name, comparison)
                    if instance.id in instances:
                        raise ValueError("its id occurs twice")
                    instances[instance.id] = instance
            asked = tuple(_read_queries(path, queries[key], instances, collector))
            fields = {k: msgspec.json.decode(v) for k, v in record.items() if k not in OF_IMAGE}
            found = tuple(instances.values())
            yield ImageTruth(image.id, file_name, size, found, asked, fields)
    for strays in objects.values():
        for annotation in strays:
            with collector.record(f"{path}: {listing.word} {shown(annotation, 'id')}"):
                image_id = shown(annotation, "image_id")
                raise ValueError(f"image {image_id} is not in the file, or cannot be used")

    for contradiction in refuse_systematic(path, comparison.contradictions()):
        collector.note(str(path), str(contradiction))


def _by_image(records: Sequence[Raws]) -> defaultdict[bytes, list[Raws]]:
    """Records by the id of their image, as it is in the file."""
    groups = defaultdict(list)
    for record in records:
        groups[bytes(record.get("image_id", b"null"))].append(record)
    return groups


def _read_instance(
    record: Raws,
    size: tuple[int, int],
    listing: Listing,
    options: COCOOptions,
    name: str,
    comparison: MaskComparison,
) -> Instance[RLE]:
    """The object of an annotation, whose masks are compared with what is stated of them. Raises
    KeyError or ValueError if it cannot be used."""
    annotation, fields = decode_annotation(record, listing.dialect, options.boxes)
    names = [name_of_mask(record, names) for names in listing.dialect[:2]]
    rles = annotation.rles(size, options.crop, names)
    known = [rle for rle in rles if rle is not None]
    if not known and annotation.bbox is not None:
        raise ValueError("it has a box and no mask; data complete draws masks from boxes")
    if not known:
        raise ValueError("it has no mask")
    if not any(masks.areas(known)):
        raise ValueError("its mask has no pixel in the image")
    category = listing.names.get(annotation.category_id, NO_NAME)
    if listing.names and annotation.category_id not in listing.names:
        number = annotation.category_id
        raise ValueError(f"its category_id {number!r} is none of the file's categories")

    ignore = annotation.is_ignored(options.crowds_are_objects)
    instance = make_instance(annotation, rles, category, ignore, fields)
    # `decode_annotation` has added the field just now. If the record had it, the mask is an outline
    # of an earlier call, and no rectangle.
    is_box = DRAWN_FROM in fields and DRAWN_FROM not in record
    if is_box:
        assert annotation.bbox is not None  # the mask was drawn from it
        comparison.add_box(name, annotation.bbox, size)
    # A box of D2SA that reaches out of the image is not that of the cropped mask.
    stated = None if is_box or options.crop else annotation
    amodal, modal = rles
    comparison.add(name, modal or instance.modal, amodal, stated)
    return instance


def _read_queries(
    path: Path,
    records: Sequence[Raws],
    instances: dict[int, Instance[RLE]],
    collector: Collector,
) -> Iterator[Query]:
    """The queries of an image. One about an object that was left out is left out."""
    for record in records:
        with collector.record(f"{path}: query {shown(record, 'id')}"):
            query = decode_as(QueryRecord, record, "id", "text", "mask_type", "instance_ids")
            if not is_text(query.text):
                raise ValueError(f"its text {query.text!r} is no sentence")
            if not instances.keys() >= set(query.instance_ids):
                raise ValueError("it means an annotation that is not used")
            yield make_query(query)


def locate(
    source: Path,
    image: ListedImage,
    is_needed: bool,
    folders: Sequence[Path],
    must_exist: bool,
    crop: bool = False,
) -> tuple[str, tuple[int, int]]:
    """The file name and the size of a listed image.

    Its file is read if it must exist and is needed, or if its size is not stated. Raises ValueError
    for a name outside of the folder or a file that is not there, and InputError for one of another
    size. If masks are cropped, the size of the image file counts, where it is read.
    """
    size = None
    if image.height is not None and image.width is not None:
        size = int(image.height), int(image.width)
        masks.check_size(*size)
    names = _names_of(image)
    for name in names:
        if not is_text(name) or leads_outside(name):
            raise ValueError(f"the file name {name!r} leads out of the image folder")
    found = {name: file for name in names if (file := find_image(folders, name)) is not None}
    if size is not None and not (must_exist and is_needed):
        return next(iter(found), names[0]), size
    if not found:
        where = " or ".join(map(str, folders))
        raise ValueError(f"{' or '.join(names)} is not in {where}; give it with --images DIR")
    name, file = next(iter(found.items()))
    actual = image_size(file)
    if size is not None and not crop:
        check_stated_size(file, actual, size, str(source))
    # Of nested folders the innermost counts: a file in `images/` is named relative to it.
    folder = next((f for f in reversed(folders) if file.is_relative_to(f)), None)
    return file.relative_to(folder).as_posix() if folder else name, actual


def _names_of(image: ListedImage) -> list[str]:
    """The names that the file of an image may have, those of COCO 2017 for COCO 2014 included.

    LVIS gives the address alone, whose end is the folder and the name of COCO 2017.
    """
    names = list(image.file_names)
    if image.file_name is not None:
        names.insert(0, image.file_name)
    if not names:
        if image.coco_url is None:
            raise KeyError("file_name")
        path = PurePosixPath(image.coco_url)
        names = [path.name, f"{path.parent.name}/{path.name}"]
    of_2017 = [re.sub(r"COCO_(train|val|test)2014_", "", name) for name in names]
    return list(dict.fromkeys([*names, *of_2017]))
