"""The web page of `demo`: a photo and a sentence in; masks, their correction and a dataset out.

Needs gradio (`pip install 'r2sm_jax[demo]'`). What a visitor has is a `Session` (page_session.py).
Every control makes another session of it, and `Page.render` shows that.
"""

import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np

from r2sm_jax.data import masks
from r2sm_jax.data.annotations import write_dataset
from r2sm_jax.data.sheet import OCCLUDED, VISIBLE
from r2sm_jax.errors import InputError
from r2sm_jax.inference.given_masks import read_mask_file
from r2sm_jax.inference.page_session import (
    LAYER_ALPHA,
    Click,
    Session,
    brush,
    brush_hidden,
    draw,
    draw_canvas,
    read_layer,
    to_photo_point,
)
from r2sm_jax.inference.page_text import (
    START,
    TYPE_CHOICES,
    describe_saved,
    describe_session,
    name_annotations,
)
from r2sm_jax.inference.prediction import Prediction
from r2sm_jax.inference.predictor import EncodedImage, Predictor, TruncatedQuery

TITLE = "Which mask do you mean?"
INTRODUCTION = f"# {TITLE}\nThe words decide: the visible part of a thing, or its complete shape."
MAX_CHARACTERS = 10_000
KEEP_SECONDS = 3600
"""Uploads and downloads are deleted after this time. A visitor's photos and annotations stay as
long as the page is open, and as long as this once it is closed."""
MAX_SESSIONS = 64
NUM_ENCODED = 4
"""Photos whose features are kept, so that the next sentence or click is answered sooner."""

CANVAS_HEIGHT = 640
"""Pixels of the screen."""
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


