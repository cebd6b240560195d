"""Reads questions with masks: RefCOCO, gRefCOCO, ReasonSeg, LISA++, MMR and R2SM.

A reader asks its questions about the images of one `_Images`, which yields them with their objects.
"""

import pickle
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.collector import Collector
from r2sm_jax.data.contradictions import MaskComparison, refuse_systematic
from r2sm_jax.data.dataset import NO_NAME, ImageTruth, Instance
from r2sm_jax.data.images import image_folders
from r2sm_jax.data.masks import RLE, Mask
from r2sm_jax.data.readers.answers import TAG, read_instances
from r2sm_jax.data.readers.coco import locate, read_coco
from r2sm_jax.data.readers.listing import COCOOptions, ListedImage
from r2sm_jax.data.validation import is_text
from r2sm_jax.errors import InputError, load_json, parse_json, read_bytes
from r2sm_jax.query import MASK_TYPES, MaskType, Query


class Object(NamedTuple):
    """An object that a question means."""

    category: str
    modal: RLE
    amodal: RLE | None = None
    ignore: bool = False


@dataclass
class _Image:
    """An image with the objects and questions that were read for it."""

    image_id: int
    file_name: str
    size: tuple[int, int]
    instances: dict[Hashable, Instance[RLE]] = field(default_factory=dict)
    """Its objects by keys that are their own in the image."""
    queries: list[Query] = field(default_factory=list)


class _Images:
    """The images of a source, in the order in which questions name them."""

    def __init__(self, images_dir: Path | None, collector: Collector) -> None:
        self.images_dir = images_dir
        self.collector = collector
        self.by_key: dict[Hashable, _Image] = {}
        self.object_ids = count(1)
        self._undo: list[Callable[[], Any]] = []

    @contextmanager
    def record(self, where: str) -> Iterator[None]:
        """Reads a record as a whole, or leaves nothing of it behind (`Collector.record`)."""
        with self.collector.record(where):
            self._undo.clear()
            try:
                yield
            except Exception:  # raised again: `Collector.record` decides what it counts as
                for undo in reversed(self._undo):
                    undo()
                raise

    def get(self, source: Path, listed: ListedImage, key: Hashable) -> _Image:
        """The image of a key; a whole number is its id, too. `listed` names its file.

        Raises ValueError if it had another file before, and InputError as `locate`.
        """
        folders = image_folders(source, self.images_dir)
        must_exist = self.images_dir is not None
        return self.at(key, *locate(source, listed, True, folders, must_exist))

    def at(self, key: Hashable, file_name: str, size: tuple[int, int]) -> _Image:
        """The image of a key with its file. Raises ValueError if it had another file before."""
        if key not in self.by_key:
            number = key if isinstance(key, int) else len(self.by_key) + 1
            self.by_key[key] = _Image(number, file_name, size)
            self._undo.append(lambda: self.by_key.pop(key))
        image = self.by_key[key]
        if (image.file_name, image.size) != (file_name, size):
            raise ValueError(f"image {key} is {image.file_name} of {image.size} before")
        return image

    def add(self, image: _Image, objects: Mapping[Any, Object]) -> list[int]:
        """Adds the objects to an image that it does not have yet, and returns the ids of all.

        Raises ValueError for one without a pixel, or with another mask than before.
        """
        for key, (category, modal, amodal, ignore) in objects.items():
            if not any(masks.areas([modal, amodal or modal])):
                raise ValueError(f"the mask of {key} has no pixel in the image")
            known = image.instances.get(key)
            if known is None:
                number = next(self.object_ids)
                image.instances[key] = Instance(number, category, modal, amodal, ignore=ignore)
                self._undo.append(lambda key=key: image.instances.pop(key))
            elif (known.modal, known.amodal) != (modal, amodal):
                raise ValueError(f"object {key} had another mask before")
        return [image.instances[key].id for key in objects]

    def ask(
        self,
        image: _Image,
        text: str,
        targets: Iterable[int],
        kind: Mapping[str, Any],
        answer: str | None = None,
        mask_type: MaskType = "modal",
    ) -> None:
        """Adds a question about objects, each of which counts once. Raises ValueError for one
        without words."""
        if not is_text(text):
            raise ValueError("its question is empty")
        distinct = tuple(dict.fromkeys(targets))
        kind = {**kind, "multi": len(distinct) > 1}
        if answer is not None:
            kind["answer"] = answer
        image.queries.append(Query(len(image.queries) + 1, text, mask_type, distinct, kind))
        self._undo.append(image.queries.pop)

    def truths(self) -> Iterator[ImageTruth]:
        for image in self.by_key.values():
            yield ImageTruth(
                image.image_id,
                image.file_name,
                image.size,
                tuple(image.instances.values()),
                tuple(image.queries),
            )


