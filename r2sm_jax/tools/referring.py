"""Reads questions with the objects that answer them: RefCOCO, gRefCOCO, ReasonSeg, LISA++, MMR, and R2SM's queries.

AmodalReasonSeg and R2SM have not published how their files are laid out, so the names of the fields are settings.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from r2sm_jax.errors import InputError, load_json
from r2sm_jax.tools.conversion import Conversion, Entry, json_files, read_list


@dataclass(frozen=True)
class AmodalQAFields:
    """Names of the fields of a record, and of the objects in it."""

    image: str = "image"
    question: str = "question"
    answer: str = "answer"
    objects: str = "objects"
    name: str = "name"
    visible: str = "visible_mask"
    amodal: str = "amodal_mask"


@dataclass(frozen=True)
class R2SMFields:
    """Names of the fields of a query record."""

    image: str = "image_id"
    """Image id or file name."""
    text: str = "text"
    mask_type: str = "mask_type"
    instances: str = "instance_ids"
    """List of annotation ids; where it is missing the answer is read."""
    answer: str = "answer"


def read_refcoco(sources: Sequence[Path], instances: Path, *, split: str, images_dir: Path | None = None) -> Conversion:
    """Reads one split of RefCOCO, RefCOCO+, RefCOCOg (`refs(*).p`) or gRefCOCO (`grefs(*).json`).

    The layout is that of lichengunc/refer refer.py; in gRefCOCO `ann_id` is a list, `[-1]` for no target. `instances`
    is COCO's instances.json; only images and objects that the split uses are kept. Raises InputError for files that do
    not fit the format, and for a pickle that holds more than plain data.
    """
    found = Conversion(images_dir)
    refs = list(read_list(sources, "refs(...).p or grefs(...).json"))
    splits = sorted({str(ref.get("split")) for ref in refs})
    if split not in splits:
        raise InputError(f"{sources[0]}: there is no split {split!r}; --split is one of {', '.join(splits)}")
    coco = Entry(instances, "", load_json(instances, "COCO's instances.json"))
    known = {
        name: {entry.need("id", int): entry for entry in coco.entries(key, name)}
        for key, name in (("images", "image"), ("annotations", "annotation"), ("categories", "category"))
    }

    def look_up(name: str, number: Any, source: Entry) -> Entry:
        if type(number) is not int or number not in known[name]:
            raise source.error(f"{name} {number!r} is not in {instances}", "give the instances that belong to it")
        return known[name][number]

    for ref in refs:
        if ref.need("split", str) != split:
            continue
        number = ref.need("image_id", int)
        if number not in found.sizes:
            image = look_up("image", number, ref)
            found.add_image(image, image.text("file_name"), number, image.size())
        targets, meant = ref.need("ann_id", int, list), []
        targets = targets if isinstance(targets, list) else [targets]
        for target in targets if targets != [-1] else []:
            annotation = look_up("annotation", target, ref)
            name = look_up("category", annotation.get("category_id"), annotation).need("name", str)
            meant.append(found.add_object(number, name, annotation, modal="segmentation", key=target))
        for sentence in ref.entries("sentences"):
            if sentence.need("sent", str).strip():
                found.add_query(number, sentence.text("sent"), "modal", meant, task="referring")
    return found


def read_reasonseg(
    sources: Sequence[Path], images_dir: Path | None = None, explanatory: Path | None = None
) -> Conversion:
    """Reads ReasonSeg files X.json, with X.jpg beside them, or folders of them.

    The layout is that of dvlab-research/LISA utils/data_processing.py. Polygons labelled "target" are the answer, those
    with "ignore" in their label are left out of loss and metrics. They are painted in descending area, so that a
    smaller one wins where two overlap. `explanatory` is the file `explanatory/train.json` with textual answers. Raises
    InputError for files that do not fit the format.
    """
    found = Conversion(images_dir)
    explained = read_list([explanatory], "ReasonSeg's explanatory/train.json") if explanatory else ()
    answers = {(e.need("image", str), e.need("query", str)): e.need("outputs", str) for e in explained}
    for path in json_files(sources):
        file = Entry(path, "", load_json(path, "a ReasonSeg annotation"))
        number = found.add_image(file)
        target, ignored = _paint(file, found.sizes[number])
        ids = [found.add_annotation(number, "target", target)] if target.any() else []
        if ignored.any():
            found.add_annotation(number, "ignored", ignored, ignore=True)
        task = "reasoning" if file.get("is_sentence") else "referring"
        for index, text in enumerate(file.need("text", list)):
            question = Entry(path, f"text[{index}]", {"query": text}).text("query")
            answer = answers.get((found.images[-1]["file_name"], question))
            found.add_query(number, question, "modal", ids, answer, task=task)
    if not found.images:
        raise InputError(f"{', '.join(map(str, sources))}: there is no ReasonSeg annotation here; give its JSON files")
    return found


def _paint(file: Entry, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The masks `[H W]` of the target and of the ignored region."""
    drawn = []
    for shape in file.entries("shapes"):
        label = shape.need("label", str)
        if label != "flag":
            if label != "target" and "ignore" not in label:
                raise shape.error(f"its label {label!r} is neither target nor ignore", "correct it")
            polygon = Entry(shape.path, shape.place, {"points": [shape.need("points", list)]})
            drawn.append((label == "target", polygon.mask("points", size)))
    target, ignored = np.zeros(size, bool), np.zeros(size, bool)
    for is_target, mask in sorted(drawn, key=lambda pair: -int(pair[1].sum())):
        target[mask], ignored[mask] = is_target, not is_target
    return target, ignored


