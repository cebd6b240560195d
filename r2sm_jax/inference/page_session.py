"""What the web page knows of one visitor: a photo, clicks, the answer, and annotations to save.

The page shows a photo as a preview of at most `PREVIEW_SIDE` pixels, which is what the brush paints
on. Clicks and masks are those of the photo itself. Masks are RLEs, which are small; where no stroke
of a brush went, they stay as they are to the pixel.
"""

import hashlib
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Bool, UInt8
from PIL import Image, ImageDraw

from r2sm_jax.data import masks
from r2sm_jax.data.annotations import Annotation
from r2sm_jax.data.images import open_image
from r2sm_jax.data.masks import RLE, Mask
from r2sm_jax.data.sheet import OCCLUDED, VISIBLE, overlay
from r2sm_jax.data.validation import is_text
from r2sm_jax.errors import InputError
from r2sm_jax.inference.prediction import InstanceMask, Prediction
from r2sm_jax.models.r2sm import UNSURE_BELOW
from r2sm_jax.query import Click, MaskType

PREVIEW_SIDE = 960
"""Pixels of the longer side of the preview, at most."""
LAYER_ALPHA = 140
"""Of 255: how much a layer that is brushed covers the photo."""
MARK_COLOURS = {True: (30, 170, 70), False: (215, 40, 40)}
"""Of clicks on the object, and of clicks beside it."""

Preview = UInt8[np.ndarray, "h w 3"]
PreviewMask = Bool[np.ndarray, "h w"]


@dataclass(frozen=True)
class Photo:
    """The photo that the visitor looks at."""

    path: Path
    """A copy of the uploaded file, named by its content."""
    name: str
    """The name of the uploaded file."""
    size: tuple[int, int]
    """Height and width in pixels, upright."""
    preview: Preview


@dataclass(frozen=True)
class Answer:
    """The prediction for one sentence, with what the visitor corrected."""

    text: str
    mask_type: MaskType
    amodal_probability: float | None
    score: float | None
    """Predicted IoU of the mask; None where the visitor gave or corrected it, or the completer
    drew it."""
    presence: float
    num_instances: int
    unread: str
    visible: RLE
    complete: RLE
    is_given: bool = False
    """Whether the visible mask is the visitor's own."""
    is_corrected: bool = False
    """Whether the visitor brushed the hidden part."""
    unsure_below: float = UNSURE_BELOW
    """A score below this is called unsure."""

    @classmethod
    def of(cls, prediction: Prediction) -> "Answer":
        """Keeps of a prediction what the page needs."""
        return cls(
            text=prediction.query,
            mask_type=prediction.mask_type or "modal",
            amodal_probability=prediction.amodal_probability,
            score=prediction.score,
            presence=prediction.presence,
            num_instances=len(prediction.instances),
            unread=prediction.unread,
            visible=masks.encode(prediction.modal),
            complete=masks.encode(prediction.amodal),
            is_given=prediction.is_given,
            unsure_below=prediction.unsure_below,
        )

    @property
    def is_unsure(self) -> bool:
        """Whether the score says that the mask is probably not what was meant."""
        return self.score is not None and self.score < self.unsure_below

    @property
    def mask(self) -> RLE:
        """The mask that the sentence asks for."""
        return self.complete if self.mask_type == "amodal" else self.visible

    def hidden(self) -> Mask:
        """The hidden part."""
        return masks.decode(self.complete) & ~masks.decode(self.visible)

    def to_prediction(self) -> Prediction:
        """The prediction with the visitor's corrections, about one instance."""
        modal = masks.decode(self.visible)
        amodal = masks.decode(self.complete)
        mask = amodal if self.mask_type == "amodal" else modal
        return Prediction(
            query=self.text,
            mask_type=self.mask_type,
            amodal_probability=self.amodal_probability,
            score=self.score,
            modal=modal,
            amodal=amodal,
            instances=(InstanceMask(1.0, 1.0, mask, modal, amodal),),
            presence=self.presence,
            unread=self.unread,
            is_given=self.is_given,
            unsure_below=self.unsure_below,
        )


