"""Reads MMR (jdg900/MMR): a list of images, each with questions, and for every question the annotations that answer it.

Masks are visible ones only; objects and parts are told apart by the category (`object:part`). The repository's own
loader samples questions without their answers, so that the two can belong to different questions; here they stay
together.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from r2sm_jax.errors import InputError, load_json
from r2sm_jax.tools.readers.conversion import Conversion, draw, find_image, need, need_name, need_size


def read_mmr(sources: Sequence[Path], images_dir: Path | None = None) -> Conversion:
    """Reads MMR files into records with modal queries, whose `kind` says whether objects, parts or both are meant.

    A question whose text answer has another number of `{seg}` than it has answers is left out, as in MMR's loader.
    Raises InputError for anything that is not right.
    """
    found = Conversion()
    seen: set[int] = set()
    left_out = 0
    for path in sources:
        listed = load_json(path, "an MMR file")
        if not isinstance(listed, list):
            raise InputError(f"{path}: this is no MMR file (not a list of images); give one")
        for index, image in enumerate(listed):
            where = f"[{index}]"
            number = need(path, where, image, "image_id", int)
            if number in seen:
                raise InputError(f"{path}: {where}: image {number} occurs twice; give each split its own run")
            seen.add(number)
            name = need_name(path, where, image, "file_name")
            size = need_size(path, where, image)
            if images_dir is not None:
                found.image_paths[number] = find_image(path, where, images_dir, name)
            found.images.append({"id": number, "file_name": name, "height": size[0], "width": size[1]})
            left_out += _read_questions(found, path, where, image, number, size)
    if left_out:
        found.notes.append(
            f"{left_out} questions left out: their text answer has another number of {{seg}} than answers"
        )
    return found


def _read_questions(
    found: Conversion, path: Path, where: str, image: Mapping[str, Any], number: int, size: tuple[int, int]
) -> int:
    questions = need(path, where, image, "questions", list)
    answers = need(path, where, image, "answers", list)
    texts = need(path, where, image, "text_answers", list) if image.get("text_answers") else [None] * len(questions)
    if not len(questions) == len(answers) == len(texts):
        lengths = f"{len(questions)} questions, {len(answers)} answers and {len(texts)} text answers"
        raise InputError(f"{path}: {where}: there are {lengths}; give a whole MMR file")
    ids: dict[str, int] = {}
    left_out = 0
    for question, targets, text in zip(questions, answers, texts, strict=True):
        if not isinstance(question, str) or not question.strip() or not isinstance(targets, list):
            raise InputError(f"{path}: {where}: a question is no text or its answers no list; give an MMR file")
        if isinstance(text, str) and text.count("{seg}") != len(targets):
            left_out += 1
            continue
        meant, parts = [], []
        for target in targets:
            name = need(path, where, target, "category_name", str)
            mask = target.get("segmentation")
            key = f"{name} {mask}"
            if key not in ids:
                ids[key] = found.add_annotation(number, name, modal=draw(path, where, mask, *size), amodal=None)
            meant.append(ids[key])
            parts.append(":" in name)
        level = "part" if all(parts) and parts else "mixed" if any(parts) else "object"
        kind = {"task": "reasoning", "level": level}
        found.add_query(number, question, "modal", list(dict.fromkeys(meant)), kind=kind, answer=text)
    return left_out