def read_lisa_plus_plus(sources: Sequence[Path], images_dir: Path | None = None) -> Conversion:
    """Reads LISA++'s instance annotations (ReasonSeg-Inst): lists of questions with polygons for each instance id.

    Instances of one image that several questions share, by id, become one annotation. Raises InputError for files that
    do not fit the format.
    """
    found = Conversion(images_dir)
    for entry in read_list(sources, "a LISA++ file"):
        question, answer = entry.text("English Question"), entry.need("English Answer", str)
        number = found.add_image(entry, entry.text("img_path"))
        ids = [str(instance_id) for instance_id in entry.need("ID", list)]
        named = named_ids(answer)
        if named and set(named) != set(ids):
            found.note(entry, f"the answer names {', '.join(named)}, ID {', '.join(ids)} (used)")
        points, meant = entry.entry("points"), []
        for instance_id in ids:
            shape = points.entry(instance_id)
            name = shape.need("label name", str)
            meant.append(found.add_object(number, name, shape, modal="points", key=instance_id))
        found.add_query(number, question, "modal", meant, answer, task="reasoning")
    return found


def named_ids(answer: str) -> list[str]:
    """The ids in an answer of the form "instance id is 3, class name is cup; ..."; brackets and tags are optional."""
    return re.findall(r"instance id is\s*\[?\s*(\w+)", answer, re.IGNORECASE)


def read_mmr(sources: Sequence[Path], images_dir: Path | None = None) -> Conversion:
    """Reads MMR (jdg900/MMR): lists of images, each with questions and with the annotations that answer them.

    The `kind` of a query says whether objects, parts (category `object:part`) or both are meant. A question whose text
    answer has another number of `{seg}` than it has answers is left out, as in MMR's own loader. That loader samples
    questions without their answers, so that the two can belong to different questions; here they stay together. Raises
    InputError for files that do not fit the format.
    """
    found = Conversion(images_dir)
    for image in read_list(sources, "an MMR file"):
        number = found.add_image(image, image.text("file_name"), image.need("image_id", int), image.size())
        for question in _mmr_questions(image):
            text, targets, meant = question.get("text"), question.entries("answers"), []
            if isinstance(text, str) and text.count("{seg}") != len(targets):
                found.note(question, "left out, its text answer has another number of {seg} than answers")
                continue
            names = [target.need("category_name", str) for target in targets]
            for target, name in zip(targets, names, strict=True):
                key = name, repr(target.get("segmentation"))
                meant.append(found.add_object(number, name, target, modal="segmentation", key=key))
            parts = {":" in name for name in names}
            level = "mixed" if len(parts) > 1 else "part" if True in parts else "object"
            found.add_query(number, question.text("question"), "modal", meant, text, task="reasoning", level=level)
    return found


