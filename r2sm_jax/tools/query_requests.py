"""Requests for a vision-language model to write queries about the images of a dataset file.

One line of JSON for an image and mask type, in the form of the OpenAI-compatible batch interfaces.
`query_answers.py` reads what comes back.
"""

import base64
import io
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from PIL import Image
from tyro.conf import Positional

from r2sm_jax.data import masks
from r2sm_jax.data.images import open_image
from r2sm_jax.data.polygons import outline
from r2sm_jax.data.records import read_records
from r2sm_jax.data.samples import Instance, category_names, group_by_image, image_folders, read_instances
from r2sm_jax.errors import InputError, refuse_overwrite
from r2sm_jax.queries.objects import HIDDEN
from r2sm_jax.query import MaskType
from r2sm_jax.tools.query_prompts import system_prompt, user_prompt

MASK_TYPES: tuple[MaskType, ...] = ("modal", "amodal")


def requests(
    dataset: Positional[Path],
    /,
    out: Path,
    images: Path | None = None,
    image: Literal["reference", "embed"] = "reference",
    model: str | None = None,
    queries: int = 5,
    resume: bool = False,
    overwrite: bool = False,
) -> None:
    """Writes requests for queries to a vision-language model: one line for each image and mask type.

    Send the lines to a batch interface, or to any chat model, and give the answers to `queries parse`.

    Args:
        dataset: The dataset file.
        out: The JSON Lines file to write, such as requests.jsonl.
        images: Folder of the images to embed; without it they are looked for beside the dataset file.
        image: Name the image by its file name, or embed it as a JPEG in base64.
        model: Name of the model to put into every request; without it the field is left out.
        queries: How many questions to ask for in a request.
        resume: Keep the lines of an unfinished or older file and add the requests that it lacks.
        overwrite: Replace the file if it exists.
    """
    if queries < 1:
        raise InputError("queries requests: --queries must be 1 or more")
    if resume and overwrite:
        raise InputError("queries requests: --resume keeps the file and --overwrite replaces it; give one of them")
    if images is not None and image == "reference":
        raise InputError("queries requests: --images is read only to embed images; add --image embed or leave it out")
    if out.resolve() == dataset.resolve():
        raise InputError(f"--out {out}: this is the dataset file itself; give another name")
    refuse_overwrite(out, overwrite or resume)
    records = read_records(dataset)
    folders = image_folders(dataset, images) if image == "embed" else None
    part = out.with_name(out.name + ".part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        there = _start_from(out, part) if resume else set()
        written = dict.fromkeys(MASK_TYPES, 0)
        with part.open("ab" if resume else "wb") as file:
            for mask_type, request in _requests(dataset, records, folders, queries, model, there):
                file.write(json.dumps(request, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
                written[mask_type] += 1
        part.replace(out)
    except OSError as error:
        raise InputError(f"{out}: cannot write there ({error.strerror}); give another path") from error
    kept = f", {len(there)} were there" if resume else ""
    print(f"wrote {out}: {sum(written.values())} requests ({written['modal']} modal, {written['amodal']} amodal){kept}")


def request_id(image_id: int, mask_type: MaskType) -> str:
    """The `custom_id` of a request, such as "img12-amodal"."""
    return f"img{image_id}-{mask_type}"


def askable(annotation: Mapping[str, Any], mask_type: MaskType) -> bool:
    """Whether queries of a mask type may ask for an annotation: it is not ignored and the mask is known."""
    return not annotation.get("ignore") and (mask_type == "modal" or annotation.get("segmentation") is not None)


def _requests(
    path: Path,
    records: Mapping[str, Any],
    folders: tuple[Path, ...] | None,
    count: int,
    model: str | None,
    there: set[str],
) -> Iterator[tuple[MaskType, dict[str, Any]]]:
    """The requests that are not there yet, with the masks of one image in memory at a time."""
    names, by_image = category_names(records), group_by_image(records, "annotations")
    for image in records["images"]:
        missing: list[MaskType] = [t for t in MASK_TYPES if request_id(image["id"], t) not in there]
        if not missing:
            continue
        annotations = [a for a in by_image[image["id"]] if askable(a, "modal")]
        instances = read_instances(path, image, annotations, names)
        url = ""
        for mask_type in missing:
            table = "\n".join(_rows(instances, mask_type))
            if not table:
                continue
            url = url or (image["file_name"] if folders is None else _embedded(path, image, folders))
            content = [
                {"type": "text", "text": user_prompt(image["width"], image["height"], table, count)},
                {"type": "image_url", "image_url": {"url": url}},
            ]
            messages = [
                {"role": "system", "content": system_prompt(mask_type, count)},
                {"role": "user", "content": content},
            ]
            body = ({} if model is None else {"model": model}) | {"messages": messages}
            custom_id = request_id(image["id"], mask_type)
            yield mask_type, {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def _rows(instances: list[Instance], mask_type: MaskType) -> Iterator[str]:
    """What the model is told of each instance that has pixels in its mask of this type, one line of JSON."""
    for instance in instances:
        mask = instance.modal if mask_type == "modal" else instance.amodal
        if mask is None or not mask.any():
            continue
        occluded = None
        if instance.amodal is not None:
            occluded = masks.area(instance.modal) <= (1 - HIDDEN) * masks.area(instance.amodal)
        row = {"id": instance.id, "class_name": instance.category, "box": masks.coco_box(mask)}
        yield json.dumps(row | {"polygon": outline(mask), "is_occluded": occluded}, ensure_ascii=False)


def _embedded(path: Path, image: Mapping[str, Any], folders: tuple[Path, ...]) -> str:
    """An image as a data URL: upright, as it was annotated, and always as a JPEG.

    Raises InputError for an image that is missing, damaged or not of the stated size.
    """
    file = next((folder / image["file_name"] for folder in folders if (folder / image["file_name"]).is_file()), None)
    if file is None:
        places = " or ".join(map(str, folders))
        raise InputError(f"{path}: image {image['file_name']} is not in {places}; give its folder with --images DIR")
    pixels = open_image(file)
    if pixels.shape[:2] != (image["height"], image["width"]):
        raise InputError(
            f"{file}: the image is {pixels.shape[0]} x {pixels.shape[1]} but {path} says "
            f"{image['height']} x {image['width']}; give the image that was annotated"
        )
    jpeg = io.BytesIO()
    Image.fromarray(pixels).save(jpeg, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(jpeg.getvalue()).decode("ascii")


def _start_from(out: Path, part: Path) -> set[str]:
    """Makes `part` the whole lines of `out`, or else of what an interrupted run left there; gives their ids.

    A last line that was cut short is dropped. Raises InputError for a line that is no request.
    """
    if out.exists():
        shutil.copyfile(out, part)
    if not part.exists():
        return set()
    found: set[str] = set()
    whole = 0
    with part.open("rb+") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                found.add(json.loads(line)["custom_id"])
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                remedy = "take the line out or write the file anew with --overwrite"
                raise InputError(f"{out}: line {number} is no request; {remedy}") from error
            whole += len(line)
        file.truncate(whole)
    return found
