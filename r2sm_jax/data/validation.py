"""The dataset format (docs/data.md) as types, and checks of what types do not say.

`parse` reads a whole file and raises the first problem; `problems` finds all of them. Neither
decodes masks. `find_contradictions` compares what records state twice, such as `bbox` and the
mask's own box: what would be wrong without a word.
"""

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard

import msgspec
import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.images import leads_outside
from r2sm_jax.errors import InputError, paused_collection

MASKS = ("segmentation", "visible_mask")
"""The fields of an annotation that hold the complete and the visible mask."""
NULL = msgspec.Raw(b"null")
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for content that is not of a type."""
RESERVED = ("category", "box", "hidden")
"""Names that attributes cannot have: those of what the model learns beside them."""

# The edges of a stated box may differ from those of the mask by the larger of the two, in pixels
# and in longer sides of the box: annotation tools round outwards and trace outlines between pixels.
BOX_TOLERANCE_PIXELS = 3
BOX_TOLERANCE = 0.1
# A stated area may be this many times larger or smaller than that of the mask.
MAX_AREA_RATIO = 2.0
# A visible mask may be this many times larger than its complete mask: annotators' fringes reach a
# few pixels beyond it. More than that means that the two may have been exchanged.
MAX_VISIBLE_RATIO = 1.1
MIN_SIDE_FOR_SHARES = 8
"""In smaller images a polygon of one pixel may have coordinates from 0 to 1."""
NUM_COMPARED_ON_READING = 200
"""Reading a dataset compares so many annotations; `data check` and the readers of `data convert`
compare all."""

Side = Annotated[int, msgspec.Meta(ge=1)]


class Image(msgspec.Struct, gc=False):
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
    attributes: dict[str, str] | None = None
    ignore: Any = None
    iscrowd: Any = None

    def mask(self, field: str) -> Any:
        """Decodes one of `MASKS`: an RLE, polygons or None."""
        return msgspec.json.decode(getattr(self, field))

    @property
    def is_ignored(self) -> bool:
        """Whether loss, queries and metrics leave it out."""
        return bool(parse_flag(self.ignore) or parse_flag(self.iscrowd))


class Query(msgspec.Struct, gc=False):
    id: int
    image_id: int
    text: str
    mask_type: Literal["modal", "amodal"]
    instance_ids: list[int]
    kind: dict[str, Any] | None = None
    answer: Any = None


class File(msgspec.Struct):
    """A dataset file. A record that cannot be read is None, which `parse` never leaves."""

    images: list[Image]
    annotations: list[Annotation]
    categories: list[Category]
    queries: list[Query]
    info: Any = None


LISTS = {
    "images": (Image, "image"),
    "annotations": (Annotation, "annotation"),
    "categories": (Category, "category"),
    "queries": (Query, "query"),
}
"""The lists of a dataset file: the type of their records, and what one of them is called."""


class _Size(msgspec.Struct):
    """What is read of an RLE before it is decoded."""

    size: tuple[Side, Side]


class _Id(msgspec.Struct):
    id: int


class Problem(NamedTuple):
    """One thing that is wrong with a dataset file.

    `records` is the list that the record is in, "" for the file itself, and `index` its position
    there, -1 for the list or the file. `where` names the record for the user, such as "annotation
    7".
    """

    records: str
    index: int
    where: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        sentence = f"{self.what}; {self.remedy}" if self.remedy else self.what
        return f"{self.where}: {sentence}" if self.where else sentence


class Contradiction(NamedTuple):
    """A fact that records state twice, and differently."""

    count: int
    compared: int
    what: str

    @property
    def is_systematic(self) -> bool:
        """Whether most records contradict themselves, so that the file cannot be trusted."""
        return self.count * 2 > self.compared

    def __str__(self) -> str:
        return f"{self.count} of {self.compared} {self.what}"


# Values.


def is_id(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number (True and False are not) of 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


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


def is_ignored(annotation: Mapping[str, Any]) -> bool:
    """Whether loss, queries and metrics leave an annotation out, by its `ignore` or `iscrowd`."""
    return bool(parse_flag(annotation.get("ignore")) or parse_flag(annotation.get("iscrowd")))


# Problems: a file with one is refused.


def parse(path: Path, content: bytes, *, need_queries: bool = True) -> File:
    """Reads a dataset file. Raises InputError for the first problem, with `path` and the record."""
    with paused_collection():
        try:
            if need_queries:
                file = msgspec.json.decode(content, type=File)
            else:
                file = _add_queries(msgspec.json.decode(content, type=_WithoutQueries))
        except UNREADABLE as error:
            first = next(problems(content, need_queries=need_queries), error)
            raise InputError(f"{path}: {first}") from None
        for problem in _faults(file):
            raise InputError(f"{path}: {problem}")
    return file


class _WithoutQueries(msgspec.Struct):
    """A COCO instances file, whose queries may be missing."""

    images: list[Image]
    annotations: list[Annotation]
    categories: list[Category]
    queries: list[Query] = []
    info: Any = None


def _add_queries(file: _WithoutQueries) -> File:
    return File(file.images, file.annotations, file.categories, file.queries, file.info)


def check_records(path: Path, records: Any) -> File:
    """Checks the records of a dataset file in memory. Raises InputError as `parse`."""
    return parse(path, json.dumps(records).encode())


def find_problems(records: Any) -> Iterator[Problem]:
    """All problems of the records of a dataset file in memory, as `problems`."""
    return problems(json.dumps(records).encode())


def problems(content: bytes, *, need_queries: bool = True) -> Iterator[Problem]:
    """All problems with fields, ids, references and mask sizes of a dataset file."""
    try:
        lists = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    except UNREADABLE as error:
        yield Problem("", -1, "", f"no dataset file ({error})")
        return
    if not need_queries:
        lists.setdefault("queries", msgspec.Raw(b"[]"))

    file = File([], [], [], [])
    found: list[Problem] = []
    for key, (kind, name) in LISTS.items():
        try:
            records = msgspec.json.decode(lists.get(key, NULL), type=list[msgspec.Raw])
        except msgspec.MsgspecError:
            remedy = "add it, [] where there are none"
            if key == "queries":
                remedy += "; of a COCO file use data convert coco, or train on it as compose:FILE"
            found.append(Problem("", -1, "", f"the list {key!r} is missing", remedy))
            continue
        for index, record in enumerate(records):
            try:
                getattr(file, key).append(msgspec.json.decode(record, type=kind))
            except msgspec.MsgspecError as error:
                where = _name_of(record, name, f"{key}[{index}]")
                found.append(Problem(key, index, where, str(error)))
                getattr(file, key).append(None)
    yield from found
    if not any(problem.index < 0 for problem in found):
        yield from _faults(file)


def _name_of(record: msgspec.Raw, name: str, place: str) -> str:
    """Names a record that cannot be read by its id, or else by its place."""
    try:
        return f"{name} {msgspec.json.decode(record, type=_Id).id}"
    except msgspec.MsgspecError:
        return place


def _faults(file: File) -> Iterator[Problem]:
    """What types do not say: ids that occur twice, references, names, and sizes of masks."""
    for key, (_, name) in LISTS.items():
        ids = [record.id for record in getattr(file, key) if record]
        if len(set(ids)) < len(ids):
            seen: set[int] = set()
            for index, record in enumerate(getattr(file, key)):
                if record and record.id in seen:
                    what = f"the id {record.id} occurs twice"
                    yield Problem(key, index, f"{name} {record.id}", what)
                elif record:
                    seen.add(record.id)

    images = {image.id: image for image in file.images if image}
    categories = {category.id for category in file.categories if category}
    places = {annotation.id: annotation.image_id for annotation in file.annotations if annotation}
    find_faults = {
        "images": _image_faults,
        "categories": _category_faults,
        "annotations": lambda record: _annotation_faults(record, images, categories),
        "queries": lambda record: _query_faults(record, images, places),
    }
    for key, (_, name) in LISTS.items():
        for index, record in enumerate(getattr(file, key)):
            if record:
                for what in find_faults[key](record):
                    yield Problem(key, index, f"{name} {record.id}", what)


def _image_faults(image: Image) -> Iterator[str]:
    name = image.file_name
    if not is_text(name) or leads_outside(name):
        yield f"file_name {name!r} is no path inside the image folder"
    if image.height * image.width > masks.MAX_PIXELS:
        yield f"{image.height} x {image.width} are more than {masks.MAX_PIXELS} pixels"


def _category_faults(category: Category) -> Iterator[str]:
    if not is_text(category.name):
        yield f"name {category.name!r} is no name"


def _annotation_faults(
    annotation: Annotation, images: Mapping[int, Image], categories: set[int]
) -> Iterator[str]:
    image = images.get(annotation.image_id)
    if image is None:
        yield f"image_id {annotation.image_id} is no image of this file"
    if annotation.category_id not in categories:
        yield f"category_id {annotation.category_id} is no category of this file"

    given = [field for field in MASKS if bytes(getattr(annotation, field)) != b"null"]
    if not given:
        yield "it has neither segmentation nor visible_mask"
    for field in given:
        if fault := _mask_fault(getattr(annotation, field), image):
            yield f"{field} {fault}"

    for name in annotation.attributes or ():
        if name in RESERVED or "/" in name:
            yield f"an attribute cannot be called {name!r}; rename it"
    for field in ("ignore", "iscrowd"):
        if parse_flag(getattr(annotation, field)) is None:
            yield f"{field} is {getattr(annotation, field)!r}, neither true nor false"


def _mask_fault(mask: msgspec.Raw, image: Image | None) -> str:
    """What is wrong with a mask that is not decoded: with its size, or its type; "" if nothing."""
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
    query: Query, images: Mapping[int, Image], places: Mapping[int, int]
) -> Iterator[str]:
    if query.image_id not in images:
        yield f"image_id {query.image_id} is no image of this file"
    if not is_text(query.text):
        yield f"text {query.text!r} is no sentence"
    for target in query.instance_ids:
        if places.get(target) != query.image_id:
            yield f"instance_ids: {target} is no annotation of its image"


# Contradictions: a file most of whose records have one is refused.


def check_contradictions(path: Path, file: File) -> None:
    """Compares at most `NUM_COMPARED_ON_READING` annotations, evenly spread over the file.

    Raises InputError where most contradict themselves.
    """
    stride = -(-len(file.annotations) // NUM_COMPARED_ON_READING) or 1
    some = File(file.images, file.annotations[::stride], file.categories, [])
    for contradiction in compare(some):
        if contradiction.is_systematic:
            raise InputError(f"{path}: {contradiction}")


def find_contradictions(records: Any) -> Iterator[Contradiction]:
    """Compares the checked records of a dataset file in memory, as `compare`."""
    return compare(_add_queries(msgspec.json.decode(json.dumps(records), type=_WithoutQueries)))


def compare(file: File) -> Iterator[Contradiction]:
    """Compares what the records of a checked dataset file state twice.

    Masks that cannot be decoded are left to whoever reads them.
    """
    yield from find_shared_files([image.file_name for image in file.images])
    sizes = {image.id: (image.height, image.width) for image in file.images}
    boxes = BoxComparison()
    areas = AreaComparison()
    outside: list[str] = []
    num_polygons = 0
    for annotation in file.annotations:
        size = sizes[annotation.image_id]
        given = [mask for mask in map(annotation.mask, MASKS) if mask is not None]
        for polygons in given:
            if isinstance(polygons, list):
                num_polygons += 1
                if fault := find_polygon_fault(polygons, size):
                    outside.append(f"annotation {annotation.id}): {fault}")
        try:
            rles = [masks.compressed(mask, *size) for mask in given]
        except ValueError:
            continue
        stated = {"id": annotation.id, "bbox": annotation.bbox, "area": annotation.area}
        boxes.add(stated, rles)
        if len(rles) == len(MASKS):
            complete_area, visible_area = masks.areas(rles)
            areas.add(visible_area, complete_area)

    wrong_boxes = list(boxes.contradictions())
    yield from wrong_boxes
    if outside and not wrong_boxes:
        what = f"masks are not where their image is ({outside[0]}"
        yield Contradiction(len(outside), num_polygons, what)
    yield from areas.contradictions("segmentation and visible_mask may be exchanged")


def find_shared_files(file_names: Sequence[str]) -> Iterator[Contradiction]:
    """The images whose file is also that of another image, in any spelling."""
    counts = Counter(map(_file_key, file_names))
    shared = [name for name in file_names if counts[_file_key(name)] > 1]
    if shared:
        what = (
            f"images share their file with another image ({shared[0]}), so that masks may lie on "
            "the wrong picture and one picture may be in two splits; give every image its own "
            "file_name, such as a path with its folder"
        )
        yield Contradiction(len(shared), len(file_names), what)


def _file_key(name: str) -> str:
    """A path in one spelling: with slashes, composed accents, and without `./`."""
    return unicodedata.normalize("NFC", str(PurePosixPath(name.replace("\\", "/"))))


def find_pictures_in_both(
    file_names: Iterable[str], other_names: Iterable[str]
) -> Contradiction | None:
    """The pictures that two splits of one folder share, by their names in any spelling."""
    names = {_file_key(name): name for name in file_names}
    shared = sorted(names.keys() & {_file_key(name) for name in other_names})
    if not shared:
        return None
    what = (
        f"pictures are in both ({names[shared[0]]}), so that figures are not of pictures that "
        "training has never seen; remove them from one of the two"
    )
    return Contradiction(len(shared), len(names), what)


def find_polygon_fault(polygons: Sequence[Any], size: tuple[int, int]) -> str:
    """Why polygons cannot be in pixels of their image of this height and width; "" if they can be.

    They are shares of its size, or lie outside of it. For anything but polygons it is "" too. A
    polygon is a list of numbers or of points.
    """
    try:
        nested = [polygons] if isinstance(polygons[0], int | float) else polygons
        corners = np.concatenate([np.asarray(ring, float).reshape(-1, 2) for ring in nested])
        left, top = corners.min(0)
        right, bottom = corners.max(0)
    except (ValueError, TypeError, IndexError, OverflowError):
        return ""  # whoever reads the mask says what is wrong with it
    if not np.isfinite([left, top, right, bottom]).all():
        return ""
    height, width = size
    if min(left, top) >= 0 and max(right, bottom) <= 1 and min(size) >= MIN_SIDE_FOR_SHARES:
        return "its coordinates seem to be shares of the image's size; give pixels"
    if right >= 0 and left < width and bottom >= 0 and top < height:
        return ""
    return "its coordinates lie outside of the image; give them in pixels of this one"


class AreaComparison:
    """Compares the areas of visible and complete masks, object by object."""

    def __init__(self) -> None:
        # Objects that are fully visible tell nothing.
        self.num_different = 0
        self.num_larger = 0

    def add(self, visible_area: int, complete_area: int) -> None:
        """Compares the number of pixels of the two masks of one object."""
        self.num_different += visible_area != complete_area
        self.num_larger += visible_area > MAX_VISIBLE_RATIO * complete_area

    def contradictions(self, remedy: str) -> Iterator[Contradiction]:
        """Yields the result for all objects, if any visible mask is clearly the larger one."""
        if self.num_larger:
            what = f"visible masks are larger than their complete masks; {remedy}"
            yield Contradiction(self.num_larger, self.num_different, what)


class BoxComparison:
    """Compares stated `bbox` and `area` with the masks, annotation by annotation."""

    def __init__(self) -> None:
        # How many were compared, and a description of each that is wrong.
        self._num_boxes = 0
        self._num_areas = 0
        self._wrong_boxes: list[str] = []
        self._wrong_areas: list[str] = []

    def add(self, annotation: Mapping[str, Any], rles: Sequence[masks.RLE]) -> None:
        """Compares one annotation with its masks, as compressed RLEs.

        Its box and its area may be those of either mask, since tools differ in which they state.
        """
        name = f"annotation {annotation.get('id')}"
        stated = _parse_box(annotation.get("bbox"))
        mask_areas = masks.areas(rles) if rles else []
        mask_boxes = [np.array(masks.coco.toBbox(rle), float) for rle in rles]
        if stated is not None and rles:
            self._num_boxes += 1
            # An empty mask has no box.
            pairs = zip(mask_areas, mask_boxes, strict=True)
            if not any(area and _box_matches(stated, box) for area, box in pairs):
                numbers = mask_boxes[0].astype(int).tolist() if any(mask_areas) else "empty"
                self._wrong_boxes.append(f"{name}: bbox {annotation['bbox']}, mask {numbers}")

        # Tools that do not compute an area write 0, 1 or the box's.
        area = annotation.get("area")
        if not any(mask_areas) or not isinstance(area, int | float) or not 1 < area < np.inf:
            return
        if stated is not None and np.isclose(area, stated[2] * stated[3], rtol=0.1):
            return
        self._num_areas += 1
        ratios = [area / mask_area for mask_area in mask_areas if mask_area]
        if not any(1 / MAX_AREA_RATIO <= ratio <= MAX_AREA_RATIO for ratio in ratios):
            self._wrong_areas.append(f"{name}: area {area}, mask {mask_areas[0]}")

    def contradictions(self) -> Iterator[Contradiction]:
        """Yields the result for all annotations: wrong boxes, or else wrong areas."""
        if self._wrong_boxes:
            what = (
                f"bboxes contradict their masks ({self._wrong_boxes[0]}); correct the masks, or "
                "leave bbox out where it is wrong"
            )
            yield Contradiction(len(self._wrong_boxes), self._num_boxes, what)
        elif self._wrong_areas:
            what = (
                f"areas contradict their masks ({self._wrong_areas[0]}); correct the masks, or "
                "leave area out where it is wrong"
            )
            yield Contradiction(len(self._wrong_areas), self._num_areas, what)


def _parse_box(bbox: Any) -> np.ndarray | None:
    """A stated `bbox` as `[x y width height]`; None where there is none that can be compared."""
    if not isinstance(bbox, list | tuple) or len(bbox) != 4:
        return None
    if not all(isinstance(number, int | float) and np.isfinite(number) for number in bbox):
        return None
    box = np.array(bbox, float)
    # Some tools state shares of the image's size, or [0, 0, 1, 1] for each object. A box in pixels
    # has a number above 1, except for a pixel in the image's corner, which is not compared.
    is_usable = min(box[2:]) > 0 and box.max() > 1
    return box if is_usable else None


def _box_matches(stated: np.ndarray, mask_box: np.ndarray) -> bool:
    """Whether two boxes are the same within the tolerance.

    Corners `[x0 y0 x1 y1]` in the place of `[x y width height]`, as Pascal VOC has them, are
    understood.
    """
    corners = np.concatenate([stated[:2], stated[2:] - stated[:2]])
    tolerance = max(BOX_TOLERANCE_PIXELS, BOX_TOLERANCE * max(*stated[2:], *mask_box[2:]))
    return any(_edges_agree(box, mask_box, tolerance) for box in (stated, corners))


def _edges_agree(one: np.ndarray, other: np.ndarray, tolerance: float) -> bool:
    """Whether all four edges of two boxes `[x y width height]` are within the tolerance."""
    edges = [np.concatenate([box[:2], box[:2] + box[2:]]) for box in (one, other)]
    return bool(np.abs(edges[0] - edges[1]).max() <= tolerance)
