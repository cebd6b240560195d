"""Reads questions with visible masks: RefCOCO, gRefCOCO, ReasonSeg, LISA++, MMR."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.annotations import mask_fields
from r2sm_jax.data.masks import Mask
from r2sm_jax.data.validation import find_polygon_fault
from r2sm_jax.errors import InputError, load_json
from r2sm_jax.tools.entries import (
    BadRecord,
    Entry,
    Note,
    RecordError,
    Size,
    draw_polygon,
    index_by_id,
    read_json_files,
    read_list_files,
)
from r2sm_jax.tools.records import (
    ImageRecord,
    Item,
    ObjectRecord,
    QueryRecord,
    Record,
    make_image,
    make_visible_object,
    names_of_image,
)

# RefCOCO


def read_refcoco(
    sources: Sequence[Path], instances: Path, split: str = "train", images_dir: Path | None = None
) -> Iterator[Item]:
    """RefCOCO, RefCOCO+ and RefCOCOg (refs(...).p, plain data only), gRefCOCO (grefs(...).json).

    The layout is that of lichengunc/refer refer.py; in gRefCOCO `ann_id` is a list, `[-1]` for no
    target. Only images and objects that the split uses are read. `instances` is COCO's
    instances.json.
    """
    refs: list[Entry] = []
    for ref in read_list_files(sources, "refs(...).p or grefs(...).json"):
        if isinstance(ref, BadRecord):
            yield ref
        else:
            refs.append(ref)
    splits = sorted({str(ref.get("split")) for ref in refs})
    if not any(_in_split(name, split) for name in splits):
        problem = f"there is no split {split!r}; --split is one of {', '.join(splits)}"
        raise InputError(f"{sources[0]}: {problem}")

    coco = Entry(instances, "", load_json(instances, "COCO's instances.json"))
    tables: dict[str, dict[int, Entry]] = {}
    nouns = {"images": "image", "annotations": "annotation", "categories": "category"}
    for key, noun in nouns.items():
        tables[key], bad_records = index_by_id(coco.children(key, noun))
        yield from bad_records

    images: dict[int, ImageRecord] = {}
    for ref in refs:
        name = ref.get("split")
        if isinstance(name, str) and not _in_split(name, split):
            continue
        try:
            ref.require("split", str)
            image_id = ref.require("image_id", int)
            if image_id not in images:
                entry = ref.look_up("image_id", tables["images"])
                names = [entry.text("file_name")]
                images[image_id] = make_image(entry, names, images_dir, image_id, entry.size())
            yield _read_ref(ref, images[image_id], tables)
        except RecordError as error:
            yield error.bad_record


def _in_split(name: Any, split: str) -> bool:
    """Whether a ref with this split belongs to `split`.

    As in refer.py "test" includes testA and testB, and "testA" every split of the tests with an A
    in its name.
    """
    if not isinstance(name, str) or not name.startswith("test") or not split.startswith("test"):
        return name == split
    if name == split or split == "test":
        return True
    return len(split) == len("testA") and split[-1] in name.removeprefix("test")


def _read_ref(ref: Entry, image: ImageRecord, tables: Mapping[str, Mapping[int, Entry]]) -> Record:
    """The objects and sentences of a ref; `tables` has COCO's annotations and categories by id."""
    annotation_ids = ref.require("ann_id", int, list)
    if isinstance(annotation_ids, int):
        annotation_ids = [annotation_ids]
    if annotation_ids == [-1]:  # gRefCOCO's sign for no target
        annotation_ids = []
    objects = []
    for annotation_id in annotation_ids:
        annotation = ref.look_up("ann_id", tables["annotations"], annotation_id)
        if annotation.get("image_id") not in (None, image.id):
            problem = f"annotation {annotation_id} is not of its image"
            raise ref.error(problem, "give files that belong together")
        category = annotation.look_up("category_id", tables["categories"]).require("name", str)
        objects.append(
            make_visible_object(annotation, "segmentation", image.size, category, annotation_id)
        )

    queries = []
    for sentence in ref.children("sentences"):
        # `sent` is the cleaned form of `raw`, and can be empty.
        if sentence.require("sent", str).strip():
            text = sentence.text("sent")
            queries.append(QueryRecord(text, "modal", annotation_ids, {"task": "referring"}))
    return Record(image, objects, queries)


# ReasonSeg


