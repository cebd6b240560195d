"""The web page of `demo`: a photo and a sentence in; masks, their correction and a data set out.

Needs gradio (`pip install 'r2sm_jax[demo]'`). This file lays the page out. What its controls do is
in page_actions.py, what it knows of a visitor in page_session.py, its words in page_text.py.
"""

import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import gradio as gr

from r2sm_jax.data.sheet import VISIBLE
from r2sm_jax.inference.decision import TruncatedQuery
from r2sm_jax.inference.page_actions import (
    KEEP_SECONDS,
    PageActions,
    Updates,
    brush_of,
    delete_photos,
)
from r2sm_jax.inference.page_session import Session
from r2sm_jax.inference.page_text import CLICK_CHOICES, START, TYPE_CHOICES
from r2sm_jax.inference.predictor import Predictor

TITLE = "Which mask do you mean?"
INTRODUCTION = f"# {TITLE}\nThe words decide: the visible part of a thing, or its complete shape."
MAX_SESSIONS = 64
CANVAS_HEIGHT = 640
"""Pixels of the screen."""


class Page:
    """The components of the page, and which action each of them calls."""

    def __init__(self, actions: PageActions):
        self.actions = actions
        self.components: dict[str, Any] = {}
        """By their `elem_id`."""

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
            gr.Radio(
                CLICK_CHOICES,
                value="on",
                label="A click on the picture is",
                visible=False,
                elem_id="click_kind",
            )
        )
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
        """Says which action each control calls."""
        actions = self.actions
        component = self.components
        self.connect(component["upload"].upload, actions.open_photo, "upload").then(
            **self.call(actions.answer_waiting, "query")
        )
        self.connect(component["upload"].clear, actions.close_photo)
        self.connect(component["segment"].click, actions.segment, "query", "canvas")
        self.connect(component["query"].submit, actions.segment, "query", "canvas")
        # Every click counts, also one that comes while another is answered.
        self.connect(
            component["stage"].select, actions.click, "query", "click_kind", trigger_mode="multiple"
        )
        self.connect(component["clear"].click, actions.clear_clicks)
        self.connect(component["mask_type"].input, actions.choose_type, "mask_type")
        self.connect(component["brush_visible"].click, actions.brush_visible)
        self.connect(component["brush_file"].upload, actions.brush_file, "brush_file")
        self.connect(component["brush_hidden"].click, actions.brush_hidden)
        self.connect(component["canvas"].clear, actions.empty_canvas)
        self.connect(component["finish"].click, actions.finish_brush, "canvas")
        self.connect(component["cancel"].click, actions.cancel_brush)
        self.connect(component["save_masks"].click, actions.save_masks)
        self.connect(component["add"].click, actions.add, "category", "canvas")
        self.connect(component["remove"].click, actions.remove, "kept")
        self.connect(component["save"].click, actions.save)

    def connect(
        self,
        trigger: Callable[..., Any],
        action: Callable[..., Updates],
        *inputs: str,
        **options: Any,
    ) -> Any:
        """Calls an action with the session and the values of some components at an event."""
        return trigger(**self.call(action, *inputs), **options)

    def call(self, action: Callable[..., Updates], *inputs: str) -> dict[str, Any]:
        """The arguments of an event that calls an action, as `connect`."""

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
    page = Page(PageActions(predictor, folder)).build().queue(max_size=32, api_open=False)
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