class Page:
    """The page and what its controls do.

    Every method that a control calls takes the session, and returns the updates of components.
    """

    def __init__(self, predictor: Predictor, folder: Path):
        self.predictor = predictor
        self.folder = folder
        self.components: dict[str, Any] = {}
        self.encode = lru_cache(maxsize=NUM_ENCODED)(self._encode)

    def _encode(self, path: Path) -> EncodedImage:
        return self.predictor.encode(path)

    # What controls do.

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
        sentence = sentence or ""
        if len(sentence) > MAX_CHARACTERS:
            raise gr.Error("The sentence is too long.", print_exception=False)
        with errors_shown(session.photo.path):
            prediction = self.predict(session, sentence, layers)
        return self.render(session.with_answer(prediction))

    def predict(self, session: Session, sentence: str, layers: Layers) -> Prediction:
        """The prediction for a sentence, and for the mask or the click that goes with it."""
        photo = session.photo
        assert photo is not None  # `segment` waits for one
        image = self.encode(photo.path)
        if session.draft is not None:
            mask = self.brushed_mask(session, layers)
            (prediction,) = self.predictor.predict([sentence], image=image, masks=[mask])
            return prediction
        (prediction,) = self.predictor.predict([sentence], image=image)
        if not session.clicks:
            return prediction
        x, y = to_photo_point(photo, session.clicks[-1])
        return self.pick_instance(prediction, image, x, y)

    def pick_instance(
        self, prediction: Prediction, image: EncodedImage, x: float, y: float
    ) -> Prediction:
        """The prediction about the one instance under a click, in pixels of the photo.

        Of several the surest counts. Raises InputError if there is none.
        """
        under_click = [i for i in prediction.instances if i.modal[int(y), int(x)]]
        if not under_click:
            raise InputError(
                "the click is on nothing that the sentence means; click on what shows of it, or "
                "say it in other words"
            )
        instance = under_click[0]
        if self.predictor.completer is not None:
            (completed,) = self.predictor.predict(
                [prediction.query], image=image, masks=[instance.modal]
            )
            return completed
        return replace(
            prediction,
            modal=instance.modal,
            amodal=instance.amodal,
            score=instance.confidence / instance.score,
            instances=(instance,),
        )

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

    def click(self, session: Session, sentence: str | None, event: gr.SelectData) -> Updates:
        """Answers the sentence for what was clicked."""
        x, y = event.index
        session = session.with_click(Click(int(x), int(y)))
        if not (sentence or "").strip():
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
            write_dataset(session.annotations, work / "annotations", f"annotated on {TITLE!r}")
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

    def build(self) -> gr.Blocks:
        """Lays out the page."""
        with gr.Blocks(
            title=TITLE, analytics_enabled=False, delete_cache=(600, KEEP_SECONDS)
        ) as page:
            session = gr.State(Session(), delete_callback=delete_photos)
            self.components["session"] = session
            gr.Markdown(INTRODUCTION)
            with gr.Row():
                with gr.Column(scale=4, min_width=300):
                    self.lay_out_controls()
                with gr.Column(scale=7, min_width=300):
                    self.lay_out_picture()
            self.connect_controls()
        return page

    def place(self, component: gr.components.Component) -> None:
        """Makes a component known by its `elem_id`."""
        assert component.elem_id is not None
        self.components[component.elem_id] = component

    def lay_out_controls(self) -> None:
        """What is asked for, and the annotations."""
        # A file component: gr.Image would convert the upload, and read addresses.
        self.place(gr.File(label="Image", file_types=["image"], elem_id="upload"))
        self.place(
            gr.Textbox(
                label="What do you want?",
                placeholder="the red mug, hidden parts included",
                elem_id="query",
            )
        )
        self.place(gr.Button("Segment", variant="primary", elem_id="segment"))
        self.place(
            gr.Radio(
                TYPE_CHOICES,
                label="The sentence asks for",
                info="Choose the other one where the decision is wrong.",
                visible=False,
                elem_id="mask_type",
            )
        )
        self.place(gr.Textbox(label="Class", placeholder="mug", elem_id="category"))
        self.place(gr.Button("Add to annotations", interactive=False, elem_id="add"))
        self.place(gr.Radio([], label="Annotations", elem_id="kept"))
        with gr.Row():
            self.place(gr.Button("Remove the chosen one", interactive=False, elem_id="remove"))
            self.place(gr.Button("Save all (ZIP)", interactive=False, elem_id="save"))
        self.place(gr.HTML(elem_id="saved"))
        self.place(
            gr.DownloadButton(
                "Download annotations.zip", variant="primary", visible=False, elem_id="dataset"
            )
        )

    def lay_out_picture(self) -> None:
        """The answer, and the brush in its place."""
        self.place(gr.HTML(START, elem_id="decision"))
        self.place(gr.Image(show_label=False, interactive=False, elem_id="stage"))
        self.place(
            gr.ImageEditor(
                show_label=False,
                visible=False,
                sources=[],
                transforms=[],
                layers=False,
                brush=brush_of(VISIBLE),
                format="png",
                fixed_canvas=True,
                height=CANVAS_HEIGHT,
                elem_id="canvas",
            )
        )
        with gr.Row():
            self.place(gr.Button("Brush the visible part", visible=False, elem_id="brush_visible"))
            self.place(
                gr.UploadButton(
                    "Upload the visible part",
                    file_types=["image", ".json"],
                    visible=False,
                    elem_id="brush_file",
                )
            )
            self.place(gr.Button("Correct the hidden part", visible=False, elem_id="brush_hidden"))
            self.place(gr.Button("Clear clicks", visible=False, elem_id="clear"))
            self.place(gr.Button("Take over", variant="primary", visible=False, elem_id="finish"))
            self.place(gr.Button("Cancel", visible=False, elem_id="cancel"))
            self.place(gr.Button("Save these masks (ZIP)", visible=False, elem_id="save_masks"))
            self.place(
                gr.DownloadButton(
                    "Download masks.zip", variant="primary", visible=False, elem_id="masks"
                )
            )

    def connect_controls(self) -> None:
        """Says which method each control calls."""
        component = self.components
        self.connect(component["upload"].upload, self.open_photo, "upload").then(
            **self.call(self.answer_waiting, "query")
        )
        self.connect(component["upload"].clear, self.close_photo)
        self.connect(component["segment"].click, self.segment, "query", "canvas")
        self.connect(component["query"].submit, self.segment, "query", "canvas")
        # Every click counts, also one that comes while another is answered.
        self.connect(component["stage"].select, self.click, "query", trigger_mode="multiple")
        self.connect(component["clear"].click, self.clear_clicks)
        self.connect(component["mask_type"].input, self.choose_type, "mask_type")
        self.connect(component["brush_visible"].click, self.brush_visible)
        self.connect(component["brush_file"].upload, self.brush_file, "brush_file")
        self.connect(component["brush_hidden"].click, self.brush_hidden)
        self.connect(component["canvas"].clear, self.empty_canvas)
        self.connect(component["finish"].click, self.finish_brush, "canvas")
        self.connect(component["cancel"].click, self.cancel_brush)
        self.connect(component["save_masks"].click, self.save_masks)
        self.connect(component["add"].click, self.add, "category", "canvas")
        self.connect(component["remove"].click, self.remove, "kept")
        self.connect(component["save"].click, self.save)

    def connect(
        self,
        trigger: Callable[..., Any],
        action: Callable[..., Updates],
        *inputs: str,
        **options: Any,
    ) -> Any:
        """Calls a method with the session and the values of some components at an event."""
        return trigger(**self.call(action, *inputs), **options)

    def call(self, action: Callable[..., Updates], *inputs: str) -> dict[str, Any]:
        """The arguments of an event that calls a method, as `connect`."""

        @wraps(action)
        def update(*values: Any) -> Any:
            updates = action(*values)
            if not updates:
                return gr.skip()
            return {self.components[name]: value for name, value in updates.items()}

        return {
            "fn": update,
            "inputs": [self.components[name] for name in ("session", *inputs)],
            "outputs": list(self.components.values()),
            "api_visibility": "private",
            # Without it, all components would flicker, and show errors.
            "show_progress_on": self.components["decision"],
            # One action at a time: two at once would begin with the same session, and the later
            # one would undo the other.
            "concurrency_id": "session",
            "concurrency_limit": 1,
        }


def launch(
    predictor: Predictor, folder: Path, *, host: str, port: int, max_upload_mb: int
) -> gr.Blocks:
    """Serves the page in the background and prints its address; files go into `folder`.

    Raises OSError if the address cannot be opened.
    """
    warnings.simplefilter("ignore", TruncatedQuery)  # the page shows what was not read
    page = Page(predictor, folder).build().queue(max_size=32, api_open=False)
    if ":" in host:
        host = f"[{host.strip('[]')}]"  # an IPv6 address, as URLs have it
    fonts = ["system-ui", "sans-serif"]  # gradio's own theme loads fonts from another host
    page.launch(
        server_name=host,
        server_port=port or None,
        allowed_paths=[],
        quiet=True,
        max_file_size=f"{max_upload_mb}mb",
        state_session_capacity=MAX_SESSIONS,
        prevent_thread_lock=True,
        theme=gr.themes.Default(primary_hue="blue", font=fonts, font_mono=["monospace"]),
        footer_links=[],
        share=False,
        ssr_mode=False,
    )
    print(f"http://{host}:{page.server_port}", flush=True)
    return page
