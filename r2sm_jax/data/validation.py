"""Checks of the records of a dataset file: keys, types, ids, and facts that contradict each other.

`find_problems` reads every record and decodes no mask. `find_contradictions` compares what records
state twice, such as `bbox` and the mask's own box, and names the likely cause.
"""

import math
import re
import reprlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.images import leads_outside
from r2sm_jax.errors import InputError

LISTS = {
    "images": "image",
    "annotations": "annotation",
    "categories": "category",
    "queries": "query",
}
"""The lists of a dataset file, and what one of their records is called."""
_half_characters = re.compile("[\ud800-\udfff]")
MASKS = ("segmentation", "visible_mask")
"""The fields of an annotation that hold the complete and the visible mask."""

Record = Mapping[str, Any]
ById = Mapping[str, Mapping[int, Record | None]]
"""The records of each list by their id; None where a record is not read yet."""

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
    remedy: str

    def __str__(self) -> str:
        sentence = f"{self.what}; {self.remedy}"
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
    if _half_characters.search(value):
        return False
    # Separators, control characters and zero-width ones do not show.
    return any(unicodedata.category(character)[0] not in "ZC" for character in value)


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


def is_ignored(annotation: Record) -> bool:
    """Whether loss, queries and metrics leave an annotation out, by its `ignore` or `iscrowd`."""
    return bool(parse_flag(annotation.get("ignore")) or parse_flag(annotation.get("iscrowd")))


def check_records(path: Path, records: Any) -> None:
    """Checks keys, types, ids and mask sizes of a whole dataset file. Decodes no mask and opens no
    image.

    Raises InputError for the first problem, with `path`, the record, the field and the remedy.
    """
    for problem in find_problems(records):
        raise InputError(f"{path}: {problem}")


def find_problems(records: Any) -> Iterator[Problem]:
    """All problems with keys, types, ids and mask sizes, record by record."""
    if not isinstance(records, dict):
        what = f"this is JSON, but not one object with {', '.join(LISTS)}"
        yield Problem("", -1, "", what, "give a dataset file")
        return

    missing = [key for key in LISTS if not isinstance(records.get(key), list)]
    remedy = "add it, [] where there are none"
    if missing == ["queries"]:
        remedy += "; of a COCO file use data convert coco, or train on it as compose:FILE"
    for key in missing:
        state = "is no list" if key in records else "is missing"
        yield Problem("", -1, "", f"the list {key!r} {state}", remedy)
    if missing:
        return

    # Ids first: the checks of fields look up the records that a field refers to.
    by_id: dict[str, dict[int, Record | None]] = {key: {} for key in LISTS}
    for key in LISTS:
        for index, record in enumerate(records[key]):
            if not _has_id(record):
                what = "it is not an object with a whole number as id"
                yield Problem(key, index, f"{key}[{index}]", what, "give it one")
            elif record["id"] in by_id[key]:
                where = f"{key} id {record['id']}"
                yield Problem(key, index, where, "it occurs twice", "give every record its own id")
            else:
                by_id[key][record["id"]] = record

    for key, name in LISTS.items():
        for index, record in enumerate(records[key]):
            if not _has_id(record):
                continue
            for field, expected in FIND_FAULTS[key](record, by_id):
                state = "is missing"
                if field in record:
                    state = f"is {reprlib.repr(record[field])}"
                where = f"{name} {record['id']}"
                yield Problem(key, index, where, f"{field} {state}", f"give {expected}")


def has_faults(key: str, record: Any) -> bool:
    """Whether a record of list `key` is wrong by itself, whatever the others are.

    The ids of other records in it are only whole numbers then, and masks may have any size.
    """
    return not _has_id(record) or any(FIND_FAULTS[key](record, ANY_RECORDS))


class _AnyRecords(Mapping[int, None]):
    """Records that are not read yet, so that any id may be among them."""

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: int) -> None:
        return None

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0


ANY_RECORDS: ById = {key: _AnyRecords() for key in LISTS}


def _has_id(record: Any) -> bool:
    return isinstance(record, dict) and is_id(record.get("id"))


def _refers(record: Record, field: str, targets: Mapping[int, Record | None]) -> bool:
    """Whether a field holds the id of one of the targets."""
    return is_id(record.get(field)) and record[field] in targets


# The four functions below yield the fields of a record that are wrong, and what they must hold.


def _image_faults(image: Record, by_id: ById) -> Iterator[tuple[str, str]]:
    name = image.get("file_name")
    height = image.get("height")
    width = image.get("width")

    if not is_text(name):
        yield "file_name", "a path inside the image folder"
    elif leads_outside(name):
        example = PureWindowsPath(name).name
        yield "file_name", f"a path inside the image folder, such as {example!r}"
    if not is_id(height) or height < 1:
        yield "height", "the image's height in pixels"
    if not is_id(width) or width < 1 or (is_id(height) and height * width > masks.MAX_PIXELS):
        yield "width", f"the image's width in pixels, of at most {masks.MAX_PIXELS} in all"