@dataclass(frozen=True)
class Session:
    """One visitor's state. An action makes another session of it."""

    folder: Path | None = None
    """Where the visitor's photos lie; None before the first."""
    photo: Photo | None = None
    is_waiting: bool = False
    """A sentence was sent before its photo was there."""
    clicks: tuple[Click, ...] = ()
    """In pixels of the photo."""
    corners: tuple[Click, ...] = ()
    """Of the box: none, one or two."""
    draft: RLE | None = None
    """The visible mask that is being brushed; None while it is not."""
    corrects_hidden: bool = False
    """Whether the hidden part of the answer is being brushed."""
    answer: Answer | None = None
    annotations: tuple[Annotation, ...] = ()

    @property
    def is_brushing(self) -> bool:
        return self.draft is not None or self.corrects_hidden

    def with_photo(self, upload: Path, parent: Path) -> "Session":
        """Opens an uploaded photo. Annotations of earlier ones stay.

        Args:
            upload: the uploaded file, which may be deleted later.
            parent: where the visitor's folder is made.

        Raises InputError for a file that is no image, OSError where it cannot be read or copied.
        """
        content = upload.read_bytes()
        image = open_image(content)
        folder = self.folder
        if folder is None:
            # A name that cannot be guessed: whoever knows a path can open the file.
            folder = parent / f"session-{secrets.token_hex(16)}"
        folder.mkdir(exist_ok=True)
        path = folder / hashlib.sha256(content).hexdigest()
        path.write_bytes(content)

        height, width = image.shape[:2]
        scale = min(1.0, PREVIEW_SIDE / max(height, width))
        size = max(1, round(width * scale)), max(1, round(height * scale))
        preview = np.array(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC))
        photo = Photo(path, upload.name, (height, width), preview)
        return replace(self.without_photo(), folder=folder, photo=photo, is_waiting=self.is_waiting)

    def without_photo(self) -> "Session":
        """Closes the photo. Its annotations stay."""
        return Session(folder=self.folder, annotations=self.annotations)

    def with_click(self, click: Click, *, is_corner: bool = False) -> "Session":
        """Adds a click, or a corner of the box. A third corner begins another box."""
        if not is_corner:
            return replace(self, clicks=(*self.clicks, click))
        corners = self.corners if len(self.corners) < 2 else ()
        return replace(self, corners=(*corners, click))

    @property
    def box(self) -> tuple[float, float, float, float] | None:
        """The box `(x0, y0, x1, y1)` in pixels of the photo; None until it has two corners."""
        if len(self.corners) < 2:
            return None
        columns = sorted(corner.x for corner in self.corners)
        rows = sorted(corner.y for corner in self.corners)
        return columns[0], rows[0], columns[1], rows[1]

    def neighbours_of(self, visible: Mask) -> Mask | None:
        """The visible masks of the other objects of the photo that are annotated already, in one
        mask; None if there are none."""
        assert self.photo is not None  # a mask is one of a photo
        own = masks.encode(visible)
        union = None
        for annotation in self.annotations:
            if annotation.photo == self.photo.path and annotation.visible != own:
                other = masks.decode(annotation.visible)
                union = other if union is None else union | other
        return union

    @property
    def has_prompt(self) -> bool:
        """Whether a box, or a click on the object, says which one is meant."""
        return self.box is not None or any(click.is_positive for click in self.clicks)

    def with_answer(self, prediction: Prediction) -> "Session":
        """Shows a prediction, and closes the brush.

        Where its visible mask is that of an object whose hidden part the visitor has corrected, or
        that is annotated already, the complete mask stays what it was.
        """
        assert self.photo is not None  # a prediction is about a photo
        answer = Answer.of(prediction)
        complete = answer.complete
        for annotation in self.annotations:
            if annotation.photo == self.photo.path and annotation.visible == answer.visible:
                complete = annotation.complete
        earlier = self.answer
        if earlier is not None and earlier.is_corrected and earlier.visible == answer.visible:
            complete = earlier.complete
        if complete != answer.complete:
            answer = replace(answer, complete=complete, score=None, is_corrected=True)
        return replace(self, answer=answer, is_waiting=False, draft=None, corrects_hidden=False)

    def with_annotation(self, category: str) -> "Session":
        """Keeps the answer to be saved; the next object begins without clicks.

        Raises InputError where there is no answer or it has no mask, and for a class name that no
        file can hold.
        """
        if self.photo is None or self.answer is None:
            raise InputError("there is no answer to add yet; ask for something in the photo")
        answer = self.answer
        if not answer.text:
            raise InputError("the answer has no sentence; say what you want, and press Segment")
        if not masks.areas([answer.visible])[0]:
            raise InputError("the visible part is empty; brush it, or ask for something else")
        if category.strip() and not is_text(category):
            raise InputError("the class holds characters that cannot be saved; write it anew")
        annotation = Annotation(
            photo=self.photo.path,
            name=self.photo.name,
            text=answer.text,
            mask_type=answer.mask_type,
            visible=answer.visible,
            complete=answer.complete,
            category=category,
        )
        return replace(self, annotations=(*self.annotations, annotation), clicks=(), corners=())


