"""Reads LISA++'s instance annotations (ReasonSeg-Inst): one flat list of questions with polygons for every instance id.

Instances of one image that several questions share, by id, become one annotation. Only the visible mask is known.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from r2sm_jax.data.records import bad_record
from r2sm_jax.errors import InputError, load_json
from r2sm_jax.tools.readers.conversion import Conversion, draw, find_image, need, need_name

NAMED_ID = re.compile(r"instance id is\s*\[?\s*(\w+)", re.IGNORECASE)


def read_lisa_plus_plus(sources: Sequence[Path], images_dir: Path | None = None) -> Conversion:
    """Reads LISA++ files into records with modal queries; images are looked for beside the file by default.

    Raises InputError for anything that is not right.
    """
    found = Conversion()
    image_ids: dict[Path, tuple[int, int, int]] = {}
    instances: dict[tuple[int, str], int] = {}
    for path in sources:
        listed = load_json(path, "a LISA++ file")
        if not isinstance(listed, list):
            raise InputError(f"{path}: this is no LISA++ file (not a list of questions); give one")
        for index, record in enumerate(listed):
            where = f"[{index}]"
            question = need(path, where, record, "English Question", str)
            answer = need(path, where, record, "English Answer", str)
            points = need(path, where, record, "points", dict)
            ids = [str(number) for number in need(path, where, record, "ID", list)]
            if not question.strip():
                raise bad_record(path, where, "the question is empty", "write one")
            image = find_image(path, where, images_dir or path.parent, need_name(path, where, record, "img_path"))
            if image not in image_ids:
                image_ids[image] = found.add_image(image)
                found.images[-1]["file_name"] = record["img_path"]
            number, *size = image_ids[image]
            named = NAMED_ID.findall(answer)
            if named and set(named) != set(ids):
                found.notes.append(f"{path}: {where}: the answer names {', '.join(named)}, ID {', '.join(ids)} (used)")
            for key in ids:
                if (number, key) not in instances:
                    shape = need(path, where, points, key, dict)
                    rings = [
                        [x for point in ring if isinstance(point, list) for x in point]
                        for ring in need(path, where, shape, "points", list)
                        if isinstance(ring, list)
                    ]
                    name = need(path, where, shape, "label name", str)
                    modal = draw(path, where, rings, size[0], size[1])
                    instances[(number, key)] = found.add_annotation(number, name, modal=modal, amodal=None)
            meant = [instances[(number, key)] for key in dict.fromkeys(ids)]
            found.add_query(number, question, "modal", meant, kind={"task": "reasoning"}, answer=answer)
    return found