def read_reasonseg(
    sources: Sequence[Path], explanatory: Path | None = None, images_dir: Path | None = None
) -> Iterator[Item]:
    """ReasonSeg: X.json beside X.jpg.

    The layout and the masks are those of dvlab-research/LISA utils/data_processing.py.
    `explanatory` is explanatory/train.json, for textual answers. Polygons with "ignore" in their
    label become an ignored object, those labelled "flag" are not used, all others are the target.
    """
    answers: dict[tuple[str, str], str] = {}
    if explanatory is not None:
        for entry in read_list_files([explanatory], "ReasonSeg's explanatory/train.json"):
            if isinstance(entry, BadRecord):
                yield entry
                continue
            question = entry.require("image", str), entry.require("query", str)
            answers[question] = entry.require("outputs", str)

    for file in read_json_files(sources, "a ReasonSeg annotation"):
        if isinstance(file, Note):
            yield file
            continue
        try:
            record, notes = _read_reasonseg_file(file, answers, images_dir)
        except RecordError as error:
            yield error.bad_record
            continue
        yield record
        yield from notes


def _read_reasonseg_file(
    file: Entry, answers: Mapping[tuple[str, str], str], images_dir: Path | None
) -> tuple[Record, list[Note]]:
    """The target and the questions of a file; `answers` are by image and question."""
    image = make_image(file, names_of_image(file.path), images_dir)
    target, ignored, notes = _draw_shapes(file, image.size)
    objects = []
    targets = []
    if target.any():
        targets.append(str(file.path))
        objects.append(ObjectRecord("target", mask_fields(target, None), key=targets[0]))
    else:
        notes.append(
            file.note("there is no target, so that its sentences mean nothing that is there")
        )
    if ignored.any():
        objects.append(ObjectRecord("ignored", mask_fields(ignored, None), ignored_by="label"))

    kind = {"task": "reasoning" if file.get("is_sentence") else "referring"}
    queries = []
    for index, value in enumerate(file.require("text", list)):
        text = Entry(file.path, f"text[{index}]", {"query": value}).text("query")
        answer = answers.get((image.file_name, text))
        queries.append(QueryRecord(text, "modal", targets, kind, answer))
    return Record(image, objects, queries), notes


def _draw_shapes(file: Entry, size: Size) -> tuple[Mask, Mask, list[Note]]:
    """The masks `[H W]` of the target and of the ignored region, and notes about empty shapes."""
    polygons: list[tuple[Mask, bool]] = []
    notes = []
    for shape in file.children("shapes"):
        label = shape.require("label", str).lower()
        points = shape.require("points", list)
        if label == "flag":
            continue
        if not points:
            notes.append(shape.note("left out, it has no points"))
            continue
        if fault := find_polygon_fault(points, size):
            raise shape.error("its points are not where the image is", fault)
        try:
            mask = draw_polygon(points, size)
        except ValueError as error:
            raise shape.error(f"its points cannot be used ({error})", "correct them") from error
        polygons.append((mask, "ignore" in label))

    # The official code paints in descending area, so that a smaller polygon wins where two overlap;
    # its argsort also fixes the order of equal areas.
    target = np.zeros(size, bool)
    ignored = np.zeros(size, bool)
    areas = [masks.area(mask) for mask, _ in polygons]
    for index in np.argsort(areas)[::-1]:
        mask, is_ignored = polygons[index]
        target[mask] = not is_ignored
        ignored[mask] = is_ignored
    return target, ignored, notes


# LISA++


LISA_IMAGE_FIELDS = ("img_path", "image_path", "img_pth")


def read_lisa_plus_plus(sources: Sequence[Path], images_dir: Path | None = None) -> Iterator[Item]:
    """LISA++ instance annotations (ReasonSeg-Inst): questions with a mask for each instance id.

    Masks are polygons in `points`, as {id: {"label name", "points"}}, or polygons or RLEs in
    `info`, as {id: mask}, in the layout that QuentinFitteRey/VLMSAM utils/cot_dataset.py reads.
    Instances of one image that several questions share, by id, become one annotation.
    """
    for entry in read_list_files(sources, "a LISA++ file"):
        if isinstance(entry, BadRecord):
            yield entry
            continue
        try:
            record, notes = _read_lisa_question(entry, images_dir)
        except RecordError as error:
            yield error.bad_record
            continue
        yield record
        yield from notes


