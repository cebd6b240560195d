"""Reads questions with masks: RefCOCO, gRefCOCO, ReasonSeg, LISA++, MMR and R2SM."""

import pickle
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.coco import locate
from r2sm_jax.data.collector import Collector
from r2sm_jax.data.contradictions import MaskComparison, check
from r2sm_jax.data.dataset import NO_NAME, ImageTruth, Instance
from r2sm_jax.data.masks import RLE, Mask
from r2sm_jax.data.validation import is_text
from r2sm_jax.errors import InputError, load_json, parse_json, read_bytes
from r2sm_jax.query import MASK_TYPES, MaskType, Query

LISA_IMAGE_FIELDS = ("img_path", "image_path", "img_pth")
TAGS = re.compile("</?[QA]>")
"""Tags around questions and answers, which R2SM's prompts ask of a language model."""
Object = tuple[Hashable, str, RLE, RLE | None]
"""An object of a question: a key that is its own within the image, its class, and its visible and
complete mask."""


@dataclass
class _Image:
    """An image with the objects and questions that were read for it."""

    image_id: int
    file_name: str
    size: tuple[int, int]
    numbers: Iterator[int]
    """The ids of all objects of a source."""
    instances: dict[Hashable, Instance[RLE]] = field(default_factory=dict)
    queries: list[Query] = field(default_factory=list)

    def add(self, objects: Iterable[Object]) -> list[int]:
        """Adds the objects that are new, and returns the ids of all.

        Raises ValueError, and adds nothing, for an object without a pixel, and for one that had
        another mask before.
        """
        known = dict(self.instances)
        ids = []
        for key, category, modal, amodal in objects:
            if not any(masks.areas([modal, amodal or modal])):
                raise ValueError(f"the mask of {key} has no pixel in the image")
            if key not in known:
                known[key] = Instance(next(self.numbers), category, modal, amodal)
            elif (known[key].modal, known[key].amodal) != (modal, amodal):
                raise ValueError(f"object {key} had another mask before")
            ids.append(known[key].id)
        self.instances = known
        return ids

    def ask(
        self, text: str, objects: Iterable[Object], kind: Mapping[str, Any], answer: Any = None
    ) -> None:
        """Adds a question about visible masks, and its objects. Raises ValueError like `add`."""
        targets = self.add(objects)
        query = _make_query(len(self.queries) + 1, text, "modal", targets, kind, answer)
        self.queries.append(query)

    def truth(self) -> ImageTruth:
        instances = tuple(self.instances.values())
        return ImageTruth(self.image_id, self.file_name, self.size, instances, tuple(self.queries))


class _Images:
    """The images of a source by their key, in the order in which questions name them."""

    def __init__(self) -> None:
        self.by_key: dict[Hashable, _Image] = {}
        self.numbers = count(1)

    def get(
        self, key: Hashable, file_name: str, size: tuple[int, int], image_id: int | None = None
    ) -> _Image:
        """The image of a key. Raises ValueError if it had another file or size before."""
        if key not in self.by_key:
            number = len(self.by_key) + 1 if image_id is None else image_id
            self.by_key[key] = _Image(number, file_name, size, self.numbers)
        image = self.by_key[key]
        if (image.file_name, image.size) != (file_name, size):
            raise ValueError(f"image {key} is {image.file_name} of {image.size} before")
        return image

    def truths(self) -> Iterator[ImageTruth]:
        for image in self.by_key.values():
            yield image.truth()


