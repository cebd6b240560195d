"""Reads RefCOCO, RefCOCO+, RefCOCOg (`refs(*).p`) and gRefCOCO (`grefs(*).json`) with COCO's instances.json.

The refs of the first three are Python pickles, which can run code when read; here only plain data (lists, dicts,
strings, numbers) is accepted. Only visible masks are known. Layout: lichengunc/refer refer.py; in gRefCOCO `ann_id` is
a list, `[-1]` for no target.
"""

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from r2sm_jax.data.records import bad_record, is_id
from r2sm_jax.errors import InputError, load_json
from r2sm_jax.tools.readers.conversion import Conversion, draw, find_image, need, need_name, need_size


def read_refcoco(refs: Path, instances: Path, *, split: str, images_dir: Path | None = None) -> Conversion:
    """Reads one split of a refs file into records with modal queries; only images and objects that it uses are kept.

    Raises InputError for anything that is not right, and for a pickle that holds more than plain data.
    """
    listed = load_json(refs, "gRefCOCO's refs") if refs.suffix == ".json" else _load_pickle(refs)
    if not isinstance(listed, list):
        raise InputError(f"{refs}: this is no list of refs; give refs(...).p or grefs(...).json")
    splits = sorted({str(r.get("split")) for r in listed if isinstance(r, Mapping)})
    if split not in splits:
        raise InputError(f"{refs}: there is no split {split!r}; --split is one of {', '.join(splits)}")
    coco = load_json(instances, "COCO's instances.json")
    images, annotations, names = (
        {
            need(instances, f"{key}[{i}]", x, "id", int): x
            for i, x in enumerate(need(instances, "the file", coco, key, list))
        }
        for key in ("images", "annotations", "categories")
    )
    found = Conversion()
    sizes: dict[int, tuple[int, int]] = {}
    ids: dict[int, int] = {}
    for index, ref in enumerate(listed):
        where = f"ref {index}"
        if need(refs, where, ref, "split", str) != split:
            continue
        number = need(refs, where, ref, "image_id", int)
        if number not in images:
            raise bad_record(
                refs, where, f"image {number} is not in {instances}", "give the instances that belong to it"
            )
        if number not in sizes:
            image, at = images[number], f"image {number}"
            name = need_name(instances, at, image, "file_name")
            sizes[number] = need_size(instances, at, image)
            if images_dir is not None:
                found.image_paths[number] = find_image(instances, at, images_dir, name)
            height, width = sizes[number]
            found.images.append({"id": number, "file_name": name, "height": height, "width": width})
        meant = []
        for target in _targets(refs, where, ref):
            if target not in annotations:
                what = f"annotation {target} is not in {instances}"
                raise bad_record(refs, where, what, "give the instances that belong to it")
            if target not in ids:
                annotation, at = annotations[target], f"annotation {target}"
                category = names.get(need(instances, at, annotation, "category_id", int))
                modal = draw(instances, at, annotation.get("segmentation"), *sizes[number])
                name = need(instances, at, category, "name", str)
                ids[target] = found.add_annotation(number, name, modal=modal, amodal=None)
            meant.append(ids[target])
        for sentence in need(refs, where, ref, "sentences", list):
            text = need(refs, where, sentence, "sent", str)
            if text.strip():
                found.add_query(number, text, "modal", meant, kind={"task": "referring"})
    return found


def _targets(path: Path, where: str, ref: Mapping[str, Any]) -> Sequence[int]:
    targets = need(path, where, ref, "ann_id", (int, list))
    listed = targets if isinstance(targets, list) else [targets]
    for target in listed:
        if not is_id(target):
            raise bad_record(path, where, f"its ann_id {target!r} is no whole number", "correct the id")
    return [] if listed == [-1] else listed


class _PlainData(pickle.Unpickler):
    """An unpickler that knows no classes, so that nothing can run."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")


def _load_pickle(path: Path) -> Any:
    try:
        return _PlainData(io.BytesIO(path.read_bytes())).load()
    except OSError as error:
        raise InputError(f"{path}: cannot read the file ({error.strerror}); check the path") from error
    except Exception as error:  # damaged pickles raise nearly anything
        raise InputError(
            f"{path}: the pickle holds more than plain data or is damaged ({error}); it is not read, since pickles "
            "can run code; write it again as JSON (a list of refs) with a .json name"
        ) from error