def _category_faults(category: Record, by_id: ById) -> Iterator[tuple[str, str]]:
    if not is_text(category.get("name")):
        yield "name", "a name"


def _annotation_faults(annotation: Record, by_id: ById) -> Iterator[tuple[str, str]]:
    image = None
    if _refers(annotation, "image_id", by_id["images"]):
        image = by_id["images"][annotation["image_id"]]
    else:
        yield "image_id", "the id of an image in this file"

    if not _refers(annotation, "category_id", by_id["categories"]):
        yield "category_id", "the id of a category in this file"

    complete = annotation.get("segmentation")
    visible = annotation.get("visible_mask")
    # `_may_be_mask` allows null for each of the two, but one of them must be there.
    has_mask = complete is not None or visible is not None
    if not has_mask or not _may_be_mask(complete, image):
        expected = (
            "an RLE of the image's size or a list of polygons, or null where there is a "
            "visible_mask"
        )
        yield "segmentation", expected + _note_on_exchange(complete, image)
    if not _may_be_mask(visible, image):
        expected = "an RLE of the image's size, a list of polygons, or null"
        yield "visible_mask", expected + _note_on_exchange(visible, image)

    attributes = annotation.get("attributes")
    if attributes and not _are_words(attributes):
        yield "attributes", "an object of strings, or leave it out"

    if parse_flag(annotation.get("ignore")) is None:
        yield "ignore", "true or false"
    if parse_flag(annotation.get("iscrowd")) is None:
        yield "iscrowd", "0 or 1"


def _are_words(attributes: Any) -> bool:
    if not isinstance(attributes, dict):
        return False
    return all(isinstance(word, str) for word in attributes.values())


def _query_faults(query: Record, by_id: ById) -> Iterator[tuple[str, str]]:
    if not _refers(query, "image_id", by_id["images"]):
        yield "image_id", "the id of an image in this file"
    if not is_text(query.get("text")):
        yield "text", "a sentence"
    if query.get("mask_type") not in ("modal", "amodal"):
        yield "mask_type", '"modal" or "amodal"'

    ids = query.get("instance_ids")
    image_id = query.get("image_id")
    if not isinstance(ids, list) or not all(_is_of_image(i, image_id, by_id) for i in ids):
        yield "instance_ids", "the ids of annotations of the same image, [] where nothing is meant"
    if not isinstance(query.get("kind") or {}, dict):
        yield "kind", "an object, or leave it out"


def _is_of_image(annotation_id: Any, image_id: Any, by_id: ById) -> bool:
    """Whether an id is that of an annotation of the image."""
    annotations = by_id["annotations"]
    if not is_id(annotation_id) or annotation_id not in annotations:
        return False
    annotation = annotations[annotation_id]
    return annotation is None or annotation.get("image_id") == image_id


FIND_FAULTS = {
    "images": _image_faults,
    "annotations": _annotation_faults,
    "categories": _category_faults,
    "queries": _query_faults,
}
"""For each list the function that finds what is wrong with one of its records."""


def _may_be_mask(mask: Any, image: Record | None) -> bool:
    """Whether a field may hold this value: null, polygons, or an RLE of the image's size.

    Polygons and the counts of RLEs are not read here; whoever reads the mask refuses bad ones.
    """
    if not isinstance(mask, dict):
        return mask is None or (isinstance(mask, list) and bool(mask))
    try:
        size = masks.rle_size(mask)
    except ValueError:
        return False
    return image is None or size == (image.get("height"), image.get("width"))


def _note_on_exchange(mask: Any, image: Record | None) -> str:
    """A note on an RLE whose height is the image's width, and the other way round; else ""."""
    try:
        height, width = masks.rle_size(mask)
    except ValueError:
        return ""
    if image is None or (width, height) != (image.get("height"), image.get("width")):
        return ""
    return " (height and width seem to be exchanged in the record of the image)"


def check_contradictions(path: Path, records: Record) -> None:
    """Refuses a dataset file most of whose records contradict themselves.

    Compares `NUM_COMPARED_ON_READING` annotations at most, evenly spread over the file, so that the
    time does not grow with it. Raises InputError with the count and the likely cause.
    """
    annotations = records["annotations"]
    compared = [annotations[index] for index in compared_on_reading(len(annotations))]
    refuse_contradictions(path, {**records, "annotations": compared})