def read_refcoco(
    sources: Sequence[Path],
    images_dir: Path | None,
    collector: Collector,
    instances: Path,
    split: str = "train",
) -> Iterator[ImageTruth]:
    """Reads RefCOCO, RefCOCO+ and RefCOCOg (refs(...).p, plain data only), gRefCOCO
    (grefs(...).json).

    The layout is that of lichengunc/refer refer.py; in gRefCOCO `ann_id` is a list, `[-1]` for no
    target. Only what the split uses is read. `instances` is COCO's instances.json. Raises
    InputError for files of another kind, and if there is no such split.
    """
    refs = [(where, ref) for where, _, ref in read_lists(sources, collector)]
    splits = {str(ref.get("split")) for _, ref in refs}
    if not any(_in_split(name, split) for name in splits):
        known = ", ".join(sorted(splits))
        raise InputError(f"{sources[0]}: there is no split {split!r}; --split is one of {known}")
    coco = load_json(instances, "COCO's instances.json")
    tables = {
        key: {record["id"]: record for record in coco[key]}
        for key in ("images", "annotations", "categories")
    }
    images = _Images()
    for where, ref in refs:
        if not _in_split(str(ref.get("split")), split):
            continue
        with collector.record(where):
            image_id = ref["image_id"]
            listed = tables["images"][image_id]
            image = images.get(image_id, *locate(instances, listed, images_dir, True), image_id)
            ids = ref["ann_id"] if isinstance(ref["ann_id"], list) else [ref["ann_id"]]
            objects: list[Object] = []
            for number in ids if ids != [-1] else []:
                annotation = tables["annotations"][number]
                if annotation["image_id"] != image_id:
                    raise ValueError(f"annotation {number} is of another image")
                # Its `iscrowd` does not count: RefCOCO refers to crowds too, and scores them.
                category = tables["categories"][annotation["category_id"]]["name"]
                mask = masks.compressed(annotation["segmentation"], *image.size)
                objects.append((number, category, mask, None))
            for sentence in ref["sentences"]:
                if sentence["sent"].strip():  # the cleaned form of `raw`, which can be empty
                    image.ask(sentence["sent"], objects, {"task": "referring"})
    yield from images.truths()


def _in_split(name: str, split: str) -> bool:
    """Whether a ref with this split belongs to `split`.

    As in refer.py "test" includes testA and testB, and "testA" every split of the tests with an A
    in its name.
    """
    if not name.startswith("test") or not split.startswith("test"):
        return name == split
    if name == split or split == "test":
        return True
    return len(split) == len("testA") and split[-1] in name.removeprefix("test")


def read_reasonseg(
    sources: Sequence[Path],
    images_dir: Path | None,
    collector: Collector,
    explanatory: Path | None = None,
) -> Iterator[ImageTruth]:
    """Reads ReasonSeg: X.json beside X.jpg.

    The layout and the masks are those of dvlab-research/LISA utils/data_processing.py.
    `explanatory` is explanatory/train.json, for textual answers. Polygons with "ignore" in their
    label become an ignored object, those labelled "flag" are not used, all others are the target.
    """
    answers = {}
    if explanatory is not None:
        for where, _, entry in read_lists([explanatory], collector):
            with collector.record(where):
                answers[entry["image"], entry["query"]] = entry["outputs"]
    numbers = count(1)
    for image_id, path in enumerate(json_files(sources), start=1):
        with collector.record(str(path)):
            content = load_json(path, "a ReasonSeg annotation")
            names = [path.stem + suffix for suffix in (".jpg", ".jpeg", ".png")]
            file_name, size = locate(path, {"file_names": names}, images_dir, True)
            image = _Image(image_id, file_name, size, numbers)
            target, ignored = _draw_shapes(content["shapes"], size)
            objects = [("target", "target", masks.encode(target), None)] if target.any() else []
            if not objects:
                collector.note(str(path), "there is no target; its sentences mean nothing there")
            task = "reasoning" if content.get("is_sentence") else "referring"
            for text in content["text"]:
                image.ask(text, objects, {"task": task}, answers.get((file_name, text)))
            if ignored.any():
                rle = masks.encode(ignored)
                image.instances["ignored"] = Instance(
                    next(numbers), "ignored", rle, None, ignore=True
                )
            yield image.truth()


def _draw_shapes(shapes: Sequence[Mapping[str, Any]], size: tuple[int, int]) -> tuple[Mask, Mask]:
    """Draws the target and the ignored region `[H W]`."""
    polygons = []
    for shape in shapes:
        label = shape["label"].lower()
        if label == "flag" or not shape["points"]:
            continue
        mask = draw_polygon(shape["points"], size)
        if not mask.any():
            raise ValueError("one of its shapes has no pixel in the image")
        polygons.append((mask, "ignore" in label))
    # The official code paints in descending area, so that a smaller polygon wins where two overlap;
    # its argsort also fixes the order of equal areas.
    target = np.zeros(size, bool)
    ignored = np.zeros(size, bool)
    for index in np.argsort([masks.area(mask) for mask, _ in polygons])[::-1]:
        mask, is_ignored = polygons[index]
        target[mask] = not is_ignored
        ignored[mask] = is_ignored
    return target, ignored


