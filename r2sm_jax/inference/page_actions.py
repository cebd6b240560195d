"""What the controls of the web page do, and what the page then shows.

Every action takes the visitor's `Session` (page_session.py) and the values of some components, and
returns updates of components: those of `PageActions.render`, which shows another session.
"""

import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.annotations import write_dataset
from r2sm_jax.data.masks import Mask
from r2sm_jax.data.sheet import OCCLUDED, VISIBLE
from r2sm_jax.errors import InputError
from r2sm_jax.inference.given_masks import read_mask_file
from r2sm_jax.inference.page_session import (
    LAYER_ALPHA,
    Session,
    brush,
    brush_hidden,
    draw,
    draw_canvas,
    read_click,
    read_layer,
)
from r2sm_jax.inference.page_text import describe_saved, describe_session, name_annotations
from r2sm_jax.inference.prediction import Prediction
from r2sm_jax.inference.predictor import EncodedImage, Predictor
from r2sm_jax.query import Click

MAX_CHARACTERS = 10_000
KEEP_SECONDS = 3600
"""Uploads and downloads are deleted after this time. A visitor's photos and annotations stay as
long as the page is open, and as long as this once it is closed."""
NUM_ENCODED = 4
"""Photos whose features are kept, so that the next sentence or click is answered sooner."""
DESCRIPTION = "annotated on the web page of r2sm_jax"
"""Of saved data sets."""
BRUSH_SIZE = 24
"""Pixels of the preview, until the visitor chooses another one."""

Layers = dict[str, Any] | None
"""What gradio's image editor gives: `background`, `layers` and `composite`."""
Updates = dict[str, Any]
"""New values and properties of components, by their `elem_id`; "session" is the visitor's state."""


def brush_of(colour: tuple[int, int, int]) -> gr.Brush:
    """A brush that paints in one colour, through which the photo can be seen."""
    red, green, blue = colour
    paint = f"rgba({red}, {green}, {blue}, {LAYER_ALPHA / 255:.2f})"
    return gr.Brush(default_size=BRUSH_SIZE, colors=[paint], color_mode="fixed")


def canvas_value(background: np.ndarray, layer: np.ndarray) -> dict[str, Any]:
    """What the brush shows: a picture, and above it the mask as a layer that is painted."""
    return {"background": background, "layers": [layer], "composite": None}


def painted_layer(layers: Layers) -> np.ndarray | None:
    """The layer `[h w 4]` that was painted; None where the page has sent none, so that nothing was
    painted since the brush was opened."""
    if layers is None or not layers["layers"]:
        return None
    return np.asarray(layers["layers"][0])


def pack(folder: Path) -> str:
    """Moves a folder into a ZIP file beside it. Returns the file's path."""
    archive = shutil.make_archive(str(folder), "zip", folder)
    shutil.rmtree(folder)
    return archive


def delete_photos(session: Session) -> None:
    """Deletes the photos of a visitor who has left."""
    if session.folder is not None:
        shutil.rmtree(session.folder, ignore_errors=True)


@contextmanager
def errors_shown(*paths: str | Path | None) -> Iterator[None]:
    """Shows errors on the page, without these paths of the server."""
    try:
        yield
    except InputError as error:
        message = str(error)
        for path in filter(None, paths):
            message = message.replace(str(path), "the file")
        raise gr.Error(message, print_exception=False) from None
    except OSError:  # its message names a path of the server
        message = "A file is gone, or cannot be stored now; choose it again, or try later."
        raise gr.Error(message, print_exception=False) from None


def pick_instance(prediction: Prediction, click: Click) -> Prediction:
    """The prediction about the one instance under a click. Of several the surest counts.

    Raises InputError if there is none.
    """
    row = int(click.y)
    column = int(click.x)
    under_click = [i for i in prediction.instances if i.modal[row, column]]
    if not under_click:
        raise InputError(
            "the click is on nothing that the sentence means; click on what shows of it, or say it "
            "in other words"
        )
    instance = under_click[0]
    return replace(
        prediction,
        modal=instance.modal,
        amodal=instance.amodal,
        score=instance.confidence / instance.score,  # the predicted IoU of its mask
        instances=(instance,),
    )


