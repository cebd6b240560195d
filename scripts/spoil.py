"""Correct files of every reader, and ways to spoil them; for `torture.py`."""

import copy
import json
import pickle
import random
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from r2sm_jax import evaluate
from r2sm_jax.data import masks
from r2sm_jax.tools import data

HEIGHT, WIDTH = 20, 30
IMAGES = [
    ("JPEG", "RGB"),
    ("JPEG", "L"),
    ("PNG", "RGB"),
    ("PNG", "RGBA"),
    ("PNG", "P"),
    ("PNG", "I;16"),
    ("WEBP", "RGB"),
    ("BMP", "RGB"),
    ("GIF", "P"),
    ("TIFF", "RGB"),
    ("TIFF", "F"),
]
"""Format and mode of the images that are spoilt."""
STRANGE: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    7,
    2**31,
    2**63,
    10**30,
    1.5,
    -0.5,
    float("nan"),
    float("inf"),
    "",
    " ",
    "\0",
    "\ud800",
    "é\n",
    "../../x",
    "/etc/passwd",
    "x" * 10_000,
    [],
    {},
    [[]],
    [None],
    [[1e300] * 6],
    [1, 2],
    "7",
    {"size": [2**31, 2**31], "counts": "0"},
    {"size": [HEIGHT, WIDTH], "counts": [HEIGHT * WIDTH + 1]},
    {"size": [HEIGHT, WIDTH], "counts": "\xff\x00"},
    {"size": [HEIGHT, WIDTH], "counts": [-5, 605]},
]


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Container and key of every value in a JSON tree."""
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    return [place for key, value in items for place in ((tree, key), *places(value))]


def spoil_tree(rng: random.Random, tree: Any) -> Any:
    """A copy of a JSON tree with up to three values replaced, left out, doubled or exchanged."""
    root = [copy.deepcopy(tree)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        container, key = rng.choice(places(root))
        way = rng.choice(("strange", "strange", "strange", "gone", "double", "other"))
        if way == "gone" and container is not root:
            del container[key]
        elif way == "double" and isinstance(container, list):
            container.append(copy.deepcopy(container[key]))
        else:
            other, other_key = rng.choice(places(root))
            container[key] = copy.deepcopy(
                other[other_key] if way == "other" else rng.choice(STRANGE)
            )
    return root[0]


def spoil_bytes(rng: random.Random, content: bytes) -> bytes:
    """The content cut short, with bytes changed, put in or left out, or in another encoding."""
    at, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    changed = bytearray(content)
    for _ in range(rng.choice((1, 2, 8, 64))):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    ways = [
        bytes(changed),
        bytes(changed),
        content[:at],
        content[:at] + content[end:],
        content[:end] + content[at:],
    ]
    ways += [content[:at] + rng.randbytes(rng.choice((1, 9))) + content[at:]]
    rare = [
        b"",
        b"\xef\xbb\xbf" + content,
        content.decode("latin-1").encode("utf-16"),
        b"[" * 100_000,
        content * 2,
    ]
    return rng.choice(rare if rng.random() < 0.05 else ways)


def spoil(rng: random.Random, content: Any) -> bytes:
    """A file that is spoilt: bytes, or a JSON tree."""
    if isinstance(content, bytes):
        return spoil_bytes(rng, content)
    if rng.random() < 0.3:
        return spoil_bytes(rng, json.dumps(content).encode())
    return json.dumps(spoil_tree(rng, content)).encode()


class Case(NamedTuple):
    """A correct file, its content (bytes or a JSON tree), and the command that reads it."""

    file: Path
    content: Any
    main: Callable[[], None]
    words: list[str]


def image_bytes(form: str, mode: str = "RGB") -> bytes:
    """A small image file."""
    pixels = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(content := BytesIO(), form)
    return content.getvalue()


def cases(folder: Path) -> dict[str, Case]:
    """A case for each reader. `folder` gets what they read beside their files, and `converted.json` of those that write
    a dataset file."""
    front, back = np.zeros((2, HEIGHT, WIDTH), bool)
    front[2:12, 2:12], back[6:18, 8:24] = True, True
    whole, seen = masks.encode(back), masks.encode(back & ~front)
    flat, size = [8, 6, 24, 6, 24, 18, 8, 18], {"height": HEIGHT, "width": WIDTH}
    ring = [flat[i : i + 2] for i in range(0, 8, 2)]
    both = {"image_id": 7, "category_id": 1, "iscrowd": 0, "occlude_rate": 0.2, "occl_depth": 1}
    objects = [
        both | {"id": 31, "segmentation": masks.encode(front)},
        both | {"id": 32, "segmentation": whole, "visible_mask": seen},
        both
        | {
            "id": 33,
            "segmentation": [flat],
            "visible_mask": {"size": [HEIGHT, WIDTH], "counts": [166, 12, 422]},
        },
    ]
    image, categories = {"id": 7, "file_name": "a.jpg", **size}, [{"id": 1, "name": "mug"}]
    coco = {"images": [image], "categories": categories, "annotations": objects}
    kins = coco | {"annotations": [entry | {"a_segm": whole, "i_segm": seen} for entry in objects]}
    query = {
        "id": 1,
        "image_id": 7,
        "text": "the red mug",
        "mask_type": "modal",
        "instance_ids": [32],
    }
    dataset = coco | {
        "queries": [query, query | {"id": 2, "mask_type": "amodal", "kind": {"hard": True}}]
    }
    region = {
        "segmentation": flat,
        "name": "Mug",
        "order": 1,
        "isStuff": 0,
        "visible_mask": seen,
        "occlude_rate": 0.2,
    }
    ref = {"split": "train", "image_id": 7, "sentences": [{"sent": "the mug"}]}
    refs = [ref | {"ann_id": 31}, ref | {"ann_id": [32, 33]}, ref | {"ann_id": [-1]}]
    mmr = {"questions": ["What?"], "answers": [[{"category_name": "mug", "segmentation": [flat]}]]}
    lisa = {
        "English Question": "What?",
        "English Answer": "instance id is 0",
        "img_path": "a.jpg",
        "ID": ["0"],
    }
    target = {"name": "mug", "visible_mask": seen, "amodal_mask": whole}
    shapes = [{"label": label, "points": ring} for label in ("target", "ignore")]
    answer = {
        "query_id": 1,
        "segmentation": seen,
        "score": 0.5,
        "mask_type": "modal",
        "amodal_probability": 0.4,
    }
    np.save(logits := BytesIO(), back.astype(np.float32) - 0.5)
    folder.mkdir(parents=True)
    (folder / "a.jpg").write_bytes(image_bytes("JPEG"))
    for name, content in (("data.json", dataset), ("refs.json", refs), ("instances.json", coco)):
        (folder / name).write_text(json.dumps(content), "utf-8")

    write = "--out DIR/converted.json --overwrite"
    convert, score = f"{write} --images DIR", "--data json:DIR/data.json --out DIR/scores"
    regions = {"image_id": 7, "url": "x/a.jpg", "regions": [region, region]}
    rows: dict[str, tuple[str, Any, str]] = {
        "cocoa": ("a.json", regions, f"convert cocoa FILE {convert}"),
        "cocoa-cls": ("a.json", coco, f"convert cocoa-cls FILE {convert}"),
        "d2sa": ("a.json", coco, f"convert d2sa FILE {convert} --oversize crop"),
        "kins": ("a.json", kins, f"convert kins FILE {convert}"),
        "muva": (
            "a.json",
            kins,
            f"convert muva FILE {convert} --amodal-field a_segm --visible-field i_segm",
        ),
        "mmr": (
            "a.json",
            [image | mmr | {"image_id": 7, "text_answers": ["{seg}"]}],
            f"convert mmr FILE {convert}",
        ),
        "reasonseg": (
            "a.json",
            {"text": ["It"], "is_sentence": True, "shapes": shapes},
            f"convert reasonseg FILE {convert}",
        ),
        "lisa++": (
            "a.json",
            [lisa | {"points": {"0": {"label name": "mug", "points": [ring]}}}],
            f"convert lisa++ FILE {convert}",
        ),
        "refcoco": (
            "r.json",
            refs,
            f"convert refcoco FILE {convert} --instances DIR/instances.json",
        ),
        "refcoco pickle": (
            "r.p",
            pickle.dumps(refs),
            f"convert refcoco FILE {convert} --instances DIR/instances.json",
        ),
        "refcoco instances": (
            "i.json",
            coco,
            f"convert refcoco DIR/refs.json {convert} --instances FILE",
        ),
        "amodal-qa": (
            "a.json",
            [{"image": "a.jpg", "question": "What?", "answer": "It.", "objects": [target]}],
            f"convert amodal-qa FILE {convert}",
        ),
        "r2sm": (
            "a.json",
            [query, query | {"instance_ids": None, "answer": "instance id is 31"}],
            f"convert r2sm FILE --over DIR/data.json {write}",
        ),
        "check": ("a.json", dataset, "check FILE --images DIR"),
        "stats": ("a.json", dataset, "stats FILE"),
        "template": ("a.json", dataset, f"queries template FILE {write}"),
        "predictions": (
            "a.json",
            [answer, answer | {"query_id": 2, "fused": True}],
            f"--predictions FILE {score}",
        ),
        "predictions png": ("1.png", image_bytes("PNG", "1"), f"--predictions FOLDER {score}"),
        "predictions npy": ("1.npy", logits.getvalue(), f"--predictions FOLDER {score}"),
    }
    found = {}
    for name, (file_name, content, line) in rows.items():
        own = folder / name.replace(" ", "_")
        own.mkdir()
        (own / "a.jpg").write_bytes(image_bytes("JPEG"))
        full = {"FILE": str(own / file_name), "FOLDER": str(own)}
        words = [full.get(word, word.replace("DIR", str(folder))) for word in line.split()]
        (own / file_name).write_bytes(
            content if isinstance(content, bytes) else json.dumps(content).encode()
        )
        found[name] = Case(
            own / file_name,
            content,
            evaluate.main if name.startswith("predictions") else data.main,
            words,
        )
    return found
