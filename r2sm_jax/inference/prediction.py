"""The prediction for one query: masks at the image's own resolution, and the files made of them."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from r2sm_jax.config import UNSURE_BELOW
from r2sm_jax.data import masks
from r2sm_jax.data.dataset import COMPLETED_BY, Instance, completed_by
from r2sm_jax.data.images import ImageLike, open_image
from r2sm_jax.data.masks import RLE, Mask
from r2sm_jax.errors import InputError, atomic_write
from r2sm_jax.query import MaskType

MASKS = ("mask", "modal", "amodal", "occluded")
"""Names of a prediction's masks; `mask` is the one that the query asks for."""
MAX_PICTURE = 4_000_000
"""Pixels of an overlay that is written. At 48 megapixels it would take 2 GB of memory."""
PROBABLY_THERE = 0.5
"""A lower presence makes an answer absent if its masks are empty, and unsure if they are not."""
FILES = (*(f"{name}.png" for name in MASKS), "overlay.png", "prediction.json")


@dataclass(frozen=True, eq=False)
class InstanceMask:
    """One instance that the query means. `mask` is of the predicted type."""

    presence: float
    """Probability that the instance is there."""
    confidence: float
    """`presence` times the predicted IoU of `mask`. It ranks instances for average precision."""
    mask: Mask
    modal: Mask
    amodal: Mask


class Candidate(NamedTuple):
    """A visible mask that clicks may mean."""

    mask: RLE
    score: float
    """Its predicted IoU."""


