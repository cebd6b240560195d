"""The dataset format (docs/data.md) as types, and checks of what types do not say.

`parse` reads a whole file and raises the first problem; `problems` finds all of them. Neither
decodes masks. What records state twice, and differently, is found by contradictions.py.
"""

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard

import msgspec

from r2sm_jax.data import masks
from r2sm_jax.data.images import leads_outside
from r2sm_jax.data.masks import RLE
from r2sm_jax.errors import InputError, paused_collection

MASK_FIELDS = ("segmentation", "visible_mask")
"""The fields of an annotation that hold the complete and the visible mask."""
OTHER_MASKS = ("visible_segm", "inmodal_seg", "i_segmentation", "i_segm")
"""Fields of the visible mask in the files of others (data/readers/listing.py)."""
COMPLETED_BY = "completed_by"
"""Field of an object whose complete mask a machine drew (drafts.py)."""
NULL = msgspec.Raw(b"null")
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for content that is not of a type."""
RESERVED = ("category", "box", "hidden")
"""Names that attributes cannot have: those of what the model learns beside them."""

Side = Annotated[int, msgspec.Meta(ge=1)]


class ImageRecord(msgspec.Struct, gc=False):
    id: int
    file_name: str
    height: Side
    width: Side


class Category(msgspec.Struct, gc=False):
    id: int
    name: str


class Annotation(msgspec.Struct, gc=False):
    id: int
    image_id: int
    category_id: int
    segmentation: msgspec.Raw = NULL
    visible_mask: msgspec.Raw = NULL
    bbox: Any = None
    area: Any = None
    occlude_rate: Any = None
    attributes: dict[str, Any] | None = None
    ignore: Any = None
    iscrowd: Any = None
    isStuff: Any = None  # COCOA's floor, carpet, sky
    completed_by: Any = None
    # The visible mask in other formats, which this one does not read.
    visible_segm: msgspec.Raw = NULL
    inmodal_seg: msgspec.Raw = NULL
    i_segmentation: msgspec.Raw = NULL
    i_segm: msgspec.Raw = NULL

    def rles(
        self,
        size: tuple[int, int],
        crop: bool = False,
        names: Sequence[str] = MASK_FIELDS,
    ) -> tuple[RLE | None, RLE | None]:
        """Returns the complete and the visible mask, in this order, as RLEs of an image of this
        size; None for one that is not given.

        `crop` cuts RLEs that are larger than the image, as some of D2SA's. Raises ValueError for a
        damaged one, by the name that it has in its file.
        """
        rles = []
        for raw, name in zip((self.segmentation, self.visible_mask), names, strict=True):
            try:
                rles.append(_read_rle(msgspec.json.decode(raw), size, crop))
            except ValueError as error:
                raise ValueError(
                    f"its {name} cannot be read ({error}); write the mask again"
                ) from error
        amodal, modal = rles
        # KINS writes an empty list for an object of which nothing is visible.
        if amodal is not None and bytes(self.visible_mask) == b"[]":
            modal = masks.merge([], *size)
        return amodal, modal

    @property
    def words(self) -> dict[str, str]:
        """Its attributes that are words. Others are kept, and nothing reads them."""
        attributes = self.attributes or {}
        return {name: value for name, value in attributes.items() if isinstance(value, str)}

    def is_ignored(self, crowds_are_objects: bool = False) -> bool:
        """Whether loss, queries and metrics leave it out."""
        is_crowd = parse_flag(self.iscrowd) and not crowds_are_objects
        return bool(parse_flag(self.ignore) or is_crowd)


def _read_rle(mask: Any, size: tuple[int, int], crop: bool) -> RLE | None:
    """The RLE of a mask of an image of this size. Raises ValueError for one that is damaged, or
    larger unless it is to be cropped."""
    if mask is None or mask == []:
        return None
    if isinstance(mask, dict):
        height, width = masks.rle_size(mask)
        if (height, width) != size and height >= size[0] and width >= size[1]:
            if not crop:
                raise ValueError(f"its mask of {height} x {width} reaches out; use --oversize crop")
            # They share their top left corner, as in public loaders of D2SA.
            return masks.encode(masks.decode(mask)[: size[0], : size[1]])
    return masks.compressed(mask, *size)


class QueryRecord(msgspec.Struct, gc=False):
    id: int
    image_id: int
    text: str
    mask_type: Literal["modal", "amodal"]
    instance_ids: list[int]
    kind: dict[str, Any] | None = None
    answer: Any = None


class File(msgspec.Struct):
    """A dataset file."""

    images: list[ImageRecord]
    annotations: list[Annotation]
    categories: list[Category]
    queries: list[QueryRecord]
    info: Any = None


LISTS = {
    "images": (ImageRecord, "image"),
    "annotations": (Annotation, "annotation"),
    "categories": (Category, "category"),
    "queries": (QueryRecord, "query"),
}
"""The lists of a dataset file: the type of their records, and what one of them is called."""


class _Size(msgspec.Struct):
    """What is read of an RLE before it is decoded."""

    size: tuple[Side, Side]


class _Id(msgspec.Struct):
    id: int


def is_text(value: Any) -> TypeGuard[str]:
    """Whether a value is a string with a visible character. Half a character, as JSON's "\\ud800",
    is not text."""
    if not isinstance(value, str):
        return False
    # Most are of this kind, and it takes no look at each character.
    if value.isascii() and value.isprintable():
        return not value.isspace() and value != ""
    categories = {unicodedata.category(character) for character in value}
    # Separators, control characters and zero-width ones do not show.
    return "Cs" not in categories and any(name[0] not in "ZC" for name in categories)


def parse_flag(value: Any) -> bool | None:
    """Yes or no in the spellings of annotation tools: true, 1, "1", "true"; None: neither."""
    if value is None or type(value) is bool:
        return bool(value)
    if type(value) is int and value in (0, 1):
        return value == 1
    spelling = str(value).strip().lower()
    if spelling in ("1", "1.0", "true", "yes"):
        return True
    if spelling in ("0", "0.0", "false", "no", ""):
        return False
    return None


def parse(path: Path, content: bytes) -> File:
    """Reads a dataset file. Raises InputError for the first problem, with `path` and the record."""
    with paused_collection():
        try:
            file = msgspec.json.decode(content, type=File)
        except UNREADABLE as error:
            raise InputError(f"{path}: {next(problems(content), error)}") from None
        for problem in _faults(file):
            raise InputError(f"{path}: {problem}")
    return file


def problems(content: bytes) -> Iterator[str]:
    """All problems with fields, ids, references and mask sizes of a dataset file, each with the
    name of its record, such as "annotation 7"."""
    try:
        lists = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    except UNREADABLE as error:
        is_list = content.lstrip()[:1] == b"["
        kind = ", but a list, as COCO results are" if is_list else f" ({error})"
        yield f"no dataset file{kind}"
        return
    if not lists.keys() & LISTS.keys():
        yield f"no dataset file: it has {', '.join(lists) or 'nothing'}"
        return

    file = File([], [], [], [])
    is_whole = True
    for key, (kind, name) in LISTS.items():
        try:
            records = msgspec.json.decode(lists.get(key, NULL), type=list[msgspec.Raw])
        except msgspec.MsgspecError:
            remedy = "add it, [] where there are none"
            if key == "queries":
                remedy += "; of a COCO file use data convert coco, or train on it as compose:FILE"
            yield f"the list {key!r} is missing; {remedy}"
            is_whole = False
            continue
        for index, record in enumerate(records):
            try:
                getattr(file, key).append(msgspec.json.decode(record, type=kind))
            except msgspec.MsgspecError as error:
                yield f"{_name_of(record, name, f'{key}[{index}]')}: {error}"
    if is_whole:
        yield from _faults(file)


def _name_of(record: msgspec.Raw, name: str, place: str) -> str:
    """Names a record that cannot be read by its id, or else by its place."""
    try:
        return f"{name} {msgspec.json.decode(record, type=_Id).id}"
    except msgspec.MsgspecError:
        return place


def _faults(file: File) -> Iterator[str]:
    """What types do not say: ids that occur twice, references, names, and sizes of masks."""
    images = {image.id: image for image in file.images}
    categories = {category.id for category in file.categories}
    places = {annotation.id: annotation.image_id for annotation in file.annotations}
    find_faults = {
        "images": _image_faults,
        "categories": _category_faults,
        "annotations": lambda record: _annotation_faults(record, images, categories),
        "queries": lambda record: _query_faults(record, images, places),
    }
    for key, (_, name) in LISTS.items():
        seen: set[int] = set()
        for record in getattr(file, key):
            if record.id in seen:
                yield f"{name} {record.id}: the id {record.id} occurs twice"
            seen.add(record.id)
            for what in find_faults[key](record):
                yield f"{name} {record.id}: {what}"


def _image_faults(image: ImageRecord) -> Iterator[str]:
    name = image.file_name
    if not is_text(name) or leads_outside(name):
        yield f"file_name {name!r} is no path inside the image folder"
    if image.height * image.width > masks.MAX_PIXELS:
        yield f"{image.height} x {image.width} are more than {masks.MAX_PIXELS} pixels"


def _category_faults(category: Category) -> Iterator[str]:
    if not is_text(category.name):
        yield f"name {category.name!r} is no name"


def _annotation_faults(
    annotation: Annotation, images: Mapping[int, ImageRecord], categories: set[int]
) -> Iterator[str]:
    image = images.get(annotation.image_id)
    if image is None:
        yield f"image_id {annotation.image_id} is no image of this file"
    if annotation.category_id not in categories:
        yield f"category_id {annotation.category_id} is no category of this file"

    given = [field for field in MASK_FIELDS if bytes(getattr(annotation, field)) != b"null"]
    if not given:
        yield "it has neither segmentation nor visible_mask"
    for field in OTHER_MASKS:
        if bytes(getattr(annotation, field)) != b"null":
            yield f"{field} is not read here; write it as visible_mask, with data convert muva"
    for field in given:
        if fault := _mask_fault(getattr(annotation, field), image):
            yield f"{field} {fault}"

    yield from value_faults(annotation)


def value_faults(annotation: Annotation) -> Iterator[str]:
    """What is wrong with an annotation by itself, but for its masks."""
    for name in annotation.attributes or ():
        if name in RESERVED or "/" in name:
            yield f"an attribute cannot be called {name!r}; rename it"
    for field in ("ignore", "iscrowd"):
        if parse_flag(getattr(annotation, field)) is None:
            yield f"{field} is {getattr(annotation, field)!r}, neither true nor false"
    # Label Studio has a field of this name for people.
    is_of_machine = isinstance(annotation.completed_by, dict)
    if is_of_machine and bytes(annotation.visible_mask) == b"null":
        yield "its visible_mask is lost; put it back: data convert corrected FILE --over DRAFT"


def _mask_fault(mask: msgspec.Raw, image: ImageRecord | None) -> str:
    """What is wrong with the size or type of a mask, told without decoding it; "" if nothing."""
    content = bytes(mask)
    if content[:1] == b"{":
        try:
            height, width = msgspec.json.decode(mask, type=_Size).size
        except msgspec.MsgspecError as error:
            return f"is no RLE ({error})"
        if image is not None and (height, width) != (image.height, image.width):
            return f"has the size {height} x {width}, its image {image.height} x {image.width}"
        return ""
    is_list = content[:1] == b"[" and content[1:].strip() != b"]"
    return "" if is_list else "is neither an RLE nor a list of polygons"


def _query_faults(
    query: QueryRecord, images: Mapping[int, ImageRecord], places: Mapping[int, int]
) -> Iterator[str]:
    if query.image_id not in images:
        yield f"image_id {query.image_id} is no image of this file"
    if not is_text(query.text):
        yield f"text {query.text!r} is no sentence"
    for target in query.instance_ids:
        if places.get(target) != query.image_id:
            yield f"instance_ids: {target} is no annotation of its image"
