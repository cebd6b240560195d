"""What stands behind the page of `demo.py`: a photo and a sentence -> decision, masks to look at, files to take away.

Nothing here knows of gradio. An answer is kept as the JSON objects of `predict --json`, one for each mask type, so that
the threshold and the view can change without asking the model again.
"""

import io
import json
import shutil
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, UInt8
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.images import frames, open_image
from r2sm_jax.data.samples import Sample
from r2sm_jax.data.sheet import overlay
from r2sm_jax.errors import InputError
from r2sm_jax.models import heads
from r2sm_jax.predict import MASKS, to_json
from r2sm_jax.predictor import EncodedImage, Predictor, check_query
from r2sm_jax.query import MaskType
from r2sm_jax.scenes.scenes import SceneSource

VIEW_SIDE = 960
"""Pixels of the longer side of what the page shows, whatever the photo has."""
MAX_CHARACTERS, MAX_WORDS = 100_000, 80
EXAMPLES, EXAMPLE_SIDE = 5, 480
HIDDEN = 0.3, 0.65
"""Share that is hidden of the object that an example asks for: much, but not beyond recognition."""


@dataclass(frozen=True)
class Example:
    """A drawn scene and sentences about its most hidden object."""

    image: UInt8[np.ndarray, "H W 3"]
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Photo:
    """An image that somebody chose. Its pixels are read again when they are needed: a session stays small."""

    file: Path
    encoded: EncodedImage
    seconds: float
    """That encoding took."""
    frames: int
    """Of an animation, whose first one is looked at."""


@dataclass(frozen=True)
class Answer:
    """One sentence about one photo."""

    query: str
    by_type: dict[MaskType, dict[str, Any]]
    """What `predict --json` prints with that `--mask-type`."""
    words: Sequence[tuple[str, float]]
    """The sentence's words with what they add to the decision: above 0 for amodal, below for modal."""
    unread: str
    """The end of the sentence that was too long to be read."""
    seconds: float

    @property
    def probability(self) -> float:
        """That the complete shape is meant."""
        return self.by_type["modal"]["amodal_probability"]

    def decision(self, threshold: float) -> MaskType:
        """Amodal where the probability exceeds the threshold."""
        return "amodal" if self.probability > threshold else "modal"


def make_examples(seed: int = 0) -> list[Example]:
    """Scenes of the validation split, which no run was trained on, with a plain, a complete and a harder wording."""
    found: list[Example] = []
    source = SceneSource("val", 1000, seed=seed, size=EXAMPLE_SIDE)
    for index in range(len(source)):
        sample = source[index]
        if sentences := _sentences(sample):
            found.append(Example(sample.image, sentences))
        if len(found) == EXAMPLES:
            break
    return found


def _sentences(sample: Sample) -> tuple[str, ...]:
    hidden = {i.id: 1 - masks.area(i.modal) / masks.area(i.amodal) for i in sample.instances if i.amodal is not None}
    most = max(hidden, key=lambda number: hidden[number])
    if not HIDDEN[0] <= hidden[most] <= HIDDEN[1]:
        return ()
    target = next(i for i in sample.instances if i.id == most)
    name = f"{target.attributes['colour']} {target.category}"
    harder = [q.text for q in sample.queries if q.instance_ids == (most,) and q.kind.get("hard")]
    return (f"the {name}", f"the complete shape of the {name}, hidden parts included", *harder[:1])


def open_photo(predictor: Predictor, file: Path) -> Photo:
    """Looks at a photo once. Raises InputError that names the file and not the folder where the server keeps it."""
    pixels = read_photo(file)
    started = time.perf_counter()
    encoded = jax.block_until_ready(predictor.encode(pixels))
    return Photo(file, encoded, time.perf_counter() - started, frames(file))


def read_photo(file: Path) -> UInt8[np.ndarray, "H W 3"]:
    """The pixels of an uploaded photo. Raises InputError like `open_photo`."""
    try:
        content = file.read_bytes()
    except OSError:
        raise InputError(f"{file.name}: the server no longer has this image; choose it again") from None
    return open_image(file.name, content)


def warm_up(predictor: Predictor) -> None:
    """Compiles all that an answer needs."""
    predictor.warm_up()
    _words(predictor, "the red mug")


def ask(predictor: Predictor, photo: Photo, query: str) -> Answer:
    """Asks for both mask types. Raises InputError for a sentence that cannot be used."""
    check_query(query)
    if len(query) > MAX_CHARACTERS:
        raise InputError(f"the sentence has {len(query):,} characters; use {MAX_CHARACTERS:,} at most")
    started = time.perf_counter()
    modal, amodal = (predictor.predict([query], kind, photo.encoded)[0] for kind in ("modal", "amodal"))
    seconds = time.perf_counter() - started
    by_type: dict[MaskType, dict[str, Any]] = {"modal": to_json(modal), "amodal": to_json(amodal)}
    return Answer(query, by_type, _words(predictor, query.removesuffix(modal.unread)), modal.unread, seconds)


def _words(predictor: Predictor, read: str) -> Sequence[tuple[str, float]]:
    if predictor.config.head in heads.LEARNED and read.strip():
        return predictor.explain(read)
    return [(word, 0.0) for word in read.split()]