def compared_on_reading(num_annotations: int) -> range:
    """The positions of at most `NUM_COMPARED_ON_READING` annotations, evenly spread over a file."""
    stride = max(1, math.ceil(num_annotations / NUM_COMPARED_ON_READING))
    return range(0, num_annotations, stride)


def refuse_contradictions(path: Path, records: Record) -> None:
    """Compares all annotations of checked records. Raises InputError if most contradict
    themselves."""
    for contradiction in find_contradictions(records):
        if contradiction.is_systematic:
            raise InputError(f"{path}: {contradiction}")


def find_contradictions(records: Record) -> Iterator[Contradiction]:
    """Compares what the records of a checked dataset file state twice.

    Masks that cannot be decoded are left to whoever reads them.
    """
    yield from find_shared_files([image["file_name"] for image in records["images"]])
    sizes = {image["id"]: (image["height"], image["width"]) for image in records["images"]}
    boxes = BoxComparison()
    areas = AreaComparison()
    for annotation in records["annotations"]:
        size = sizes[annotation["image_id"]]
        try:
            rles = [
                masks.compressed(annotation[key], *size)
                for key in MASKS
                if annotation.get(key) is not None
            ]
        except ValueError:
            continue
        boxes.add(annotation, rles)

        if len(rles) == len(MASKS):
            complete_area, visible_area = masks.areas(rles)
            areas.add(visible_area, complete_area)

    box_contradictions = list(boxes.contradictions())
    yield from box_contradictions
    # Boxes tell the cause better.
    if not box_contradictions:
        yield from find_polygon_faults(records)
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


def find_polygon_faults(records: Record) -> Iterator[Contradiction]:
    """The polygons of a checked dataset file that cannot be in pixels of their image."""
    sizes = {image["id"]: (image["height"], image["width"]) for image in records["images"]}
    faults: Counter[str] = Counter()
    first = ""
    num_polygons = 0
    for annotation in records["annotations"]:
        for key in MASKS:
            polygons = annotation.get(key)
            if isinstance(polygons, list):
                num_polygons += 1
                fault = find_polygon_fault(polygons, sizes[annotation["image_id"]])
                if fault:
                    first = first or _name_of(annotation)
                    faults[fault] += 1
    if faults:
        fault, _ = faults.most_common(1)[0]
        what = f"masks are not where their image is ({first}): {fault}"
        yield Contradiction(faults.total(), num_polygons, what)