def _mmr_questions(image: Entry) -> Iterator[Entry]:
    """The questions of an image with their answers, from its three parallel lists."""
    questions, answers = image.need("questions", list), image.need("answers", list)
    texts = image.need("text_answers", list) if image.get("text_answers") else [None] * len(questions)
    if not len(questions) == len(answers) == len(texts):
        lengths = f"{len(questions)} questions, {len(answers)} answers and {len(texts)} text answers"
        raise image.error(f"it has {lengths}", "give a whole MMR file")
    for index, (question, targets, text) in enumerate(zip(questions, answers, texts, strict=True)):
        fields = {"question": question, "answers": targets, "text": text}
        yield Entry(image.path, f"{image.place}, question {index}", fields)


def read_amodal_qa(sources: Sequence[Path], fields: AmodalQAFields, images_dir: Path | None = None) -> Conversion:
    """Reads lists of questions with a visible and an amodal mask for each object that answers them.

    AmodalReasonSeg (arXiv 2503.10225) describes such files, but they are not released. Queries are amodal. Masks are
    RLE or polygons; objects of one image with the same masks are one annotation. Raises InputError for files that do
    not fit the format.
    """
    found = Conversion(images_dir)
    for entry in read_list(sources, "a list of questions"):
        number = found.add_image(entry, entry.text(fields.image))
        meant = []
        for target in entry.entries(fields.objects):
            key = repr([target.need(mask, dict, list) for mask in (fields.visible, fields.amodal)])
            name = str(target.get(fields.name) or "object")
            meant.append(found.add_object(number, name, target, modal=fields.visible, amodal=fields.amodal, key=key))
        answer = entry.get(fields.answer)
        found.add_query(number, entry.text(fields.question), "amodal", meant, answer, task="reasoning")
    return found


def join_queries(
    path: Path, records: Mapping[str, Any], fields: R2SMFields, mask_type: str | None = None
) -> list[dict[str, Any]]:
    """R2SM's queries in `path` (JSON list or .jsonl) as records of the dataset `records`.

    `mask_type` is for files that hold one type only. Instances are given as ids or named in the answer. Their ids are
    those of the annotations' `source_id` where there is one, else of the annotations. Raises InputError for a query
    that does not fit the dataset.
    """
    images = {image["id"]: image["id"] for image in records["images"]}
    images |= {Path(image["file_name"]).name: image["id"] for image in records["images"]}
    ids = {(a["image_id"], a.get("source_id", a["id"])): a["id"] for a in records["annotations"]}
    found = Conversion()
    for entry in read_list([path], "a list of queries, or one JSON object a line (.jsonl)"):
        name = entry.need(fields.image, int, str)
        image_id = images.get(Path(name).name if isinstance(name, str) else name)
        if image_id is None:
            raise entry.error(f"image {name!r} is not in the dataset", "convert the images first")
        answer, listed = entry.get(fields.answer), entry.get(fields.instances)
        if listed is None and isinstance(answer, str):
            listed = [int(number) for number in named_ids(answer) if number.isdecimal()]
        if not isinstance(listed, list):
            raise entry.error(f"it has neither {fields.instances} nor {fields.answer}", "name its instances")
        for number in listed:
            if not isinstance(number, int) or (image_id, number) not in ids:
                raise entry.error(f"image {name!r} has no instance {number!r}", "correct the id")
        wanted = mask_type or entry.need(fields.mask_type, str)
        if wanted not in ("modal", "amodal"):
            raise entry.error(f"its mask type is {wanted!r}", 'write "modal" or "amodal"')
        meant = [ids[image_id, number] for number in listed]
        found.add_query(image_id, entry.text(fields.text), wanted, meant, answer, task="reasoning")
    return found.queries