# From the preview to the photo and back.


def read_click(photo: Photo, x: int, y: int, *, is_positive: bool = True) -> Click:
    """A click on a pixel of the preview, in pixels of the photo."""
    height, width = photo.preview.shape[:2]
    return Click((x + 0.5) * photo.size[1] / width, (y + 0.5) * photo.size[0] / height, is_positive)


def shrink(mask: Mask, photo: Photo) -> PreviewMask:
    """A mask of the photo at the size of its preview."""
    height, width = photo.preview.shape[:2]
    return np.array(Image.fromarray(mask).resize((width, height), Image.Resampling.NEAREST))


def draw_layer(mask: PreviewMask, colour: tuple[int, int, int]) -> UInt8[np.ndarray, "h w 4"]:
    """A layer for the brush that shows a mask."""
    layer = np.zeros((*mask.shape, 4), np.uint8)
    layer[mask] = (*colour, LAYER_ALPHA)
    return layer


def read_layer(layer: np.ndarray, photo: Photo) -> PreviewMask:
    """What is painted in a layer."""
    height, width = photo.preview.shape[:2]
    alpha = Image.fromarray(layer[..., 3])
    # Screens with more than one pixel for each of CSS may give a larger layer.
    if alpha.size != (width, height):
        alpha = alpha.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(alpha) >= LAYER_ALPHA // 2


def brush(mask: Mask, painted: PreviewMask, photo: Photo) -> Mask:
    """A mask of the photo after its layer was brushed; it changes only where the layer did."""
    size = photo.size[1], photo.size[0]

    def enlarge(preview_mask: PreviewMask) -> Mask:
        return np.array(Image.fromarray(preview_mask).resize(size, Image.Resampling.NEAREST))

    is_changed = enlarge(painted != shrink(mask, photo))
    return np.where(is_changed, enlarge(painted), mask)


def brush_hidden(answer: Answer, painted: PreviewMask, photo: Photo) -> Answer:
    """The answer with another hidden part. The visible part stays, also where it was painted over.

    Its score is None if it changed: no IoU is predicted for what a person drew.
    """
    visible = masks.decode(answer.visible)
    complete = masks.encode(brush(answer.hidden(), painted, photo) | visible)
    if complete == answer.complete:
        return answer
    return replace(answer, complete=complete, score=None, is_corrected=True)


# Pictures.


def draw(session: Session) -> Preview | None:
    """The preview with the answer and the clicks; None without a photo."""
    photo = session.photo
    if photo is None:
        return None
    picture = photo.preview
    if session.answer is not None:
        visible = shrink(masks.decode(session.answer.visible), photo)
        hidden = shrink(session.answer.hidden(), photo) & ~visible
        picture = overlay(picture, visible, hidden, session.answer.mask_type)
    if not session.clicks and not session.corners:
        return picture

    image = Image.fromarray(picture)
    pen = ImageDraw.Draw(image)
    scale = picture.shape[0] / photo.size[0]
    radius = max(4, max(picture.shape) // 120)
    marks = [*session.clicks]
    if session.box is not None:
        corners = [scale * number for number in session.box]
        pen.rectangle(corners, outline=MARK_COLOURS[True], width=radius // 2)
    else:
        marks += session.corners
    for click in marks:
        x = scale * click.x
        y = scale * click.y
        around = (x - radius, y - radius, x + radius, y + radius)
        pen.ellipse(around, MARK_COLOURS[click.is_positive], "white", radius // 3)
    return np.array(image)


def draw_canvas(session: Session) -> tuple[Preview, UInt8[np.ndarray, "h w 4"]]:
    """The background and the layer of the brush: the visible part, or the hidden one.

    While the hidden part is brushed, the background shows the visible one.
    """
    photo = session.photo
    assert photo is not None  # only a photo can be brushed
    if session.draft is not None:
        layer = shrink(masks.decode(session.draft), photo)
        return photo.preview, draw_layer(layer, VISIBLE)
    assert session.answer is not None  # only an answer has a hidden part
    visible = shrink(masks.decode(session.answer.visible), photo)
    background = overlay(photo.preview, visible, np.zeros_like(visible), "modal")
    return background, draw_layer(shrink(session.answer.hidden(), photo), OCCLUDED)
