"""Reads questions with the objects that answer them: RefCOCO, gRefCOCO, ReasonSeg, LISA++, MMR, and R2SM's queries.

AmodalReasonSeg and R2SM have not published how their files are laid out, so the names of the fields are settings.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import is_id, read_records
from r2sm_jax.errors import InputError, load_json
from r2sm_jax.query import MaskType
from r2sm_jax.tools.convert import Conversion, Files, names_of_image
from r2sm_jax.tools.entries import Entry, Size, draw_polygon


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


def read_refcoco(files: Files, instances: Path, split: str = "train") -> Conversion:
    """RefCOCO, RefCOCO+ and RefCOCOg (refs(...).p, plain data only), gRefCOCO (grefs(...).json); visible masks.

    The layout is that of lichengunc/refer refer.py; in gRefCOCO `ann_id` is a list, `[-1]` for no target. Only images
    and objects that the split uses are kept.

    Args:
        instances: COCO's instances.json.
        split: The split to take.
    """
    found = Conversion(files.images, files.max_bad)
    refs = list(found.read_lists(files.sources, "refs(...).p or grefs(...).json"))
    splits = sorted({str(ref.get("split")) for ref in refs})
    if not any(_in_split(name, split) for name in splits):
        raise InputError(
            f"{files.sources[0]}: there is no split {split!r}; --split is one of {', '.join(splits)}"
        )
    coco = Entry(instances, "", load_json(instances, "COCO's instances.json"))
    images, annotations = (
        found.by_id(coco, "images", "image"),
        found.by_id(coco, "annotations", "annotation"),
    )
    categories = found.by_id(coco, "categories", "category")
    for ref in refs:
        if not _in_split(ref.get("split"), split) and isinstance(ref.get("split"), str):
            continue
        with found.record():
            ref.need("split", str)
            number, targets, meant = ref.need("image_id", int), ref.need("ann_id", int, list), []
            if number not in found.images:
                image = ref.refer("image_id", images)
                found.add_image(image, [image.text("file_name")], number, image.size())
            targets = targets if isinstance(targets, list) else [targets]
            for target in targets if targets != [-1] else []:
                annotation = ref.refer("ann_id", annotations, target)
                if annotation.get("image_id") not in (None, number):
                    raise ref.error(
                        f"annotation {target} is not of its image",
                        "give files that belong together",
                    )
                name = annotation.refer("category_id", categories).need("name", str)
                meant.append(
                    found.add_object(number, name, annotation, modal="segmentation", key=target)
                )
            for sentence in ref.entries("sentences"):
                if sentence.need("sent", str).strip():
                    found.add_query(number, sentence.text("sent"), "modal", meant, task="referring")
    return found.finish()


def _in_split(name: Any, wanted: str) -> bool:
    """Whether the split of a ref is the wanted one. As in refer.py "test" means testA and testB too, and "testA" every
    split of the tests with an A in its name."""
    if not isinstance(name, str) or not name.startswith("test") or not wanted.startswith("test"):
        return name == wanted
    return name == wanted or wanted == "test" or (len(wanted) == 5 and wanted[-1] in name[4:])


def read_reasonseg(files: Files, explanatory: Path | None = None) -> Conversion:
    """ReasonSeg: X.json beside X.jpg; ignore regions are kept as such; visible masks.

    The layout and the masks are those of dvlab-research/LISA utils/data_processing.py. Polygons with "ignore" in their
    label are left out of loss and metrics, those labelled "flag" are not used, all others are the answer. Points are
    cut to whole pixels, the outline belongs to the mask (`draw_polygon`), and polygons are painted in descending area,
    so that a smaller one wins where two overlap.

    Args:
        explanatory: explanatory/train.json, for textual answers.
    """
    found = Conversion(files.images, files.max_bad)
    explained = (
        found.read_lists([explanatory], "ReasonSeg's explanatory/train.json") if explanatory else ()
    )
    answers = {
        (e.need("image", str), e.need("query", str)): e.need("outputs", str) for e in explained
    }
    for file in found.read_folders(files.sources, "a ReasonSeg annotation"):
        with found.record():
            number = found.add_image(file, names_of_image(file.path))
            target, ignored = _paint(found, file, found.size(number))
            ids = [found.add_annotation(number, "target", target)] if target.any() else []
            if ignored.any():
                found.add_annotation(number, "ignored", ignored, ignore=True)
            task = "reasoning" if file.get("is_sentence") else "referring"
            for index, text in enumerate(file.need("text", list)):
                question = Entry(file.path, f"text[{index}]", {"query": text}).text("query")
                answer = answers.get((found.images[number]["file_name"], question))
                found.add_query(number, question, "modal", ids, answer, task=task)
    return found.finish()


def _paint(found: Conversion, file: Entry, size: Size) -> tuple[np.ndarray, np.ndarray]:
    """The masks `[H W]` of the target and of the ignored region."""
    polygons: list[tuple[int, bool, list]] = []
    for shape in file.entries("shapes"):
        label, points = shape.need("label", str).lower(), shape.need("points", list)
        if label == "flag":
            continue
        if not points:
            found.note(shape, "left out, it has no points")
            continue
        try:
            polygons.append((masks.area(draw_polygon(points, size)), "ignore" in label, points))
        except ValueError as error:
            raise shape.error(f"its points cannot be used ({error})", "correct them") from error
    target, ignored = np.zeros(size, bool), np.zeros(size, bool)
    # As the official code sorts, also those of one area.
    for index in np.argsort([area for area, _, _ in polygons])[::-1]:
        _, is_ignored, points = polygons[index]
        mask = draw_polygon(points, size)
        target[mask], ignored[mask] = not is_ignored, is_ignored
    return target, ignored


def read_lisa_plus_plus(files: Files) -> Conversion:
    """LISA++ instance annotations (ReasonSeg-Inst): questions with polygons for each instance id; visible masks.

    Instances of one image that several questions share, by id, become one annotation.
    """
    found = Conversion(files.images, files.max_bad)
    for entry in found.read_lists(files.sources, "a LISA++ file"):
        with found.record():
            question, answer = entry.text("English Question"), entry.get("English Answer")
            number = found.add_image(entry, [entry.text("img_path").strip()])
            points, named = (
                entry.entry("points"),
                named_ids(answer) if isinstance(answer, str) else [],
            )
            ids = [str(instance_id) for instance_id in entry.need("ID", list)]
            if lost := [i for i in ids if points.get(i) is None and named and i not in named]:
                found.note(
                    entry,
                    f"ID {', '.join(lost)} was left out, it has no points and is not in the answer",
                )
                ids = [i for i in ids if i not in lost]
            if named and set(named) != set(ids):
                found.note(
                    entry, f"the answer names {', '.join(named)}, ID {', '.join(ids)} (used)"
                )
            meant = []
            for instance_id in ids:
                shape = points.entry(instance_id)
                name = str(shape.get("label name") or "object")
                meant.append(found.add_object(number, name, shape, modal="points", key=instance_id))
            found.add_query(number, question, "modal", meant, answer, task="reasoning")
    return found.finish()


def named_ids(answer: str) -> list[str]:
    """The ids in an answer of the form "instance id is 3, class name is cup; ..."; brackets and tags are optional."""
    return re.findall(r"instance id is\s*\[?\s*(\w+)", answer, re.IGNORECASE)


def _read_ids(entry: Entry, answer: str) -> list[int]:
    """The ids in an answer as R2SM writes it; none where it names no instance. Raises RecordError where it names some
    in another form."""
    ids, mentioned = named_ids(answer), re.findall(r"instance id", answer, re.IGNORECASE)
    several = re.search(r"instance id is\s*\[?\s*\w+\]?\s*(,|and)\s*\d", answer, re.IGNORECASE)
    if several or len(ids) != len(mentioned) or not all(map(str.isdecimal, ids)):
        raise entry.error(
            "the ids in its answer cannot be read", "write 'instance id is [3]' for each of them"
        )
    return list(map(int, ids))


def read_mmr(files: Files) -> Conversion:
    """MMR (jdg900/MMR): questions about objects and parts, several targets each; visible masks.

    The `kind` of a query says whether objects, parts (category `object:part`) or both are meant. Of a training file
    (MMR_train.json, or any name with the word "train") a question is left out whose text answer is not empty and has
    another number of `{seg}` than it has answers, as in MMR's own loader; other files keep every question. That loader
    samples questions without their answers, so that the two can belong to different questions; here they stay together.
    """
    found = Conversion(files.images, files.max_bad)
    for image in found.read_lists(files.sources, "an MMR file"):
        questions: list[Entry] = []
        with found.record():
            number, name, size = image.need("image_id", int), image.text("file_name"), image.size()
            if number not in found.images:
                found.add_image(image, [name], number, size)
            elif size != found.size(number):
                raise image.error(
                    f"image {number} has another size before", "give each image its own id"
                )
            questions = list(_mmr_questions(image))
        for question in questions:
            with found.record():
                text, targets, meant = question.get("text"), question.entries("answers"), []
                if (
                    "train" in image.path.stem.split("_")
                    and text
                    and str(text).count("{seg}") != len(targets)
                ):
                    found.note(
                        question,
                        "left out, its text answer has another number of {seg} than answers",
                    )
                    continue
                names = [target.need("category_name", str) for target in targets]
                for target, name in zip(targets, names, strict=True):
                    key = name, repr(target.get("segmentation"))
                    meant.append(
                        found.add_object(number, name, target, modal="segmentation", key=key)
                    )
                parts = {":" in name for name in names}
                level = "mixed" if len(parts) > 1 else "part" if True in parts else "object"
                found.add_query(
                    number,
                    question.text("question"),
                    "modal",
                    meant,
                    text,
                    task="reasoning",
                    level=level,
                )
    return found.finish()


def _mmr_questions(image: Entry) -> Iterator[Entry]:
    """The questions of an image with their answers, from its three parallel lists."""
    questions, answers = image.need("questions", list), image.need("answers", list)
    texts = (
        image.need("text_answers", list) if image.get("text_answers") else [None] * len(questions)
    )
    if not len(questions) == len(answers) == len(texts):
        lengths = (
            f"{len(questions)} questions, {len(answers)} answers and {len(texts)} text answers"
        )
        raise image.error(f"it has {lengths}", "give a whole MMR file")
    for index, (question, targets, text) in enumerate(zip(questions, answers, texts, strict=True)):
        fields = {"question": question, "answers": targets, "text": text}
        yield Entry(image.path, f"{image.place}, question {index}", fields)


def read_amodal_qa(files: Files, fields: AmodalQAFields) -> Conversion:
    """Questions with a textual answer and visible and amodal masks, as AmodalReasonSeg describes its own.

    AmodalReasonSeg (arXiv 2503.10225) has not released its files. Queries are amodal. Masks are RLE or polygons;
    objects of one image with the same masks are one annotation.
    """
    found, drawn = (
        Conversion(files.images, files.max_bad),
        {"modal": fields.visible, "amodal": fields.amodal},
    )
    for entry in found.read_lists(files.sources, "a list of questions"):
        with found.record():
            number = found.add_image(entry, [entry.text(fields.image)])
            meant = []
            for target in entry.entries(fields.objects):
                key = repr([target.need(mask, dict, list) for mask in drawn.values()])
                name = str(target.get(fields.name) or "object")
                meant.append(found.add_object(number, name, target, **drawn, key=key))
            answer = entry.get(fields.answer)
            found.add_query(
                number, entry.text(fields.question), "amodal", meant, answer, task="reasoning"
            )
    return found.finish()


def read_r2sm(
    files: Files, over: Path, fields: R2SMFields, mask_type: MaskType | None = None
) -> Conversion:
    """R2SM's text queries, joined to the dataset file that was converted from their images' annotations.

    PATH are files of queries: a JSON list, or one JSON object a line (.jsonl). `--images` changes nothing here.
    Instances are given as ids or named in the answer. Their ids are those of the annotations' `source_id` where there
    is one, else of the annotations.

    Args:
        over: The dataset file with the images and annotations; its own queries are left out.
        fields: Names of the fields.
        mask_type: For files that hold one mask type only.
    """
    records = read_records(over)
    about = records.get("info")
    records["info"] = (about if isinstance(about, dict) else {}) | {
        "queries": ", ".join(p.name for p in files.sources)
    }
    images: dict[Any, int | None] = {}
    for image in records["images"]:  # the name alone means an image where only one has it
        name = Path(image["file_name"]).name
        images[name] = None if name in images else image["id"]
    images |= {
        image[key]: image["id"] for image in records["images"] for key in ("id", "file_name")
    }
    named = [
        (a, a["source_id"] if is_id(a.get("source_id")) else a["id"])
        for a in records["annotations"]
    ]
    ids = {(a["image_id"], number): a["id"] for a, number in named}
    found = Conversion(max_bad=files.max_bad, over=records)
    for entry in found.read_lists(
        files.sources, "a list of queries, or one JSON object a line (.jsonl)"
    ):
        with found.record():
            name = entry.need(fields.image, int, str)
            image_id = images.get(
                name, images.get(Path(name).name) if isinstance(name, str) else None
            )
            if image_id is None:
                problem = f"image {name!r} is not in the dataset, or several have this name"
                raise entry.error(
                    problem, "convert the images first, and name it as the dataset does"
                )
            answer, listed = entry.get(fields.answer), entry.get(fields.instances)
            if listed is None and isinstance(answer, str):
                listed = _read_ids(entry, answer)
            if not isinstance(listed, list):
                raise entry.error(
                    f"it has neither {fields.instances} nor {fields.answer}", "name its instances"
                )
            for number in listed:
                if not is_id(number) or (image_id, number) not in ids:
                    raise entry.error(
                        f"image {name!r} has no instance {number!r}", "correct the id"
                    )
            wanted = mask_type or entry.need(fields.mask_type, str)
            if wanted not in ("modal", "amodal"):
                raise entry.error(f"its mask type is {wanted!r}", 'write "modal" or "amodal"')
            meant = [ids[image_id, number] for number in listed]
            found.add_query(
                image_id, entry.text(fields.text), wanted, meant, answer, task="reasoning"
            )
    return found.finish()