class PageActions:
    """Answers visitors with one predictor. Their files go into `folder`."""

    def __init__(self, predictor: Predictor, folder: Path):
        self.predictor = predictor
        self.folder = folder
        self.encode = lru_cache(maxsize=NUM_ENCODED)(self._encode)

    def _encode(self, path: Path) -> EncodedImage:
        return self.predictor.encode(path)

    def open_photo(self, session: Session, upload: str | None) -> Updates:
        """Shows an uploaded photo."""
        if upload is None:
            return self.render(session)
        with errors_shown(upload):
            session = session.with_photo(Path(upload), self.folder)
        return self.render(session)

    def answer_waiting(self, session: Session, sentence: str | None) -> Updates:
        """Answers the sentence that was sent before its photo was there, if there is one."""
        if session.photo is None or not session.is_waiting:
            return {}
        return self.segment(session, sentence, None)

    def close_photo(self, session: Session) -> Updates:
        """Takes the photo away."""
        return self.render(session.without_photo())

    def segment(self, session: Session, sentence: str | None, layers: Layers) -> Updates:
        """Answers a sentence about the photo, and what was brushed or clicked in it.

        Raises gradio's Error, which the page shows, for what cannot be used.
        """
        if session.photo is None:
            return self.render(replace(session, is_waiting=True))
        sentence = (sentence or "").strip()
        if len(sentence) > MAX_CHARACTERS:
            raise gr.Error("The sentence is too long.", print_exception=False)
        with errors_shown(session.photo.path):
            prediction = self.predict(session, sentence, layers)
        return self.render(session.with_answer(prediction))

    def predict(self, session: Session, sentence: str, layers: Layers) -> Prediction:
        """The prediction for a sentence, and for the mask, the box or the clicks that go with it.

        Raises InputError for what cannot be used.
        """
        photo = session.photo
        assert photo is not None  # `segment` waits for one
        image = self.encode(photo.path)
        if session.draft is not None:
            mask = self.brushed_mask(session, layers)
            (prediction,) = self.predictor.predict([sentence], image=image, masks=[mask])
            is_completed = True
        elif not session.clicks and session.box is None:
            (prediction,) = self.predictor.predict([sentence], image=image)
            return prediction
        elif not self.predictor.has_prompts:
            (prediction,) = self.predictor.predict([sentence], image=image)
            prediction = pick_instance(prediction, session.clicks[-1])
            is_completed = False
        else:
            points = [(click.x, click.y, click.is_positive) for click in session.clicks]
            (prediction,) = self.predictor.predict(
                [sentence], image=image, boxes=[session.box], points=[points or None]
            )
            is_completed = self.predictor.outliner is not None

        # `predict` completes given masks and those of the outliner, but knows no other object.
        neighbours = session.neighbours_of(prediction.modal)
        if is_completed and neighbours is None:
            return prediction
        return self.complete(prediction, image, neighbours)

    def complete(
        self, prediction: Prediction, image: EncodedImage, neighbours: Mask | None
    ) -> Prediction:
        """The prediction with the complete mask of the completer, if the model has one.

        Args:
            neighbours: the visible masks of other objects; None where they are not known.
        """
        if self.predictor.completer is None or not prediction.modal.any():
            return prediction
        (amodal,) = self.predictor.complete(
            [prediction.modal], neighbours=[neighbours], image=image
        )
        if prediction.mask_type == "amodal":
            # The score is that of the complete mask that the decoder found.
            prediction = replace(prediction, score=None)
        return replace(prediction, amodal=amodal)

    def brushed_mask(self, session: Session, layers: Layers) -> np.ndarray:
        """The visible mask `[H W]` that was brushed. Raises InputError for an empty one."""
        assert session.draft is not None and session.photo is not None
        mask = masks.decode(session.draft)
        layer = painted_layer(layers)
        if layer is not None:
            mask = brush(mask, read_layer(layer, session.photo), session.photo)
        if not mask.any():
            raise InputError("nothing is brushed yet; paint over what shows of the object")
        return mask

    def click(
        self, session: Session, sentence: str | None, kind: str | None, event: gr.SelectData
    ) -> Updates:
        """Answers for what was clicked.

        A model that reads no clicks needs a sentence, whose instances the click chooses from.
        """
        if session.photo is None:
            return {}
        x, y = event.index
        click = read_click(session.photo, int(x), int(y), is_positive=kind != "beside")
        session = session.with_click(click, is_corner=kind == "corner")
        if not session.has_prompt or (
            not (sentence or "").strip() and not self.predictor.has_prompts
        ):
            return self.render(session)
        return self.segment(session, sentence, None)

    def clear_clicks(self, session: Session) -> Updates:
        """Takes all clicks away."""
        return self.render(replace(session, clicks=(), corners=()))

    def choose_type(self, session: Session, mask_type: str) -> Updates:
        """Corrects the decision."""
        if session.answer is None or mask_type not in ("modal", "amodal"):
            return self.render(session)
        answer = replace(session.answer, mask_type=mask_type)
        return self.render(replace(session, answer=answer))

    def brush_visible(self, session: Session) -> Updates:
        """Opens the brush for the visible part, which begins as that of the answer."""
        if session.photo is None:
            return self.render(session)
        draft = masks.encode(np.zeros(session.photo.size, bool))
        if session.answer is not None:
            draft = session.answer.visible
        return self.open_brush(replace(session, draft=draft, corrects_hidden=False))

    def brush_file(self, session: Session, upload: str) -> Updates:
        """Opens the brush for the visible part, which begins as an uploaded mask."""
        if session.photo is None:
            raise gr.Error("There is no image yet; choose one.", print_exception=False)
        with errors_shown(upload):
            mask = read_mask_file(Path(upload), session.photo.size)
        return self.open_brush(replace(session, draft=masks.encode(mask), corrects_hidden=False))

    def brush_hidden(self, session: Session) -> Updates:
        """Opens the brush for the hidden part of the answer."""
        if session.answer is None:
            return self.render(session)
        return self.open_brush(replace(session, draft=None, corrects_hidden=True))

    def open_brush(self, session: Session) -> Updates:
        """Shows the brush with the session's mask."""
        background, layer = draw_canvas(session)
        return self.render(session, canvas=canvas_value(background, layer))

    def empty_canvas(self, session: Session) -> Updates:
        """Begins the brushed mask anew."""
        if not session.is_brushing:
            return self.render(session)
        background, layer = draw_canvas(session)
        return self.render(session, canvas=canvas_value(background, np.zeros_like(layer)))

    def finish_brush(self, session: Session, layers: Layers) -> Updates:
        """Takes over the brushed hidden part, and closes the brush."""
        return self.render(self.with_correction(session, layers))

    def with_correction(self, session: Session, layers: Layers) -> Session:
        """The session without a brush. If it was for the hidden part, that is taken over."""
        answer = session.answer
        layer = painted_layer(layers)
        if session.corrects_hidden and answer is not None and layer is not None:
            assert session.photo is not None  # an answer is about a photo
            answer = brush_hidden(answer, read_layer(layer, session.photo), session.photo)
        return replace(session, answer=answer, draft=None, corrects_hidden=False)

    def cancel_brush(self, session: Session) -> Updates:
        """Closes the brush; nothing changes."""
        return self.render(replace(session, draft=None, corrects_hidden=False))

    def add(self, session: Session, category: str | None, layers: Layers) -> Updates:
        """Keeps the answer as an annotation."""
        with errors_shown():
            session = self.with_correction(session, layers).with_annotation(category or "")
        # The next object may be of another class.
        return self.render(session) | {"category": ""}

    def remove(self, session: Session, number: int | None) -> Updates:
        """Drops one of the annotations."""
        kept = [a for index, a in enumerate(session.annotations) if index != number]
        return self.render(replace(session, annotations=tuple(kept)))

    def save_masks(self, session: Session) -> Updates:
        """Writes the masks and the JSON of the answer as a ZIP file, and offers it."""
        if session.answer is None or session.photo is None:
            return {}
        work = self.make_download_folder()
        with errors_shown(work, session.photo.path):
            image = self.encode(session.photo.path).pixels
            session.answer.to_prediction().write(work / "masks", image)
            archive = pack(work / "masks")
        return {"masks": gr.update(value=archive, visible=True)}

    def save(self, session: Session) -> Updates:
        """Writes all annotations as a ZIP file, offers it, and says how to use it."""
        work = self.make_download_folder()
        with errors_shown(work):
            write_dataset(session.annotations, work / "annotations", DESCRIPTION)
            archive = pack(work / "annotations")
        return {
            "saved": describe_saved(session.annotations),
            "dataset": gr.update(value=archive, visible=True),
        }

    def make_download_folder(self) -> Path:
        """A path that cannot be guessed, for a download. Old ones are deleted."""
        for old in self.folder.glob("download-*"):
            if time.time() - old.stat().st_mtime > KEEP_SECONDS:
                shutil.rmtree(old, ignore_errors=True)
        return self.folder / f"download-{secrets.token_hex(16)}"

    # What is shown.

    def render(self, session: Session, canvas: Any = None) -> Updates:
        """The session, and an update of each component that shows it.

        Args:
            canvas: the value of the brush where it opens. It stays as it is otherwise, since it
                holds strokes that the session does not know.
        """
        answer = session.answer
        has_answer = answer is not None
        is_brushing = session.is_brushing
        can_brush = session.photo is not None and not is_brushing
        # A given visible mask is of use only where it is completed.
        can_complete = can_brush and self.predictor.completer is not None
        has_clicks = bool(session.clicks or session.corners)
        num_kept = len(session.annotations)
        stage = gr.update(visible=False)
        if not is_brushing:
            stage = gr.update(value=draw(session), visible=True)
        canvas_update = gr.update(visible=is_brushing)
        if canvas is not None:
            colour = OCCLUDED if session.corrects_hidden else VISIBLE
            height, width = canvas["background"].shape[:2]
            canvas_update = gr.update(
                value=canvas,
                visible=True,
                brush=brush_of(colour),
                # Otherwise the layer is placed on a canvas of another size, beside the background.
                canvas_size=(width, height),
            )
        return {
            "session": session,
            "decision": describe_session(session),
            "mask_type": gr.update(value=answer and answer.mask_type, visible=has_answer),
            "stage": stage,
            "click_kind": gr.update(visible=can_brush and self.predictor.has_prompts),
            "canvas": canvas_update,
            "brush_visible": gr.update(visible=can_complete),
            "brush_file": gr.update(visible=can_complete),
            "brush_hidden": gr.update(visible=can_brush and has_answer),
            "clear": gr.update(visible=can_brush and has_clicks),
            "finish": gr.update(visible=session.corrects_hidden),
            "cancel": gr.update(visible=is_brushing),
            "save_masks": gr.update(visible=can_brush and has_answer),
            "add": gr.update(interactive=has_answer),
            "kept": gr.update(choices=name_annotations(session.annotations), value=None),
            "remove": gr.update(interactive=num_kept > 0),
            "save": gr.update(interactive=num_kept > 0),
            # What was offered before does not hold what has changed since.
            "masks": gr.update(visible=False),
            "saved": "",
            "dataset": gr.update(visible=False),
        }