def find_polygon_fault(polygons: Sequence[Any], size: tuple[int, int]) -> str:
    """Why polygons cannot be in pixels of their image; "" if they can be.

    They are shares of its size, or lie outside of it. For anything but polygons it is "" too.
    `size` is the image's height and width. A polygon is a list of numbers or of points.
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
        return (
            "its coordinates seem to be shares of the image's size; multiply them by width and "
            "height"
        )
    if right >= 0 and left < width and bottom >= 0 and top < height:
        return ""
    if left >= 0 and right <= height and top >= 0 and bottom <= width:
        return "height and width of the image seem to be exchanged; exchange them"
    return (
        "its coordinates lie outside of the image and seem to be of another scale, or of another "
        "image; give them in pixels of this one"
    )


@dataclass
class AreaComparison:
    """Compares the areas of visible and complete masks, object by object."""

    num_different: int = 0
    """Objects whose two masks differ. Those that are fully visible tell nothing."""
    num_larger: int = 0
    """Objects whose visible mask is clearly the larger one."""

    def add(self, visible_area: int, complete_area: int) -> None:
        """Compares the number of pixels of the two masks of one object."""
        self.num_different += visible_area != complete_area
        self.num_larger += visible_area > MAX_VISIBLE_RATIO * complete_area

    def contradictions(self, remedy: str) -> Iterator[Contradiction]:
        """Yields the result for all objects, if any visible mask is too large."""
        if self.num_larger:
            what = f"visible masks are larger than their complete masks; {remedy}"
            yield Contradiction(self.num_larger, self.num_different, what)


class BoxComparison:
    """Compares stated `bbox` and `area` with the masks, annotation by annotation."""

    def __init__(self) -> None:
        # How many were compared, and a description of each that is wrong.
        self._num_boxes = 0
        self._num_areas = 0
        self._wrong_areas: list[str] = []
        self._wrong_boxes: list[str] = []
        # How often each cause explains a wrong box. The most frequent one is reported.
        self._causes: Counter[str] = Counter()

    def add(self, annotation: Record, rles: Sequence[masks.RLE]) -> None:
        """Compares one annotation with its masks, as compressed RLEs.

        Its box and its area may be those of either mask, since tools differ in which they state.
        """
        stated = _parse_box(annotation.get("bbox"))
        filled_rles = [rle for rle in rles if masks.areas([rle])[0]]
        if rles and not filled_rles and stated is not None:
            self._num_boxes += 1
            self._wrong_boxes.append(
                f"{_name_of(annotation)}: bbox {annotation['bbox']}, mask empty"
            )
            cause = _find_cause_outside(stated, rles[0]["size"])
            self._causes[cause or "the masks may lie outside of the image"] += 1
        if not filled_rles:
            return

        mask_boxes = [np.array(masks.coco.toBbox(rle), float) for rle in filled_rles]
        if stated is not None:
            self._num_boxes += 1
            if not any(_box_matches(stated, mask_box) for mask_box in mask_boxes):
                numbers = [int(number) for number in mask_boxes[0]]
                self._wrong_boxes.append(
                    f"{_name_of(annotation)}: bbox {annotation['bbox']}, mask {numbers}"
                )
                self._causes[find_cause(stated, filled_rles[0])] += 1

        # Tools that do not compute an area write 0, 1 or the box's.
        area = annotation.get("area")
        if not isinstance(area, int | float) or not 1 < area < np.inf:
            return
        if stated is not None and np.isclose(area, stated[2] * stated[3], rtol=0.1):
            return
        self._num_areas += 1
        mask_areas = masks.areas(filled_rles)
        ratios = [area / mask_area for mask_area in mask_areas]
        if not any(1 / MAX_AREA_RATIO <= ratio <= MAX_AREA_RATIO for ratio in ratios):
            self._wrong_areas.append(f"{_name_of(annotation)}: area {area}, mask {mask_areas[0]}")

    def contradictions(self) -> Iterator[Contradiction]:
        """Yields the result for all annotations: wrong boxes, or else wrong areas."""
        if self._wrong_boxes:
            cause, _ = self._causes.most_common(1)[0]
            what = (
                f"bboxes contradict their masks ({self._wrong_boxes[0]}); {cause}; correct the "
                "masks, or leave bbox out where it is wrong"
            )
            yield Contradiction(len(self._wrong_boxes), self._num_boxes, what)
        elif self._wrong_areas:
            what = (
                f"areas contradict their masks ({self._wrong_areas[0]}); correct the masks, or "
                "leave area out where it is wrong"
            )
            yield Contradiction(len(self._wrong_areas), self._num_areas, what)


def find_cause(stated: np.ndarray, rle: masks.RLE) -> str:
    """The likely reason why a mask's box is not the stated one `[x y width height]`.

    Each known slip is applied to one of the two boxes. That which makes them equal is the cause.
    """
    height, width = rle["size"]
    mask_box = np.array(masks.coco.toBbox(rle), float)
    # With x and y exchanged. The part of a mask that lies outside of the image is lost.
    exchanged = stated[[1, 0, 3, 2]]
    exchanged[2:] = np.minimum(exchanged[:2] + exchanged[2:], [width, height]) - exchanged[:2]
    if _box_matches(exchanged, mask_box):
        return "the masks seem to be written y, x"
    if _box_matches(stated, mask_box * [width, height, width, height]):
        return "the polygons seem to be shares of the image's size"

    # The runs of a mask, which were read column by column, laid out row by row.
    mask = masks.expand(rle)
    transposed = np.asarray(mask).T.reshape(height, width)
    if transposed.any() and _box_matches(stated, np.array(masks.coco_box(transposed), float)):
        return "the RLEs seem to be counted row by row, and COCO counts column by column"
    if not mask.all() and _box_matches(stated, np.array(masks.coco_box(~mask), float)):
        return "the masks seem to be inverted"

    scale = stated[2] / mask_box[2]
    if not 0.9 < scale < 1.1 and _box_matches(stated, mask_box * scale):
        return f"the masks seem to be of another scale (x {scale:.3g})"
    return _find_cause_outside(stated, (height, width)) or (
        "they may belong to other objects or other images"
    )


def _find_cause_outside(stated: np.ndarray, size: tuple[int, int]) -> str:
    """Why a box `[x y width height]` reaches out of its image; "" if it does not.

    `size` is the height and the width of the image. The tolerance of boxes is allowed.
    """
    height, width = size
    right, bottom = stated[:2] + stated[2:] - BOX_TOLERANCE_PIXELS
    if right <= width and bottom <= height:
        return ""
    if right <= height and bottom <= width:
        return "height and width of the images seem to be exchanged"
    return "the boxes reach out of the images, and seem to be of larger ones"


def _name_of(annotation: Record) -> str:
    """Names an annotation for the user. COCOA's regions have no id."""
    number = annotation.get("id")
    return "a region" if number is None else f"annotation {number}"


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
