"""What the page of `demo.py` shows, without gradio: from a photo and a sentence to a decision, pictures and files.

An answer holds what `predict --json` prints for each mask type, so that the threshold and the view can change without
another run of the model.
"""

import json
import math
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import UInt8
from jinja2 import StrictUndefined, Template
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.images import frames, open_image
from r2sm_jax.data.sheet import overlay
from r2sm_jax.errors import InputError
from r2sm_jax.inference.prediction import MASKS
from r2sm_jax.inference.predictor import EncodedImage, Predictor
from r2sm_jax.query import MaskType
from r2sm_jax.synthetic.scenes.source import SceneSource

View = Literal["modal", "amodal", "occluded"]
PREVIEW_SIDE = 960
"""Pixels of the longer side of every picture on the page."""
MAX_CHARACTERS = 100_000
EXAMPLES, EXAMPLE_SIDE = 5, 480
PARTS = (files("r2sm_jax.inference") / "demo.html").read_text("utf-8")
HTML: Any = Template(
    PARTS, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
).module
decision_html, facts_html, message_html = HTML.decision, HTML.facts, HTML.message
"""The decision about an answer at a threshold; a line about its mask and the photo; a hint, or an InputError, in the
place of the decision. Visitors' words are escaped."""


@dataclass(frozen=True)
class Photo:
    """An image that a visitor chose. Only its preview is kept, so that sessions stay small."""

    name: str
    preview: UInt8[np.ndarray, "h w 3"]
    encoded: EncodedImage
    seconds: float
    """Time to encode it."""
    frames: int
    """More than 1 in an animation, of which the first frame is used."""


@dataclass(frozen=True)
class Answer:
    """One sentence about one photo."""

    query: str
    by_type: dict[MaskType, dict[str, Any]]
    """What `predict --json` prints with this `--mask-type`."""
    words: Sequence[tuple[str, float]]
    """The words that were read, and what each adds to the decision: above 0 for amodal, below for modal."""
    unread: str
    """The end of a sentence that is too long."""
    seconds: float

    @property
    def probability(self) -> float:
        """That the sentence asks for the complete shape."""
        return self.by_type["modal"]["amodal_probability"]

    def decision(self, threshold: float) -> MaskType:
        """Amodal where the probability is above the threshold."""
        return "amodal" if self.probability > threshold else "modal"

    def share(self, mask_type: MaskType, name: str) -> float:
        """The share of the image that one of the masks of a type covers."""
        entry = self.by_type[mask_type]
        return masks.areas([entry[name]])[0] / math.prod(entry["size"])


def make_examples() -> list[tuple[UInt8[np.ndarray, "H W 3"], list[str]]]:
    """Scenes of the validation split, each with sentences about its most hidden object: plain, complete, harder."""
    found, source = [], SceneSource("val", 1000, size=EXAMPLE_SIDE)
    for sample in map(source.__getitem__, range(len(source))):
        hidden = [
            1 - a.modal / a.complete for a in (i.convert(masks.area) for i in sample.instances)
        ]
        if 0.3 <= max(hidden) <= 0.65:  # much is hidden, but the object can still be recognised
            target = sample.instances[int(np.argmax(hidden))]
            name = f"the {target.attributes['colour']} {target.category}"
            harder = [
                q.text
                for q in sample.queries
                if q.instance_ids == (target.id,) and q.kind.get("hard")
            ]
            found.append(
                (
                    sample.image,
                    [name, f"the complete shape of {name}, hidden parts included", *harder[:1]],
                )
            )
        if len(found) == EXAMPLES:
            break
    return found


def open_photo(predictor: Predictor, file: Path) -> Photo:
    """Reads and encodes a photo. Raises InputError, which names the file but not its folder on the server."""
    try:
        content = file.read_bytes()
    except OSError:
        raise InputError(
            f"{file.name}: the upload is not there any more; choose the image again"
        ) from None
    pixels = open_image(content, file.name)
    started = time.perf_counter()
    encoded = jax.block_until_ready(predictor.encode(pixels))
    seconds = time.perf_counter() - started
    scale = PREVIEW_SIDE / max(pixels.shape)
    height, width = (max(1, round(side * scale)) for side in pixels.shape[:2])
    preview = np.array(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))
    return Photo(file.name, preview, encoded, seconds, frames(content, file.name))


def ask(predictor: Predictor, photo: Photo, query: str) -> Answer:
    """Asks for both mask types. Raises InputError for a sentence that cannot be used."""
    if len(query) > MAX_CHARACTERS:
        raise InputError(
            f"the sentence has {len(query):,} characters; use {MAX_CHARACTERS:,} at most"
        )
    started = time.perf_counter()
    modal, amodal = (
        predictor.predict([query], kind, photo.encoded)[0] for kind in ("modal", "amodal")
    )
    seconds = time.perf_counter() - started
    read = query.removesuffix(modal.unread)
    words = [(word, 0.0) for word in read.split()]
    return Answer(
        query, {"modal": modal.to_json(), "amodal": amodal.to_json()}, words, modal.unread, seconds
    )


def draw(
    photo: Photo, answer: Answer, shown: View, instance: int = -1
) -> UInt8[np.ndarray, "h w 3"]:
    """The preview with the "modal", "amodal" or "occluded" mask of one instance, or of all of them for -1."""
    both = answer.by_type["amodal"]
    entry = both if instance < 0 else both["instances"][instance]
    size = photo.preview.shape[1::-1]
    modal, amodal = (
        np.array(Image.fromarray(masks.expand(entry[name])).resize(size, Image.Resampling.NEAREST))
        for name in ("modal", "amodal")
    )
    visible = modal & (shown != "occluded")
    occluded = amodal & ~modal & (shown != "modal")
    return overlay(photo.preview, visible, occluded, None if shown == "occluded" else shown)


def write_files(
    folder: Path, picture: UInt8[np.ndarray, "h w 3"], answer: Answer, threshold: float
) -> tuple[str, str]:
    """Writes `masks.zip` (masks of the photo's own size, `picture` as overlay) and `prediction.json`; their paths."""
    entry = answer.by_type[answer.decision(threshold)]
    pictures = {
        name: np.where(masks.expand(entry[name]), 255, 0).astype(np.uint8) for name in MASKS
    }
    inside = folder / "masks"
    inside.mkdir(parents=True, exist_ok=True)
    for name, pixels in (pictures | {"overlay": picture}).items():
        Image.fromarray(pixels).save(inside / f"{name}.png")
    (inside / "prediction.json").write_text(
        json.dumps(entry | {"threshold": threshold}) + "\n", "utf-8"
    )
    return shutil.make_archive(str(inside), "zip", inside), str(inside / "prediction.json")


def remove_old_answers(folder: Path, seconds: float) -> None:
    """Removes the files of answers that were written longer ago."""
    for old in folder.glob("answer-*"):
        with suppress(FileNotFoundError):  # another request removes it at this moment
            if time.time() - old.stat().st_mtime > seconds:
                shutil.rmtree(old, ignore_errors=True)


def alt_text(answer: Answer, shown: View) -> str:
    """The picture in words, for visitors who do not see it."""
    share, most = answer.share("amodal", shown), 80
    query = answer.query if len(answer.query) <= most else answer.query[: most - 1] + "…"
    return f"The {shown} mask of “{query}” over the image: {share:.1%} of it"