class AbsentSlot(NamedTuple):
    """The mask of an instance slot that is probably not present, as average precision ranks it."""

    segmentation: RLE
    score: float
    """As `InstanceMask.confidence`."""
    occlude_rate: float
    """Share of the instance that is hidden."""


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """The prediction for one query: masks, decision and scores, at the image's own resolution.

    `amodal = modal ∪ occluded`. It prints as its `summary`.
    """

    query: str
    mask_type: MaskType | None
    """The decision; None where the system makes none (the mask-type head `none`)."""
    amodal_probability: float | None
    """None where the system makes no decision, or a prompt has no sentence."""
    score: float | None
    """Predicted IoU of `mask`; of several objects of a finder the mean. None if `mask` is a visible
    mask that the caller or a finder gave, or if a finder found nothing."""
    modal: Mask
    amodal: Mask
    instances: tuple[InstanceMask, ...] = ()
    """Instances that are probably present, the surest first."""
    candidates: tuple[Candidate, ...] = ()
    """What else clicks may mean, the likeliest first: a part of the answer, or what it is a part
    of."""
    absent_slots: tuple[AbsentSlot, ...] = ()
    """Instances that are probably not present, for average precision. Filled in only on request."""
    mask_logits: Float[np.ndarray, "H W"] | None = None
    """Above 0 where `mask` is. Filled in only on request."""
    presence: float = 1.0
    """Probability that the image has what the query means. Masks are empty below a threshold. With
    a finder it is above 0.5 if that found something, by its score, and 0 if not."""
    undecided: bool = False
    """The probability of amodal is nearer to 0.5 than the margin `abstain`."""
    target: str | None = None
    """The words of the query that name what is meant; None if none do, or the model cannot tell."""
    unread: str = ""
    """The end of the query, where it is longer than the language model's limit."""
    is_given: bool = False
    """The visible mask is the caller's own."""
    has_both_masks: bool = True
    """False where only one mask is known: `modal` and `amodal` are the same then."""
    hidden_probability: float | None = None
    """Calibrated probability that a part of it is hidden; None where no completer looked at it."""
    hidden_by: str = ""
    """The query of the same call whose target hides it, if one does."""
    unsure_below: float = UNSURE_BELOW
    """A `score` below this is called unsure: the mask is rather something else than what was meant.
    Each kind of query has its own limit."""
    photo: UInt8[np.ndarray, "H W 3"] | None = None
    """The image that was predicted; None where many were."""

    def __repr__(self) -> str:
        return self.summary()

    @cached_property
    def occluded(self) -> Mask:
        """The hidden part: amodal without modal."""
        return self.amodal & ~self.modal

    @property
    def mask(self) -> Mask:
        """The mask that the query asks for."""
        return self.amodal if self.mask_type == "amodal" else self.modal

    @property
    def is_absent(self) -> bool:
        """Whether nothing of the kind is seen in the image."""
        # Another limit empties masks (`ModelConfig.presence_threshold`, as a probability 0.27).
        # Above it, too, a mask can be empty.
        return self.presence < PROBABLY_THERE and not (self.amodal.any() or self.instances)

    @property
    def is_unsure(self) -> bool:
        """Whether `score` or `presence` says that `mask` is probably not what was meant."""
        is_low = self.score is not None and self.score < self.unsure_below
        return not self.is_absent and (is_low or self.presence < PROBABLY_THERE)

    def rle(self, name: str = "mask") -> dict[str, Any]:
        """Returns one of `MASKS` in COCO's run-length encoding."""
        return masks.encode(getattr(self, name))

    def box(self, name: str = "mask") -> tuple[int, int, int, int]:
        """Returns the box x0 y0 x1 y1 around one of `MASKS`, in pixels; all zeros for an empty
        one."""
        return masks.box(getattr(self, name))

    def polygons(self, name: str = "mask") -> list[list[float]]:
        """Returns the outlines of one of `MASKS`, largest part first, as COCO's polygons.

        Each is `[x1, y1, x2, y2, ...]` in pixels and true to half a pixel. Polygons cannot have
        holes; `rle` is exact.
        """
        return masks.polygons(getattr(self, name))

    def png(self, name: str = "mask") -> bytes:
        """Returns one of `MASKS` as the content of a PNG file with one channel of 0 or 255."""
        pixels = getattr(self, name) * np.uint8(255)
        file = BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        return file.getvalue()

    def overlay(
        self, image: ImageLike | None = None, max_pixels: int | None = None
    ) -> UInt8[np.ndarray, "_height _width 3"]:
        """Paints the visible part blue and the hidden part orange, and outlines `mask`.

        Args:
            image: the one that was predicted; default: `photo`.
            max_pixels: a larger image is drawn smaller; None: never.

        Raises InputError if the image has another size than the masks, or there is none.
        """
        from r2sm_jax.data.sheet import paint

        image = self.photo if image is None else image
        if image is None:
            raise InputError("this prediction does not hold its image; give it")
        pixels = open_image(image)
        if pixels.shape[:2] != self.modal.shape:
            sizes = [" x ".join(map(str, array.shape[:2])) for array in (pixels, self.modal)]
            raise InputError(
                f"this image is {sizes[0]}, the masks are {sizes[1]}; give the image that was "
                "predicted"
            )
        ratio = 1.0 if max_pixels is None else min(1.0, sqrt(max_pixels / self.modal.size))
        return paint(pixels, self.modal, self.amodal, self.mask_type or "modal", ratio)

    def show(self, image: ImageLike | None = None) -> Image.Image:
        """Returns the overlay as a picture, which notebooks show. Arguments and errors are those of
        `overlay`."""
        return Image.fromarray(self.overlay(image, MAX_PICTURE))

    def _scores(self) -> dict[str, Any]:
        """Returns what every file says about the answer."""
        scores: dict[str, Any] = {"presence": self.presence}
        if self.hidden_probability is not None:
            scores["hidden_probability"] = self.hidden_probability
        if self.is_unsure:
            scores["unsure"] = True
        return scores

    def to_json(self) -> dict[str, Any]:
        """Returns the prediction as JSON values; masks are RLEs."""
        # JSON keeps this order, which a reader sees: decision, scores, then masks.
        return {
            "query": self.query,
            "mask_type": self.mask_type,
            "amodal_probability": self.amodal_probability,
            **({"undecided": True} if self.undecided else {}),
            "target": self.target,
            "score": self.score,
            "presence": self.presence,
            "hidden_probability": None,
            **self._scores(),
            **{name: self.rle(name) for name in MASKS},
            "instances": [
                {
                    "score": instance.presence,
                    "mask": masks.encode(instance.mask),
                    "modal": masks.encode(instance.modal),
                    "amodal": masks.encode(instance.amodal),
                }
                for instance in self.instances
            ],
            "size": list(self.mask.shape),
        }

    def to_coco(self) -> list[dict[str, Any]]:
        """Returns entries of a predictions file (docs/metrics.md): fused mask, then instances, then
        the slots that are not present, where they are filled in.

        The score of the fused mask is its predicted IoU: null if it has none, 0 if a finder found
        nothing. Instances are ranked by their confidence.
        """
        score = self.score
        if score is None and not self.instances:
            score = 0.0
        fused: dict[str, Any] = {"segmentation": self.rle(), "score": score, "fused": True}
        if self.mask_type is not None:
            fused["mask_type"] = self.mask_type
            fused["amodal_probability"] = self.amodal_probability
        fused |= {"modal": self.rle("modal"), "amodal": self.rle("amodal"), **self._scores()}
        entries = [fused]
        for instance in self.instances:
            entry = {"segmentation": masks.encode(instance.mask), "score": instance.confidence}
            entry["occlude_rate"] = masks.occlude_rate(instance.modal, instance.amodal)
            entries.append(entry)
        for slot in self.absent_slots:
            entries.append(slot._asdict() | {"present": False})
        return entries

    def objects(self) -> list[tuple[float, Mask, Mask]]:
        """Returns the score and both masks of each object of the answer: of its instances, or of
        all of it where they are not told apart."""
        found = [(one.confidence, one.modal, one.amodal) for one in self.instances]
        if not found:
            found = [(self.presence * (self.score or 0.0), self.modal, self.amodal)]
        return [one for one in found if one[-1].any()]

    def to_instances(self) -> list[Instance[RLE]]:
        """Returns the objects of the answer as annotations of a dataset file, without ids.

        Their category is the query, and `answer_score` the score of the whole answer.
        """
        fields = {"answer_score": self.score, "mask_type": self.mask_type, **self._scores()}
        instances = []
        for score, modal, amodal in self.objects():
            visible, complete = masks.encode(modal), None
            own = {**fields, "score": score}
            if self.has_both_masks:
                complete = masks.encode(amodal)
                own[COMPLETED_BY] = completed_by("predict", complete)
            category = self.query or "what is pointed at"
            instances.append(Instance(0, category, visible, complete, fields=own))
        return instances

    def write(self, folder: str | Path, image: ImageLike | None = None) -> None:
        """Writes `FILES` into a folder. Raises InputError if that cannot be written, and as
        `overlay`."""
        folder = Path(folder)
        picture = self.show(image)
        # prediction.json appears when this block ends, so a folder that has it has the pictures,
        # too. An OSError of any of the files becomes an InputError.
        with atomic_write(folder / "prediction.json") as part:
            for name in MASKS:
                (folder / f"{name}.png").write_bytes(self.png(name))
            picture.save(folder / "overlay.png")
            part.write_text(json.dumps(self.to_json()) + "\n", "utf-8")

    def summary(self) -> str:
        """Returns the prediction in one line: type, probability, how good it is, what is hidden."""
        name = f'"{self.query}"' if self.query else "what is pointed at"
        if self.is_absent:
            return f"absent: {name}, probability that it is there {self.presence:.2f}"
        parts = [f"{self.mask_type or 'no decision'}: {name}"]
        if self.target is not None:
            parts.append(f'target "{self.target}"')
        if self.amodal_probability is not None:
            parts.append(f"probability of amodal {self.amodal_probability:.2f}")
        if self.undecided:
            parts.append("undecided")
        there = f"presence {self.presence:.2f}"
        parts.append("from the given mask" if self.is_given else there)
        if self.score is not None:
            parts.append(f"predicted IoU {self.score:.2f}")
        if self.is_unsure:
            parts.append("unsure")
        if self.hidden_probability is not None:
            parts.append(f"probability of a hidden part {self.hidden_probability:.2f}")
        if self.has_both_masks and self.mask_type is not None:
            by = f' by "{self.hidden_by}"' if self.hidden_by else ""
            share = masks.occlude_rate(self.modal, self.amodal)
            parts.append(f"{share:.0%} hidden{by}")
        return ", ".join(parts)


def to_supervision(predictions: Iterable[Prediction]) -> Any:
    """Returns the objects of predictions about one image as `supervision.Detections`.

    A detection has the mask that its query asks for. `class_id` is the number of the query, and
    `data` has both masks, its `class_name` and `mask_type`. Raises InputError without supervision.
    """
    try:
        from supervision import Detections
    except ImportError:
        raise InputError("to_supervision needs supervision; pip install supervision") from None
    objects = [
        (number, prediction, *one)
        for number, prediction in enumerate(predictions)
        for one in prediction.objects()
    ]
    if not objects:
        return Detections.empty()
    numbers, answers, scores, modal, amodal = zip(*objects, strict=True)
    pairs = zip(answers, modal, amodal, strict=True)
    asked = [whole if one.mask_type == "amodal" else visible for one, visible, whole in pairs]
    data: dict[str, Any] = {
        "class_name": np.array([one.query for one in answers]),
        "mask_type": np.array([str(one.mask_type) for one in answers]),
        "modal": np.stack(modal),
        "amodal": np.stack(amodal),
    }
    boxes = np.array([masks.box(mask) for mask in asked], float)
    return Detections(boxes, np.stack(asked), np.array(scores), np.array(numbers), data=data)