def draw_polygon(points: Any, size: tuple[int, int]) -> Mask:
    """Draws the mask `[H W]` of OpenCV's `polylines` and `fillPoly` for points `[[x, y], ...]`.

    Coordinates are cut to whole numbers. The outline belongs to the mask, so that one point is a
    pixel and two are a line. Raises ValueError for anything but points, and InputError if OpenCV is
    missing.
    """
    try:
        import cv2  # an optional dependency: no other format needs it
    except ImportError:
        raise InputError(
            "OpenCV draws these polygons and is missing; pip install opencv-python-headless"
        ) from None
    corners = np.asarray(points, np.float64)
    if corners.ndim != 2 or corners.shape[-1] != 2 or not (np.abs(corners) < 1 << 31).all():
        raise ValueError("it is not a list of points [x, y]")
    masks.refuse_shares(corners, *size)
    canvas = np.zeros(size, np.uint8)
    ring = corners.astype(np.int32)
    cv2.polylines(canvas, [ring], True, 1)
    cv2.fillPoly(canvas, [ring], 1)
    return canvas.astype(bool)


def read_lisa_plus_plus(
    sources: Sequence[Path], images_dir: Path | None, collector: Collector
) -> Iterator[ImageTruth]:
    """Reads LISA++ instance annotations (ReasonSeg-Inst): questions with a mask for each id.

    Masks are polygons in `points`, as {id: {"label name", "points"}}, or polygons or RLEs in
    `info`, as {id: mask}, in the layout that QuentinFitteRey/VLMSAM utils/cot_dataset.py reads.
    """
    images = _Images()
    for where, path, entry in read_lists(sources, collector):
        with collector.record(where):
            present = [key for key in LISA_IMAGE_FIELDS if key in entry]
            name = entry[(present or LISA_IMAGE_FIELDS)[0]].strip()
            image = images.get(name, *locate(path, {"file_name": name}, images_dir, True))
            answer = entry.get("English Answer")
            names = named_objects(answer) if isinstance(answer, str) else {}
            shapes = entry["info"] if entry.get("info") is not None else entry["points"]
            ids = entry["ID"] if entry.get("ID") is not None else names or shapes
            # An id that neither has a mask nor stands in the answer is a slip.
            stray = [i for i in map(str, ids) if names and i not in shapes and i not in names]
            used = [i for i in map(str, ids) if i not in stray]
            if stray or (names and set(names) != set(used)):
                collector.note(where, "ID and answer name other instances; those of ID are used")
            objects: list[Object] = []
            for key in used:
                shape, category = shapes[key], names.get(key)
                if "points" in shape:
                    shape, category = shape["points"], shape.get("label name") or category
                mask = masks.compressed(shape, *image.size)
                objects.append((key, category or NO_NAME, mask, None))
            image.ask(entry["English Question"], objects, {"task": "reasoning"}, answer)
    yield from images.truths()


def named_objects(answer: str) -> dict[str, str]:
    """Finds ids and class names in an answer such as "instance id is 3, class name is cup; ...".

    Brackets are optional, a name that is missing is empty.
    """
    pattern = (
        r"instance id is\s*\[?\s*(\w+)(?:\s*\]?\s*,?\s*(?:class|label) name is\s*\[?([^];,.\n]+))?"
    )
    pairs = re.findall(pattern, answer, re.IGNORECASE)
    return {number: name.strip() for number, name in pairs}


def read_mmr(
    sources: Sequence[Path], images_dir: Path | None, collector: Collector
) -> Iterator[ImageTruth]:
    """Reads MMR (jdg900/MMR): questions about objects and parts, several targets each.

    The `kind` of a query says whether its targets are objects, parts (category `object:part`) or
    both. Of a training file (MMR_train.json, or any name with the word "train") a question is left
    out if its text answer is not empty and has another number of `{seg}` than it has answers, as in
    MMR's own loader; other files keep every question. That loader samples questions without their
    answers, so that the two can belong to different questions; here they stay together.
    """
    images = _Images()
    for where, path, entry in read_lists(sources, collector):
        questions = []
        with collector.record(where):
            image_id = entry["image_id"]
            image = images.get(image_id, *locate(path, entry, images_dir, True), image_id)
            texts = entry.get("text_answers") or [None] * len(entry["questions"])
            questions = list(zip(entry["questions"], entry["answers"], texts, strict=True))
        is_training = "train" in path.stem.split("_")
        for number, (question, answers, text) in enumerate(questions):
            with collector.record(f"{where}, question {number}"):
                if is_training and text and str(text).count("{seg}") != len(answers):
                    collector.note(where, "left out, {seg} is not as often there as answers are")
                    continue
                objects = [_mmr_object(answer, image.size) for answer in answers]
                are_parts = {":" in category for _, category, _, _ in objects}
                level = "part" if True in are_parts else "object"
                level = "mixed" if len(are_parts) > 1 else level
                image.ask(question, objects, {"task": "reasoning", "level": level}, text)
    yield from images.truths()


