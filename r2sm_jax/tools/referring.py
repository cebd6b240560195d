"""Reads referring and reasoning segmentation, with visible masks only: RefCOCO, gRefCOCO, ReasonSeg, LISA++, MMR."""

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from r2sm_jax.errors import InputError
from r2sm_jax.tools.answers import named_ids
from r2sm_jax.tools.conversion import Conversion, Entry, json_files, names_of_image, read_list, read_object


def read_refcoco(refs: Path, instances: Path, *, split: str, images_dir: Path | None = None) -> Conversion:
    """Reads one split of RefCOCO, RefCOCO+, RefCOCOg (`refs(*).p`) or gRefCOCO (`grefs(*).json`).

    The layout is that of lichengunc/refer refer.py; in gRefCOCO `ann_id` is a list, `[-1]` for no target. `instances`
    is COCO's instances.json; only images and objects that the split uses are kept. Raises InputError for files that do
    not fit the format, and for a pickle that holds more than plain data.
    """
    found = Conversion(images_dir)
    listed = list(_read_pickle(refs) if refs.suffix == ".p" else read_list(refs, "refs(...).p or grefs(...).json"))
    splits = sorted({str(ref.get("split")) for ref in listed})
    if split not in splits:
        raise InputError(f"{refs}: there is no split {split!r}; --split is one of {', '.join(splits)}")
    coco = read_object(instances, "COCO's instances.json")
    images, annotations, categories = (
        {entry.need("id", int): entry for entry in coco.entries(key, name)}
        for key, name in (("images", "image"), ("annotations", "annotation"), ("categories", "category"))
    )

    def look_up(name: str, entries: Mapping[int, Entry], number: Any, source: Entry) -> Entry:
        if isinstance(number, bool) or number not in entries:
            raise source.error(f"{name} {number!r} is not in {instances}", "give the instances that belong to it")
        return entries[number]

    for ref in listed:
        if ref.need("split", str) != split:
            continue
        number = ref.need("image_id", int)
        if number not in found.sizes:
            image = look_up("image", images, number, ref)
            found.add_image(image, [image.file_name("file_name")], number, image.size())
        targets, meant = ref.need("ann_id", int, list), []
        targets = targets if isinstance(targets, list) else [targets]
        for target in targets if targets != [-1] else []:
            annotation = look_up("annotation", annotations, target, ref)
            category = look_up("category", categories, annotation.need("category_id", int), annotation)
            name = category.need("name", str)
            meant.append(found.add_object(number, name, annotation, modal="segmentation", key=target))
        for sentence in ref.entries("sentences"):
            if sentence.need("sent", str).strip():
                found.add_query(number, sentence.text("sent"), "modal", meant, task="referring")
    return found


class _PlainData(pickle.Unpickler):
    """An unpickler that knows no classes: reading a pickle can run code, and here nothing can run."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")


def _read_pickle(path: Path) -> Iterator[Entry]:
    try:
        listed = _PlainData(io.BytesIO(path.read_bytes())).load()
    except OSError as error:
        raise InputError(f"{path}: cannot read the file ({error.strerror}); check the path") from error
    except Exception as error:  # damaged pickles raise nearly anything
        raise InputError(
            f"{path}: the pickle holds more than plain data or is damaged ({error}); it is not read, since pickles "
            "can run code; write it again as JSON (a list of refs) with a .json name"
        ) from error
    if not isinstance(listed, list):
        raise InputError(f"{path}: this is not a list of refs; give refs(...).p")
    yield from (Entry(path, f"[{index}]", ref) for index, ref in enumerate(listed))


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
    answers = {}
    for entry in read_list(explanatory, "ReasonSeg's explanatory/train.json") if explanatory else ():
        answers[entry.need("image", str), entry.need("query", str)] = entry.need("outputs", str)
    for path in json_files(sources):
        file = read_object(path, "a ReasonSeg annotation")
        number = found.add_image(file, names_of_image(path))
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
    for path in sources:
        for entry in read_list(path, "a LISA++ file"):
            question, answer = entry.text("English Question"), entry.need("English Answer", str)
            number = found.add_image(entry, [entry.file_name("img_path")])
            ids = [str(instance_id) for instance_id in entry.need("ID", list)]
            named = named_ids(answer)
            if named and set(named) != set(ids):
                found.note(entry, f"the answer names {', '.join(named)}, ID {', '.join(ids)} (used)")
            points = entry.entry("points")
            meant = []
            for instance_id in ids:
                shape = points.entry(instance_id)
                name = shape.need("label name", str)
                meant.append(found.add_object(number, name, shape, modal="points", key=instance_id))
            found.add_query(number, question, "modal", meant, answer, task="reasoning")
    return found


def read_mmr(sources: Sequence[Path], images_dir: Path | None = None) -> Conversion:
    """Reads MMR (jdg900/MMR): lists of images, each with questions and with the annotations that answer them.

    The `kind` of a query says whether objects, parts (category `object:part`) or both are meant. A question whose text
    answer has another number of `{seg}` than it has answers is left out, as in MMR's own loader. That loader samples
    questions without their answers, so that the two can belong to different questions; here they stay together. Raises
    InputError for files that do not fit the format.
    """
    found = Conversion(images_dir)
    for path in sources:
        for image in read_list(path, "an MMR file"):
            number = found.add_image(image, [image.file_name("file_name")], image.need("image_id", int), image.size())
            for question in _mmr_questions(image):
                text, targets, meant = question.get("text"), question.entries("answers"), []
                if isinstance(text, str) and text.count("{seg}") != len(targets):
                    found.skip(question, "its text answer has another number of {seg} than answers")
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