def _read_lisa_question(entry: Entry, images_dir: Path | None) -> tuple[Record, list[Note]]:
    """A question with its instances, and notes where ids, answer and masks do not agree."""
    question = entry.text("English Question")
    answer = entry.get("English Answer")
    image_field = entry.first_present(LISA_IMAGE_FIELDS) or LISA_IMAGE_FIELDS[0]
    image = make_image(entry, [entry.text(image_field).strip()], images_dir)
    names = named_objects(answer) if isinstance(answer, str) else {}

    has_info = entry.get("info") is not None
    shapes = entry.child("info" if has_info else "points")
    if has_info and entry.get("ID") is None:
        ids = list(names or shapes.value)
    else:
        ids = [str(instance_id) for instance_id in entry.require("ID", list)]

    notes = []
    if names:
        stray_ids = [i for i in ids if shapes.get(i) is None and i not in names]
        if stray_ids:
            what = (
                f"ID {', '.join(stray_ids)} was left out, it has no points and is not in the answer"
            )
            notes.append(entry.note(what))
            ids = [i for i in ids if i not in stray_ids]
        if set(names) != set(ids):
            what = f"the answer names {', '.join(names)}, ID {', '.join(ids)} (used)"
            notes.append(entry.note(what))

    objects = []
    for instance_id in ids:
        if has_info:
            category = names.get(instance_id) or "object"
            target = make_visible_object(shapes, instance_id, image.size, category, instance_id)
        else:
            shape = shapes.child(instance_id)
            category = str(shape.get("label name") or "object")
            target = make_visible_object(shape, "points", image.size, category, instance_id)
        objects.append(target)
    query = QueryRecord(question, "modal", ids, {"task": "reasoning"}, answer)
    return Record(image, objects, [query]), notes


def named_objects(answer: str) -> dict[str, str]:
    """Ids and class names in an answer such as "instance id is 3, class name is cup; ...", in its
    order; brackets are optional, a name that is missing is empty."""
    pattern = (
        r"instance id is\s*\[?\s*(\w+)(?:\s*\]?\s*,?\s*(?:class|label) name is\s*\[?([^];,.\n]+))?"
    )
    pairs = re.findall(pattern, answer, re.IGNORECASE)
    return {number: name.strip() for number, name in pairs}


# MMR


def read_mmr(sources: Sequence[Path], images_dir: Path | None = None) -> Iterator[Item]:
    """MMR (jdg900/MMR): questions about objects and parts, several targets each.

    The `kind` of a query says whether its targets are objects, parts (category `object:part`) or
    both. Of a training file (MMR_train.json, or any name with the word "train") a question is left
    out if its text answer is not empty and has another number of `{seg}` than it has answers, as in
    MMR's own loader; other files keep every question. That loader samples questions without their
    answers, so that the two can belong to different questions; here they stay together.
    """
    sizes: dict[int, Size] = {}
    for entry in read_list_files(sources, "an MMR file"):
        if isinstance(entry, BadRecord):
            yield entry
            continue
        try:
            image_id = entry.require("image_id", int)
            file_name = entry.text("file_name")
            size = entry.size()
            if sizes.get(image_id, size) != size:
                problem = f"image {image_id} has another size before"
                raise entry.error(problem, "give each image its own id")
            image = make_image(entry, [file_name], images_dir, image_id, size)
            questions = _mmr_questions(entry)
        except RecordError as error:
            yield error.bad_record
            continue
        sizes[image_id] = size
        yield Record(image)

        is_training = "train" in entry.path.stem.split("_")
        for question in questions:
            try:
                yield _read_mmr_question(question, image, is_training)
            except RecordError as error:
                yield error.bad_record


def _mmr_questions(image: Entry) -> list[Entry]:
    """The questions of an image with their answers, from its three parallel lists."""
    questions = image.require("questions", list)
    answers = image.require("answers", list)
    texts: list[Any] = [None] * len(questions)
    if image.get("text_answers"):
        texts = image.require("text_answers", list)
    if not len(questions) == len(answers) == len(texts):
        problem = (
            f"it has {len(questions)} questions, {len(answers)} answers "
            f"and {len(texts)} text answers"
        )
        raise image.error(problem, "give a whole MMR file")
    entries = []
    for index in range(len(questions)):
        fields = {"question": questions[index], "answers": answers[index], "text": texts[index]}
        entries.append(Entry(image.path, f"{image.name}, question {index}", fields))
    return entries


def _read_mmr_question(question: Entry, image: ImageRecord, is_training: bool) -> Record | Note:
    """A question with its answers, or a note if MMR's own loader would leave it out."""
    text = question.get("text")
    answers = question.children("answers")
    if is_training and text and str(text).count("{seg}") != len(answers):
        return question.note("left out, its text answer has another number of {seg} than answers")

    categories = [answer.require("category_name", str) for answer in answers]
    objects = []
    for answer, category in zip(answers, categories, strict=True):
        # Answers have no id of their own: the same mask of the same class is the same object.
        key = category, repr(answer.get("segmentation"))
        objects.append(make_visible_object(answer, "segmentation", image.size, category, key))

    are_parts = {":" in category for category in categories}
    if len(are_parts) > 1:
        level = "mixed"
    else:
        level = "part" if True in are_parts else "object"
    kind = {"task": "reasoning", "level": level}
    targets = [record.key for record in objects]
    return Record(
        image, objects, [QueryRecord(question.text("question"), "modal", targets, kind, text)]
    )