def _mmr_object(answer: Mapping[str, Any], size: tuple[int, int]) -> Object:
    """The object of an answer. It has no id: the same mask of the same class is the same object."""
    mask = masks.compressed(answer["segmentation"], *size)
    category = answer["category_name"]
    return (category, mask["counts"]), category, mask, None


@dataclass(frozen=True)
class R2SMFields:
    """Names of the fields of a query record; R2SM has not published how its files are laid out."""

    image: str = "image_id"
    """Image id or file name."""
    text: str = "text"
    mask_type: str = "mask_type"
    instances: str = "instance_ids"
    """List of annotation ids; if it is missing the answer is read."""
    answer: str = "answer"
    visible: str = "visible_masks"
    """Without --over: visible masks (RLE or polygons) as {id: mask}, or a list beside the ids."""
    complete: str = "amodal_masks"
    """Without --over: complete masks, in the same form. Without them only modal ones are known."""


def read_r2sm_over(
    sources: Sequence[Path],
    over: Iterable[ImageTruth],
    collector: Collector,
    fields: R2SMFields = R2SMFields(),
    mask_type: MaskType | None = None,
) -> Iterator[ImageTruth]:
    """Reads R2SM's text queries about the images `over`, which have them in place of their own.

    Instances are given as ids or named in the answer. Their ids are the `source_id` of the
    annotations, or the id of one without. `mask_type` is that of all queries; None: each says its
    own.
    """
    truths = {truth.image_id: replace(truth, queries=()) for truth in over}
    ids_of: dict[Any, set[int]] = {}
    for truth in truths.values():
        for key in {truth.image_id, truth.file_name, Path(truth.file_name).name}:
            ids_of.setdefault(key, set()).add(truth.image_id)
    queries: dict[int, list[Query]] = {image_id: [] for image_id in truths}
    for where, _, entry in read_lists(sources, collector):
        with collector.record(where):
            name = entry[fields.image]
            found = ids_of.get(name) or ids_of.get(Path(str(name)).name, set())
            if len(found) != 1:
                raise ValueError(f"image {name!r} is not in the dataset, or several have this name")
            (image_id,) = found
            instances = truths[image_id].instances
            new_ids = {i.fields.get("source_id", i.id): i.id for i in instances}
            targets = [new_ids[int(number)] for number in _instance_ids(entry, fields)]
            number = len(queries[image_id]) + 1
            query = _r2sm_query(number, entry, fields, mask_type, targets)
            queries[image_id].append(query)
    for image_id, truth in truths.items():
        yield replace(truth, queries=tuple(queries[image_id]))


def read_r2sm(
    sources: Sequence[Path],
    images_dir: Path | None,
    collector: Collector,
    fields: R2SMFields = R2SMFields(),
    mask_type: MaskType | None = None,
) -> Iterator[ImageTruth]:
    """Reads R2SM's text queries that name an image file and hold the masks of their instances.

    Raises InputError if most visible and complete masks are exchanged.
    """
    images = _Images()
    comparison = MaskComparison()
    for where, path, entry in read_lists(sources, collector):
        with collector.record(where):
            name = entry[fields.image]
            if not isinstance(name, str):
                raise ValueError(f"a dataset file must explain image {name}; give it with --over")
            image = images.get(name, *locate(path, {"file_name": name}, images_dir, True))
            numbers = [str(number) for number in _instance_ids(entry, fields)]
            names = named_objects(str(entry.get(fields.answer)))
            visible = _own_masks(entry[fields.visible], numbers, image.size)
            complete: list[RLE | None] = [None] * len(numbers)
            if entry.get(fields.complete) is not None:
                complete = [*_own_masks(entry[fields.complete], numbers, image.size)]
            objects: list[Object] = []
            for number, modal, amodal in zip(numbers, visible, complete, strict=True):
                if amodal is not None:
                    comparison.add(f"{where}: {number}", modal, amodal)
                # Queries of one image may know different masks of an instance; each keeps what it
                # knows.
                key = number, amodal is None
                objects.append((key, names.get(number) or NO_NAME, modal, amodal))
            targets = image.add(objects)
            query = _r2sm_query(len(image.queries) + 1, entry, fields, mask_type, targets)
            image.queries.append(query)
    check(", ".join(map(str, sources)), comparison.contradictions())
    yield from images.truths()


