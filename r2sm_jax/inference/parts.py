"""What draws at a place: the outliner what shows of an object, then the completer its whole shape,
and how good both are.

    box, clicks     Outline       the visible mask, with a predicted IoU
    given mask      Outline       the mask itself, which is right
    found           Outline       drawn already, so that a sentence could choose (choose.py)
    Outline         Completion    the complete mask; its scores know that the outline may be wrong

`Predictor.predict` and `data complete` both draw so.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import tee
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, UInt8

from r2sm_jax.data.masks import Mask
from r2sm_jax.errors import InputError
from r2sm_jax.inference.crop_models import Completion, MaskCompleter, MaskOutliner, Outline
from r2sm_jax.inference.prompts import Place
from r2sm_jax.query import Click, MaskType, Prompt


class Drawn(NamedTuple):
    """One object that was drawn."""

    outline: Outline
    completion: Completion | None
    """None where there is no completer, or nothing to complete."""

    @property
    def complete(self) -> Mask:
        """The complete mask, as far as it is known."""
        return self.outline.mask if self.completion is None else self.completion.mask

    def answer(self, mask_type: MaskType | None) -> Outline | Completion:
        """Returns the mask that is asked for, with its scores."""
        if mask_type == "amodal" and self.completion is not None:
            return self.completion
        return self.outline


class Parts(NamedTuple):
    """The completer and the outliner of a model, as far as it has them."""

    completer: MaskCompleter | None = None
    outliner: MaskOutliner | None = None

    def check(self, place: Place, mask_type: MaskType | None) -> None:
        """Raises InputError if a part is missing that must draw at a place."""
        if isinstance(place, Prompt):
            self.need("outliner")
        # A given mask is the answer to a modal sentence as it is. What is left to say, its amodal
        # mask and whether a part is hidden, the completer says.
        if isinstance(place, np.ndarray) or mask_type == "amodal":
            self.need("completer")

    def need(self, part: str) -> Any:
        """Returns the completer or the outliner. Raises InputError if there is none."""
        found = getattr(self, part)
        if found is None:
            raise no_part(part, "this model")
        return found

    def draw(
        self,
        image: UInt8[np.ndarray, "H W 3"],
        places: Sequence[Place],
        all_visible: Bool[np.ndarray, "H W"] | None,
    ) -> Iterator[list[Drawn]]:
        """Yields for each place the list of its objects: one, or those of a finder that were
        chosen. Call `check` first.

        `all_visible`: the union of what shows of all objects; None where it is not known.
        """
        outlines = [
            place if isinstance(place, tuple) else (self.outline(image, place),) for place in places
        ]
        found = [one for of_place in outlines for one in of_place if one.mask.any()]
        completions = self.complete(image, found, all_visible)
        for of_place in outlines:
            yield [
                Drawn(one, next(completions, None) if one.mask.any() else None) for one in of_place
            ]

    def outline(self, image: UInt8[np.ndarray, "H W 3"], place: Mask | Prompt) -> Outline:
        """Returns what shows of the object at a place."""
        if not isinstance(place, Prompt):
            return Outline(place, iou=1.0, unsure_below=0.0, is_given=True)
        (outline,) = self.need("outliner")(image, [place])
        return outline

    def complete(
        self,
        image: UInt8[np.ndarray, "H W 3"],
        outlines: Iterable[Outline],
        all_visible: Bool[np.ndarray, "H W"] | None,
    ) -> Iterator[Completion]:
        """Yields the complete masks of outlines, of which eight are held at a time; nothing without
        a completer."""
        if self.completer is None:
            return
        outlines, to_complete = tee(outlines)
        completions = self.completer.complete(image, (one.mask for one in to_complete), all_visible)
        for outline, completion in zip(outlines, completions, strict=True):
            yield judge(outline, completion)

    def warm_up(self, size: int) -> None:
        """Compiles what an answer needs."""
        image = np.zeros((size, size, 3), np.uint8)
        if self.completer is not None:
            list(self.completer.complete(image, [np.ones((size, size), bool)]))
        if self.outliner is not None:
            # A box takes one crop, a click several.
            box = Prompt(box=(0.0, 0.0, float(size), float(size)))
            self.outliner(image, [box, Prompt(clicks=(Click(size / 2, size / 2),))])


def judge(outline: Outline, completion: Completion) -> Completion:
    """Returns a completion whose scores know that its outline may be wrong, too: the completer is
    calibrated on true visible masks."""
    iou = outline.iou * completion.iou
    kind = outline.completed_calibration
    if kind is not None:
        return completion._replace(iou=float(kind.iou(iou)), unsure_below=float(kind.unsure_below))
    # Divide by one of the two IoUs: the product is below the first limit where the outline is below
    # its own, and below the second where the completion is. So one of them makes the answer unsure.
    limits = outline.unsure_below * completion.iou, outline.iou * completion.unsure_below
    return completion._replace(iou=iou, unsure_below=max(limits))


def no_part(part: str, name: str) -> InputError:
    """Returns the error for a model without a completer or outliner, to raise."""
    return InputError(
        f"{name} has no {part}; put one in, such as that of photos-small, with python -m "
        f"r2sm_jax.export MODEL --{part} photos-small --out DIR"
    )
