"""The web page of `demo`: image and sentence in; decision, overlay and a ZIP of masks out.

Needs gradio (`pip install 'r2sm_jax[demo]'`).
"""

import secrets
import shutil
import time
import warnings
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import gradio as gr
import numpy as np
from jaxtyping import UInt8
from PIL import Image

from r2sm_jax.data.images import open_image
from r2sm_jax.data.masks import Mask
from r2sm_jax.data.sheet import overlay
from r2sm_jax.errors import InputError
from r2sm_jax.inference.prediction import Prediction
from r2sm_jax.inference.predictor import Predictor, TruncatedQuery

TITLE = "Which mask do you mean?"
INTRODUCTION = f"# {TITLE}\nThe words decide: the visible part of a thing, or its complete shape."
START = "Choose an image, then say what you want."
VIEWS = ("modal", "amodal", "occluded")
PREVIEW_SIDE = 960
"""Pixels of the longer side of the overlay."""
MAX_CHARACTERS = 10_000
KEEP_SECONDS = 3600
"""Uploads, downloads and sessions are deleted after this time."""
MAX_SESSIONS = 64


class Answer(NamedTuple):
    """What the page keeps to draw another view: a preview of the image, and masks of its size."""

    image: UInt8[np.ndarray, "h w 3"]
    modal: Mask
    amodal: Mask

    def draw(self, view: str) -> UInt8[np.ndarray, "h w 3"]:
        """Paints one of `VIEWS` over the image."""
        nothing = np.zeros_like(self.modal)
        hidden = self.amodal & ~self.modal
        if view == "modal":
            return overlay(self.image, self.modal, nothing, "modal")
        if view == "amodal":
            return overlay(self.image, self.modal, hidden, "amodal")
        return overlay(self.image, nothing, hidden, None)


def make_answer(image: UInt8[np.ndarray, "H W 3"], prediction: Prediction) -> Answer:
    """Shrinks an image and its masks to the size of the preview."""
    height, width = image.shape[:2]
    scale = min(1.0, PREVIEW_SIDE / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))

    def shrink(mask: np.ndarray) -> np.ndarray:
        return np.array(Image.fromarray(mask).resize(size, Image.Resampling.NEAREST))

    preview = np.array(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC))
    return Answer(preview, shrink(prediction.modal), shrink(prediction.amodal))


def describe(prediction: Prediction) -> str:
    """The decision in HTML. Visitors' words are escaped."""
    if prediction.mask_type == "amodal":
        meaning = "the complete shape, hidden parts included"
    else:
        meaning = "the visible part"
    lines = [
        f"<strong>{prediction.mask_type}</strong>: {meaning}",
        f"probability of amodal {prediction.amodal_probability:.3f}, predicted IoU "
        f"{prediction.score:.2f}, {prediction.mask.mean():.1%} of the image, instances: "
        f"{len(prediction.instances)}",
    ]
    if not prediction.mask.any():
        lines.append(f"nothing of the kind is seen (probability {prediction.presence:.3f})")
    if prediction.unread:
        lines.append(f"too long; not read: {escape(prediction.unread[:80])}")
    return "<br>".join(lines)


def write_zip(prediction: Prediction, image: UInt8[np.ndarray, "H W 3"], folder: Path) -> str:
    """Writes masks and JSON as a ZIP file whose path cannot be guessed; returns the path."""
    for old in folder.glob("answer-*"):
        if time.time() - old.stat().st_mtime > KEEP_SECONDS:
            shutil.rmtree(old, ignore_errors=True)
    work = folder / f"answer-{secrets.token_hex(16)}"
    prediction.write(work / "masks", image)
    return shutil.make_archive(str(work / "masks"), "zip", work / "masks")


class Page:
    """The page and what its controls do."""

    def __init__(self, predictor: Predictor, folder: Path):
        self.predictor = predictor
        self.folder = folder

    def segment(
        self, path: str | None, query: str | None
    ) -> tuple[Answer, str, dict[str, Any], UInt8[np.ndarray, "h w 3"], str]:
        """Predicts one query: what is kept, the decision, the view, the overlay and the ZIP file.

        Raises gradio's Error, which the page shows, for an image or a query that cannot be used.
        """
        if path is None:
            raise gr.Error("There is no image yet; choose one.", print_exception=False)
        query = query or ""
        if len(query) > MAX_CHARACTERS:
            raise gr.Error("The sentence is too long.", print_exception=False)
        try:
            image = open_image(Path(path).read_bytes())
            (prediction,) = self.predictor.predict([query], image=self.predictor.encode(image))
        except (InputError, OSError) as error:
            # An OSError names a path of the server.
            message = str(error) if isinstance(error, InputError) else "the upload is gone"
            raise gr.Error(message, print_exception=False) from None

        answer = make_answer(image, prediction)
        view = prediction.mask_type or "modal"
        try:
            archive = write_zip(prediction, image, self.folder)
        except (InputError, OSError):
            # The disk is full; both messages name a path of the server.
            message = "The masks cannot be stored now; try again later."
            raise gr.Error(message, print_exception=False) from None
        radio = gr.update(value=view, visible=True)
        return answer, describe(prediction), radio, answer.draw(view), archive

    def show(self, answer: Answer | None, view: str | None) -> Any:
        """Draws another view of the last prediction."""
        if answer is None or view not in VIEWS:
            return gr.skip()
        return answer.draw(view)

    def build(self) -> gr.Blocks:
        """Lays out the page."""
        with gr.Blocks(
            title=TITLE, analytics_enabled=False, delete_cache=(600, KEEP_SECONDS)
        ) as page:
            answer = gr.State(None, time_to_live=KEEP_SECONDS)
            gr.Markdown(INTRODUCTION)
            with gr.Row():
                with gr.Column(scale=4, min_width=300):
                    # A file component: gr.Image would convert the upload, and read addresses.
                    image = gr.File(label="Image", file_types=["image"], elem_id="upload")
                    query = gr.Textbox(
                        label="What do you want?",
                        placeholder="the red mug, hidden parts included",
                        elem_id="query",
                    )
                    button = gr.Button("Segment", variant="primary", elem_id="segment")
                with gr.Column(scale=7, min_width=300):
                    decision = gr.HTML(START, elem_id="decision")
                    view = gr.Radio(
                        list(VIEWS), value="modal", label="Mask", visible=False, elem_id="view"
                    )
                    stage = gr.Image(show_label=False, interactive=False, elem_id="overlay")
                    archive = gr.DownloadButton("Download masks (ZIP)", elem_id="zip")

            outputs = [answer, decision, view, stage, archive]
            gr.on(
                [button.click, query.submit],
                self.segment,
                [image, query],
                outputs,
                api_visibility="private",
            )
            view.input(self.show, [answer, view], stage, api_visibility="private")
        return page


def launch(
    predictor: Predictor, folder: Path, *, host: str, port: int, max_upload_mb: int
) -> gr.Blocks:
    """Serves the page in the background and prints its address; files go into `folder`.

    Raises InputError if the address cannot be opened.
    """
    warnings.simplefilter("ignore", TruncatedQuery)  # the page shows what was not read
    page = Page(predictor, folder).build().queue(max_size=32, api_open=False)
    if ":" in host:
        host = f"[{host.strip('[]')}]"  # an IPv6 address, as URLs have it
    fonts = ["system-ui", "sans-serif"]  # gradio's own theme loads fonts from another host
    try:
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
    except OSError:
        raise InputError(
            f"--port {port} at {host} cannot be opened; give another --port or --host"
        ) from None
    print(f"http://{host}:{page.server_port}", flush=True)
    return page