# RefCOCO


class _Sentence(msgspec.Struct):
    sent: str
    """The cleaned form of `raw`, which can be empty."""


class _Ref(msgspec.Struct):
    image_id: int
    ann_id: int | list[int]
    sentences: list[_Sentence]


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
    target. `instances` is COCO's instances.json. Raises InputError for files of another kind, and
    if there is no such split.
    """
    entries = list(read_lists(sources))
    names = {str(entry.get("split")) for _, _, entry in entries}
    if not any(_in_split(name, split) for name in names):
        known = ", ".join(sorted(names))
        raise InputError(f"{sources[0]}: there is no split {split!r}; --split is one of {known}")
    entries = [one for one in entries if _in_split(str(one[2].get("split")), split)]
    named = {number for _, _, entry in entries if isinstance(number := entry.get("image_id"), int)}
    # Its `iscrowd` does not count: RefCOCO refers to crowds too, and scores them.
    options = COCOOptions("refcoco", crowds_are_objects=True, image_ids=named)
    of_file = Collector()  # what no sentence is about is no fault
    truths = {t.image_id: t for t in read_coco(instances, images_dir, options, of_file)}
    faults = {found.where: found.what for found in of_file.bad}
    images = _Images(images_dir, collector)
    for where, _, entry in entries:
        with images.record(where):
            ref = msgspec.convert(entry, _Ref)
            if ref.image_id not in truths:
                raise ValueError(_fault(instances, f"image {ref.image_id}", faults))
            truth = truths[ref.image_id]
            image = images.at(ref.image_id, truth.file_name, truth.size)
            known = {instance.id: instance for instance in truth.instances}
            ids = ref.ann_id if isinstance(ref.ann_id, list) else [ref.ann_id]
            objects = {}
            for number in ids if ids != [-1] else []:
                if number not in known:
                    raise ValueError(_fault(instances, f"annotation {number}", faults))
                objects[number] = Object(known[number].category, known[number].modal)
            targets = images.add(image, objects)
            for sentence in ref.sentences:
                if sentence.sent.strip():
                    images.ask(image, sentence.sent, targets, {"task": "referring"})
    yield from images.truths()


def _fault(instances: Path, name: str, faults: Mapping[str, str]) -> str:
    """Why a record that a sentence is about cannot be used."""
    reason = faults.get(f"{instances}: {name}", "there is none in the image")
    return f"{name} of {instances}: {reason}"


def _in_split(name: str, split: str) -> bool:
    """Whether a ref of the split `name` belongs to `split`, as in refer.py: "testAB" to testA,
    testB and test."""
    if split in ("testA", "testB", "testC"):
        return split[-1] in name
    return split == name or (split == "test" and "test" in name)


# ReasonSeg


class _Shape(msgspec.Struct):
    label: str
    points: list[Any]
    shape_type: str | None = None


class _Shapes(msgspec.Struct):
    """An annotation of ReasonSeg, which has the form of labelme."""

    shapes: list[_Shape]
    text: list[str]
    is_sentence: bool = False


class _Answer(msgspec.Struct):
    image: str
    query: str
    outputs: str


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
    for where, _, entry in read_lists([explanatory] if explanatory else []):
        with collector.record(where):
            told = msgspec.convert(entry, _Answer)
            answers[told.image, told.query] = told.outputs
    images = _Images(images_dir, collector)
    for path in json_files(sources):
        with images.record(str(path)):
            content = load_json(path, "a ReasonSeg annotation")
            names = [path.stem + suffix for suffix in (".jpg", ".jpeg", ".png")]
            image = images.get(path, ListedImage(str(path), file_names=names), path)
            content = msgspec.convert(content, _Shapes)
            target, ignored = _draw_shapes(content.shapes, image.size)
            objects: dict[Hashable, Object] = {}
            if target.any():
                objects["target"] = Object("target", masks.encode(target))
            else:
                collector.note(str(path), "there is no target; its sentences mean nothing there")
            targets = images.add(image, objects)
            task = "reasoning" if content.is_sentence else "referring"
            for text in content.text:
                answer = answers.get((image.file_name, text))
                images.ask(image, text, targets, {"task": task}, answer)
            if ignored.any():
                region = Object("ignored", masks.encode(ignored), ignore=True)
                images.add(image, {"ignored": region})
    yield from images.truths()


def _draw_shapes(shapes: Sequence[_Shape], size: tuple[int, int]) -> tuple[Mask, Mask]:
    """Draws the target and the ignored region `[H W]`. Raises ValueError for a shape that is
    neither polygon nor rectangle."""
    polygons = []
    for shape in shapes:
        label = shape.label.lower()
        if label == "flag" or not shape.points:
            continue
        points = shape.points
        if shape.shape_type == "rectangle" and len(points) == 2:
            (x0, y0), (x1, y1) = points
            points = [[x0, y0], [x1, y0], [x1, y1], [x0, y1]]
        elif shape.shape_type not in (None, "", "polygon"):
            raise ValueError(f"its shape_type is {shape.shape_type!r}; draw polygons or rectangles")
        mask = draw_polygon(points, size)
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
    try:
        corners = np.asarray(points, np.float64)
    except TypeError:
        corners = np.empty(0)
    if corners.ndim != 2 or corners.shape[-1] != 2 or not (np.abs(corners) < 1 << 31).all():
        raise ValueError("it is not a list of points [x, y]")
    masks.refuse_shares(corners, *size)
    canvas = np.zeros(size, np.uint8)
    ring = corners.astype(np.int32)
    cv2.polylines(canvas, [ring], True, 1)
    cv2.fillPoly(canvas, [ring], 1)
    return canvas.astype(bool)


# LISA++


class _Question(msgspec.Struct):
    """An entry of LISA++."""

    question: str = msgspec.field(name="English Question")
    answer: str | None = msgspec.field(name="English Answer", default=None)
    ids: list[str | int] | None = msgspec.field(name="ID", default=None)
    points: dict[str, Any] = {}
    info: dict[str, Any] | None = None
    img_path: str | None = None
    image_path: str | None = None
    img_pth: str | None = None


def read_lisa_plus_plus(
    sources: Sequence[Path], images_dir: Path | None, collector: Collector
) -> Iterator[ImageTruth]:
    """Reads LISA++ instance annotations (ReasonSeg-Inst): questions with a mask for each id.

    Masks are polygons in `points`, as {id: {"label name", "points"}}, or polygons or RLEs in
    `info`, as {id: mask}, in the layout that QuentinFitteRey/VLMSAM utils/cot_dataset.py reads.
    """
    images = _Images(images_dir, collector)
    for where, path, value in read_lists(sources):
        with images.record(where):
            entry = msgspec.convert(value, _Question)
            name = (entry.img_path or entry.image_path or entry.img_pth or "").strip()
            image = images.get(path, ListedImage(name, name), name)
            names = dict(read_instances(entry.answer or ""))
            shapes = entry.info or entry.points
            ids = entry.ids if entry.ids is not None else names or shapes
            keys = [str(number) for number in ids]
            if names and names.keys() != set(keys):
                collector.note(where, "ID and answer name other instances; those of ID are used")
            objects = {}
            for key in keys:
                # A slip: it neither has a mask nor stands in the answer.
                if names and key not in names and key not in shapes:
                    continue
                shape = shapes[key]
                category = names.get(key)
                if isinstance(shape, dict) and "points" in shape:
                    category = shape.get("label name") or category
                    shape = shape["points"]
                objects[key] = Object(category or NO_NAME, masks.compressed(shape, *image.size))
            targets = images.add(image, objects)
            images.ask(image, entry.question, targets, {"task": "reasoning"}, entry.answer)
    yield from images.truths()


# MMR


class _Target(msgspec.Struct):
    category_name: str
    segmentation: Any


class _Questions(msgspec.Struct):
    """The questions of MMR about an image."""

    questions: list[str]
    answers: list[list[_Target]]
    text_answers: list[str | None] | None = None


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
    images = _Images(images_dir, collector)
    for where, path, value in read_lists(sources):
        questions = []
        with images.record(where):
            entry = msgspec.convert(value, _Questions)
            listed = msgspec.convert(value | {"id": value["image_id"]}, ListedImage)
            image = images.get(path, listed, listed.id)
            texts = entry.text_answers or [None] * len(entry.questions)
            questions = list(zip(entry.questions, entry.answers, texts, strict=True))
        is_training = "train" in path.stem.split("_")
        for number, (question, answers, text) in enumerate(questions):
            with images.record(f"{where}, question {number}"):
                if is_training and text and text.count("{seg}") != len(answers):
                    collector.note(where, "left out, {seg} is not as often there as answers are")
                    continue
                objects = {}
                for answer in answers:
                    category = answer.category_name
                    mask = masks.compressed(answer.segmentation, *image.size)
                    # Without an id: the same mask of the same class is the same object.
                    objects[category, mask["counts"]] = Object(category, mask)
                are_parts = {":" in category for category, _ in objects}
                level = "part" if True in are_parts else "object"
                level = "mixed" if len(are_parts) > 1 else level
                targets = images.add(image, objects)
                images.ask(image, question, targets, {"task": "reasoning", "level": level}, text)
    yield from images.truths()


# R2SM


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


class _Asked(msgspec.Struct):
    """A query of R2SM, by the names of `R2SMFields`."""

    image: int | str
    text: str
    mask_type: str | None = None
    instances: list[int | str] | int | str | None = None
    answer: str | None = None
    visible: dict[str, Any] | list[Any] | None = None
    complete: dict[str, Any] | list[Any] | None = None


def read_r2sm(
    sources: Sequence[Path],
    images_dir: Path | None,
    collector: Collector,
    over: Iterable[ImageTruth] | None = None,
    fields: R2SMFields = R2SMFields(),
    mask_type: MaskType | None = None,
) -> Iterator[ImageTruth]:
    """Reads R2SM's text queries about the images `over`, which have them in place of their own.

    Instances are given as ids or named in the answer. Their ids are the `source_id` of the
    annotations, or the id of one without. Without `over` queries name an image file and hold the
    masks of their instances. `mask_type` is that of all queries; None: each says its own.

    Raises InputError if most visible and complete masks are exchanged.
    """
    images = _Images(images_dir, collector)
    named: dict[Any, set[int]] = {}
    for truth in over or ():
        instances = {str(i.fields.get("source_id", i.id)): i for i in truth.instances}
        image = _Image(truth.image_id, truth.file_name, truth.size, {**instances})
        images.by_key[truth.image_id] = image
        for name in (truth.image_id, truth.file_name, Path(truth.file_name).name):
            named.setdefault(name, set()).add(truth.image_id)
    comparison = MaskComparison()
    for where, path, value in read_lists(sources):
        with images.record(where):
            given = {name: value[key] for name, key in asdict(fields).items() if key in value}
            entry = msgspec.convert(given, _Asked)
            name = entry.image
            numbers = _instance_ids(entry)
            if over is not None:
                found = named.get(name) or named.get(Path(str(name)).name, set())
                if len(found) != 1:
                    raise ValueError(f"image {name!r} is not in the dataset, or several are")
                image = images.by_key[min(found)]
                targets = [image.instances[number].id for number in numbers]
            elif isinstance(name, str):
                image = images.get(path, ListedImage(name, name), name)
                objects = _own_objects(entry, numbers, image.size)
                for (number, _), one in objects.items():
                    comparison.add(f"{where}: {number}", one.modal, one.amodal)
                targets = images.add(image, objects)
            else:
                raise ValueError(f"a dataset file must explain image {name}; give it with --over")
            own_type = mask_type or (entry.mask_type or "").strip().lower()
            if own_type not in MASK_TYPES:
                raise ValueError(f"its mask type is {own_type!r}; write 'modal' or 'amodal'")
            text = TAG.sub(" ", entry.text)
            images.ask(image, text, targets, {"task": "reasoning"}, entry.answer, own_type)
    refuse_systematic(", ".join(map(str, sources)), comparison.contradictions())
    yield from images.truths()


def _own_objects(
    entry: _Asked, numbers: Sequence[str], size: tuple[int, int]
) -> dict[tuple[str, int], Object]:
    """The objects of a query that holds their masks, {id: mask} or a list beside the ids."""
    names = dict(read_instances(entry.answer or ""))
    rles: list[list[RLE]] = []
    if entry.visible is None:
        raise ValueError("it holds no visible masks; give them, or a dataset file with --over")
    for values in (entry.visible, entry.complete):
        if values is None:
            continue
        if isinstance(values, dict):
            values = [values[number] for number in numbers]
        if len(values) != len(numbers):
            raise ValueError(f"there are {len(values)} masks for {len(numbers)} instances")
        rles.append([masks.compressed(value, *size) for value in values])
    # Queries of one image may know different masks of an instance; each keeps what it knows.
    return {
        (number, len(pair)): Object(names.get(number) or NO_NAME, *pair)
        for number, *pair in zip(numbers, *rles, strict=True)
    }


def _instance_ids(entry: _Asked) -> list[str]:
    """The ids of the targets, from their field or from the answer.

    Raises ValueError for an answer in which one of them cannot be read.
    """
    numbers = entry.instances
    if numbers is None:
        if entry.answer is None:
            raise ValueError("it has neither instances nor an answer; give one of them")
        numbers = [number for number, _ in read_instances(entry.answer)]
    numbers = [str(number) for number in (numbers if isinstance(numbers, list) else [numbers])]
    if not all(numbers):
        raise ValueError("write 'instance id is [3]' in its answer for each of the ids")
    return numbers


# Files


def json_files(sources: Iterable[Path]) -> Iterator[Path]:
    """Lists JSON files, and the *.json files in folders but for `._*.json`, which macOS writes."""
    for source in sources:
        if source.is_dir():
            paths = sorted(source.glob("*.json"))
            yield from (path for path in paths if not path.name.startswith("._"))
        else:
            yield source


def read_lists(sources: Iterable[Path]) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """Reads the entries of lists in JSON files, pickles (.p) or JSON Lines files (.jsonl), each
    with its place and its file.

    Raises InputError for a file that cannot be read, or holds anything but objects.
    """
    for path in sources:
        if path.suffix.lower() == ".jsonl":
            lines = enumerate(read_bytes(path).splitlines(), start=1)
            where = f"{path}: line"
            values = [parse_json(t, f"{where} {n}", "an object") for n, t in lines if t.strip()]
        else:
            values = read_pickle(path) if path.suffix.lower() == ".p" else load_json(path, "a list")
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