def _own_masks(values: Any, numbers: Sequence[str], size: tuple[int, int]) -> list[RLE]:
    """The masks of the instances of a query, from {id: mask} or a list beside the ids."""
    if isinstance(values, dict):
        values = [values[number] for number in numbers]
    if len(values) != len(numbers):
        raise ValueError(f"there are {len(values)} masks for {len(numbers)} instances")
    return [masks.compressed(value, *size) for value in values]


def _instance_ids(entry: Mapping[str, Any], fields: R2SMFields) -> Sequence[int | str]:
    """The ids of the targets, from their field or from the answer as R2SM writes it.

    Raises ValueError for an answer that names some in another form.
    """
    numbers = entry.get(fields.instances)
    if numbers is not None:
        return numbers if isinstance(numbers, list) else [numbers]
    answer = entry[fields.answer]
    numbers = list(named_objects(answer))
    mentions = re.findall(r"instance id", answer, re.IGNORECASE)
    several = re.search(r"instance id is\s*\[?\s*\w+\]?\s*(,|and)\s*\d", answer, re.IGNORECASE)
    if several or len(numbers) != len(mentions) or not all(map(str.isdecimal, numbers)):
        raise ValueError("write 'instance id is [3]' in its answer for each of the ids")
    return numbers


def _r2sm_query(
    number: int,
    entry: Mapping[str, Any],
    fields: R2SMFields,
    mask_type: MaskType | None,
    targets: Sequence[int],
) -> Query:
    """The query of an entry. Raises ValueError for another mask type than the two."""
    own_type = mask_type or entry[fields.mask_type].strip().lower()
    if own_type not in MASK_TYPES:
        raise ValueError(f"its mask type is {own_type!r}; write 'modal' or 'amodal'")
    text = TAGS.sub(" ", entry[fields.text])
    answer = entry.get(fields.answer)
    return _make_query(number, text, own_type, targets, {"task": "reasoning"}, answer)


def _make_query(
    number: int,
    text: str,
    mask_type: MaskType,
    targets: Iterable[int],
    kind: Mapping[str, Any],
    answer: Any,
) -> Query:
    """A query about objects, each of which counts once. Raises ValueError for one without words."""
    if not is_text(text):
        raise ValueError("its question is empty")
    distinct = tuple(dict.fromkeys(targets))
    kind = {**kind, "multi": len(distinct) > 1}
    if isinstance(answer, str):
        kind["answer"] = answer
    return Query(number, text, mask_type, distinct, kind)


# Files


def json_files(sources: Iterable[Path]) -> Iterator[Path]:
    """Lists JSON files, and the *.json files in folders but for `._*.json`, which macOS writes."""
    for source in sources:
        if source.is_dir():
            paths = sorted(source.glob("*.json"))
            yield from (path for path in paths if not path.name.startswith("._"))
        else:
            yield source


def read_lists(
    sources: Iterable[Path], collector: Collector
) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """Reads the entries of lists in JSON files, pickles (.p) or JSON Lines files (.jsonl), each
    with its place and its file.

    A line that is not JSON is a bad record. Raises InputError for a file that holds no list.
    """
    for path in sources:
        if path.suffix == ".jsonl":
            for number, line in enumerate(read_bytes(path).splitlines(), start=1):
                where = f"{path}: line {number}"
                try:
                    value = parse_json(line, where, "a JSON object") if line.strip() else None
                except InputError:
                    with collector.record(where):
                        raise
                    continue
                if value is not None:
                    yield where, path, value
            continue
        values = read_pickle(path) if path.suffix == ".p" else load_json(path, "a list")
        if not isinstance(values, list):
            raise InputError(f"{path}: this is not a list; is it a file of this format?")
        for index, value in enumerate(values):
            if not isinstance(value, dict):
                raise InputError(f"{path}: [{index}] is not an object; is it of this format?")
            yield f"{path}: [{index}]", path, value


class _PlainDataUnpickler(pickle.Unpickler):
    """Loads no class and no function, so that a pickle cannot run code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")


def read_pickle(path: Path) -> Any:
    """Reads the plain data of a pickle. Raises InputError if it holds more, or is damaged."""
    content = read_bytes(path)
    try:
        try:
            return _PlainDataUnpickler(BytesIO(content), encoding="utf-8").load()
        except UnicodeDecodeError:  # strings of Python 2 in another encoding
            return _PlainDataUnpickler(BytesIO(content), encoding="cp1252", errors="replace").load()
    except Exception as error:  # damaged pickles raise nearly anything
        raise InputError(
            f"{path}: the pickle holds more than plain data or is damaged ({error}); it is not "
            "read, since pickles can run code; write it again as JSON with a .json name"
        ) from error