def view(
    pixels: UInt8[np.ndarray, "H W 3"], answer: Answer | None, shown: str = "", instance: int | None = None
) -> UInt8[np.ndarray, "h w 3"]:
    """The photo at `VIEW_SIDE` with the "modal", "amodal" or "occluded" mask of everything, or of one instance."""
    height, width = pixels.shape[:2]
    scale = VIEW_SIDE / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    small = np.array(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
    if answer is None:
        return small
    entry = answer.by_type["amodal"]
    entry = entry if instance is None else entry["instances"][instance]
    modal, amodal = (_resized(masks.expand(entry[name]), size) for name in ("modal", "amodal"))
    nothing = np.zeros_like(modal)
    if shown == "modal":
        return overlay(small, modal, nothing, "modal")
    if shown == "occluded":
        return overlay(small, nothing, amodal & ~modal, None)
    return overlay(small, modal, amodal & ~modal, "amodal")


def _resized(mask: Bool[np.ndarray, "H W"], size: tuple[int, int]) -> Bool[np.ndarray, "h w"]:
    return np.array(Image.fromarray(mask).resize(size, Image.Resampling.NEAREST))


def write_files(
    folder: Path, picture: UInt8[np.ndarray, "h w 3"], answer: Answer, threshold: float
) -> tuple[Path, Path]:
    """Writes `masks.zip` (masks at the photo's own resolution, `picture` as overlay) and `prediction.json`."""
    decided = answer.decision(threshold)
    text = json.dumps(answer.by_type[decided] | {"threshold": threshold}) + "\n"
    pictures = {name: np.where(masks.expand(answer.by_type[decided][name]), 255, 0).astype(np.uint8) for name in MASKS}
    pictures["overlay"] = picture
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "masks.zip", "w") as archive:
        for name, picture in pictures.items():
            buffer = io.BytesIO()
            Image.fromarray(picture).save(buffer, "PNG")
            archive.writestr(f"{name}.png", buffer.getvalue())
        archive.writestr("prediction.json", text)
    (folder / "prediction.json").write_text(text)
    return folder / "masks.zip", folder / "prediction.json"


def forget_answers(folder: Path, seconds: float) -> None:
    """Removes files of answers that were written longer ago."""
    for old in folder.glob("answer-*"):
        if time.time() - old.stat().st_mtime > seconds:
            shutil.rmtree(old, ignore_errors=True)


def decision_html(answer: Answer, threshold: float) -> str:
    """The decision with its probability and the words that drove it. Everything from outside is escaped."""
    decided, p = answer.decision(threshold), answer.probability
    meaning = {"modal": "the visible part", "amodal": "the complete shape, hidden parts included"}[decided]
    most = max((1.0, *(abs(share) for _, share in answer.words)))  # less than a logit is no loud word
    words = " ".join(
        f'<span class="word {"for-amodal" if share > 0 else "for-modal"}" style="--share:{abs(share) / most:.2f}">'
        f"{escape(_short(word, 40))}</span>"
        for word, share in answer.words[:MAX_WORDS]
    )
    words += " …" if len(answer.words) > MAX_WORDS else ""
    unread = f'<p class="note">Too long; not read: “{escape(_short(answer.unread, 80))}”</p>' if answer.unread else ""
    return (
        f'<section class="decision {decided}" aria-live="polite"><p class="verdict"><strong>{decided.capitalize()}'
        f"</strong> <span>{meaning}</span> <b>{p if decided == 'amodal' else 1 - p:.0%}</b></p>"
        f'<div class="scale" role="img" aria-label="probability of amodal {p:.2f}, threshold {threshold:.2f}">'
        f'<i class="fill" style="width:{p:.1%}"></i><i class="tick" style="left:{threshold:.1%}"></i></div>'
        f'<p class="ends"><span>modal</span><span>P(amodal) {p:.3f}</span><span>amodal</span></p>'
        f'<p class="words">{words}</p>{unread}</section>'
    )


def facts_html(photo: Photo, answer: Answer, threshold: float) -> str:
    """Legend, and one quiet line: how much, how sure, how many, how large, how long."""
    entry = answer.by_type[answer.decision(threshold)]
    count, (height, width) = len(entry["instances"]), entry["size"]
    covered = masks.areas([entry["mask"]])[0] / (height * width)
    said = [
        f"{covered:.1%} of the image" if covered else "nothing was found",
        f"predicted IoU {entry['score']:.2f}",
        f"{count} instance{'' if count == 1 else 's'}",
        f"{width} × {height} px",
        f"image {1000 * photo.seconds:.0f} ms, sentence {1000 * answer.seconds:.0f} ms",
    ]
    legend = '<i class="visible"></i>visible <i class="hidden"></i>hidden'
    return f'<p class="facts legend">{legend}</p><p class="facts">{" · ".join(said)}</p>'


def error_html(error: InputError) -> str:
    """The sentence of an error, where the decision would stand."""
    return f'<section class="decision error" role="alert"><p>{escape(str(error))}.</p></section>'


def hint_html(text: str) -> str:
    """What to do next, where the decision will stand."""
    return f'<section class="decision hint" aria-live="polite"><p>{escape(text)}</p></section>'


def alt_text(answer: Answer, shown: str) -> str:
    """What the picture shows, for those who do not see it."""
    entry = answer.by_type["amodal"]
    height, width = entry["size"]
    share = masks.areas([entry[shown]])[0] / (height * width)
    return f"The {shown} mask of “{_short(answer.query, 80)}” over the image: {share:.1%} of it"


def instance_choices(answer: Answer) -> list[tuple[str, int]]:
    """Labels of the instances with their presence, most certain first; -1 is everything."""
    found = enumerate(answer.by_type["amodal"]["instances"])
    return [("All", -1), *((f"{number + 1} · {instance['score']:.2f}", number) for number, instance in found)]


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
