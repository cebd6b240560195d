"""`python -m r2sm_jax.demo RUN|EXPORT`: a page where people try a trained segmenter.

Local by default, without analytics, version checks, fonts or scripts from elsewhere. Uploads live in a temporary
folder of this process and nowhere else is read.
"""

import os
import secrets
import socket
import sys
import tempfile
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from PIL import Image

from r2sm_jax.config import NO_HEAD
from r2sm_jax.errors import InputError, exit_cleanly
from r2sm_jax.flags import parse_flags
from r2sm_jax.predictor import CutQuery, Predictor
from r2sm_jax.runs import open_run
from r2sm_jax.tools.demo_answers import (
    Answer,
    Example,
    Photo,
    alt_text,
    ask,
    decision_html,
    error_html,
    facts_html,
    forget_answers,
    hint_html,
    instance_choices,
    make_examples,
    open_photo,
    read_photo,
    view,
    warm_up,
    write_files,
)

Changes = dict[Any, Any]
"""New values of components of the page; others stay."""
SESSIONS, SESSION_SECONDS = 64, 3600
SENTENCES = 3
MASK_VIEWS = [("Modal", "modal"), ("Amodal", "amodal"), ("Occluded", "occluded")]
START = "Choose an image or an example, then say what you want. The words decide which mask you get."
SCROLL = "() => innerWidth < 700 && document.getElementById('decision').scrollIntoView({behavior: 'smooth'})"


@dataclass(frozen=True)
class DemoConfig:
    """A page where people try a trained segmenter."""

    run: Annotated[str, tyro.conf.Positional]
    """Run folder, such as runs/latest, export, or OWNER/NAME of one on the Hugging Face hub."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 lets other machines in."""
    port: int = 7860
    """0 = any that is free."""
    max_upload_mb: int = 10
    """Largest file that may be uploaded."""
    checkpoint: str = "best"
    """best (dev gIoU), latest, or a step."""


def import_gradio() -> Any:
    """gradio, silent: it must not report home or ask for newer versions. Raises InputError where it is missing."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ.pop("GRADIO_ALLOWED_PATHS", None)
    os.environ.pop("GRADIO_SHARE", None)
    try:
        import gradio
    except ImportError:
        raise InputError("the page needs gradio; pip install 'r2sm_jax[demo]'") from None
    return gradio


class Page:
    """The page and its events. An event returns what changes, by component; photos and answers live in the browser
    session's state."""

    def __init__(self, predictor: Predictor, examples: list[Example], files: Path):
        self.gr, self.predictor, self.examples, self.files = import_gradio(), predictor, examples, files
        self.example_files = [files / f"example{number + 1}.png" for number in range(len(examples))]
        for example, file in zip(examples, self.example_files, strict=True):
            Image.fromarray(example.image).save(file)

    def build(self) -> Any:
        """The page as gradio Blocks."""
        gr = self.gr
        cleaning = (600, SESSION_SECONDS)
        with gr.Blocks(title="Which mask do you mean?", analytics_enabled=False, delete_cache=cleaning) as page:
            self.photo = gr.State(None, time_to_live=SESSION_SECONDS)
            self.answer = gr.State(None, time_to_live=SESSION_SECONDS)
            gr.Markdown(
                "# Which mask do you mean?\nThe words decide: the visible part of a thing, or its complete shape.",
                elem_id="title",
            )
            with gr.Row():
                with gr.Column(scale=4, min_width=300):
                    self._build_question()
                with gr.Column(scale=7, min_width=300):
                    self._build_answer()
            self._connect()
        return page

    def _build_question(self) -> None:
        gr = self.gr
        self.upload = gr.File(label="Image", file_types=["image"], height=130, elem_id="upload")
        with gr.Row(elem_id="examples"):
            self.thumbnails = [
                gr.Button(f"Example {number}", icon=file, min_width=40, elem_classes="thumbnail")
                for number, file in enumerate(self.example_files, start=1)
            ]
        self.query = gr.Textbox(
            label="What do you want?", placeholder="the red mug, hidden parts included", lines=1, max_lines=4,
            elem_id="query",
        )  # fmt: skip
        with gr.Column(elem_id="sentences", visible=False) as self.suggestions:
            self.sentences = [gr.Button(size="sm", elem_classes="sentence") for _ in range(SENTENCES)]
        self.send = gr.Button("Segment", variant="primary", elem_id="ask")

    def _build_answer(self) -> None:
        gr = self.gr
        self.decision = gr.HTML(hint_html(START), elem_id="decision", padding=False)
        self.shown = gr.Radio(MASK_VIEWS, value="modal", label="Mask", visible=False, elem_id="shown")
        self.stage = gr.Image(
            show_label=False, interactive=False, format="webp", visible=False, buttons=["fullscreen"], elem_id="stage"
        )
        with gr.Column(visible=False) as self.after:
            self.instance = gr.Radio([("All", -1)], value=-1, label="Instance", visible=False, elem_id="instance")
            self.facts = gr.HTML(elem_id="facts", padding=False)
            self.threshold = gr.Slider(
                0, 1, 0.5, step=0.01, label="Decision threshold: amodal above", elem_id="threshold"
            )
            with gr.Row():
                self.archive = gr.DownloadButton("Download masks (ZIP)", size="sm", elem_id="zip")
                self.record = gr.DownloadButton("Download JSON", size="sm", elem_id="json")

    def _connect(self) -> None:
        quiet = {"api_visibility": "private", "show_progress": "minimal", "show_progress_on": self.decision}
        answered = [self.answer, self.decision, self.shown, self.instance, self.stage, self.after, self.facts,
                    self.archive, self.record]  # fmt: skip
        chosen = [self.photo, self.suggestions, self.upload, self.query, *self.sentences, *answered]
        asked = [self.photo, self.query, self.threshold]
        self.upload.upload(self.take, self.upload, chosen, **quiet)
        self.upload.clear(self.clear, None, chosen, **quiet)
        for number, button in enumerate(self.thumbnails):
            button.click(partial(self.take_example, number), None, chosen, **quiet)
        self.gr.on([self.send.click, self.query.submit], self.ask, asked, answered, **quiet).then(js=SCROLL)
        for button in self.sentences:
            written = button.click(lambda text: text, button, self.query, **quiet)
            written.then(self.ask, asked, answered, **quiet).then(js=SCROLL)
        moved = [self.photo, self.answer, self.threshold]
        self.threshold.input(self.decide, moved, answered, trigger_mode="always_last", **quiet)
        looked = [self.photo, self.answer, self.shown, self.instance]
        self.gr.on([self.shown.input, self.instance.input], self.look, looked, self.stage, **quiet)

    def take(self, path: str) -> Changes:
        """A photo was uploaded."""
        try:
            return self._chosen(open_photo(self.predictor, Path(path)))
        except InputError as error:
            return self._without_photo(error_html(error))

    def take_example(self, index: int) -> Changes:
        """An example was chosen."""
        texts = [*self.examples[index].sentences, *[""] * SENTENCES]
        buttons = {b: self.gr.update(value=t, visible=bool(t)) for b, t in zip(self.sentences, texts, strict=False)}
        found = self._chosen(open_photo(self.predictor, self.example_files[index]))
        return found | buttons | {self.suggestions: self.gr.update(visible=True), self.upload: None, self.query: ""}

    def clear(self) -> Changes:
        """The photo was taken away."""
        return self._without_photo(hint_html(START))

    def ask(self, photo: Photo | None, query: str, threshold: float) -> Changes:
        """A sentence was sent."""
        try:
            if photo is None:
                raise InputError("there is no image yet; choose one or an example")
            return self._answered(photo, ask(self.predictor, photo, query), threshold)
        except InputError as error:
            return {self.decision: error_html(error)}

    def decide(self, photo: Photo | None, answer: Answer | None, threshold: float) -> Changes:
        """The threshold was moved."""
        try:
            return {} if photo is None or answer is None else self._answered(photo, answer, threshold)
        except InputError as error:
            return self._without_photo(error_html(error))

    def look(self, photo: Photo | None, answer: Answer | None, shown: str, instance: int) -> Changes:
        """Another mask or instance is to be shown."""
        if photo is None or answer is None or not photo.file.exists():
            return {}
        picture = view(read_photo(photo.file), answer, shown, None if instance < 0 else instance)
        return {self.stage: self.gr.update(value=picture, alt_text=alt_text(answer, shown))}

    def _unanswered(self, html: str) -> Changes:
        hidden = self.gr.update(visible=False)
        return {self.answer: None, self.decision: html, self.shown: hidden, self.after: hidden}

    def _without_photo(self, html: str) -> Changes:
        hidden = self.gr.update(visible=False)
        return self._unanswered(html) | {self.photo: None, self.suggestions: hidden, self.stage: hidden}

    def _chosen(self, photo: Photo) -> Changes:
        first = f"It has {photo.frames} frames; the first one is used. " if photo.frames > 1 else ""
        alt = f"The image {photo.file.name}"
        picture = self.gr.update(value=view(read_photo(photo.file), None), visible=True, alt_text=alt)
        found = self._unanswered(hint_html(f"{first}Now say what you want, in a few words."))
        return found | {self.photo: photo, self.suggestions: self.gr.update(visible=False), self.stage: picture}

    def _answered(self, photo: Photo, answer: Answer, threshold: float) -> Changes:
        gr, decided, choices = self.gr, answer.decision(threshold), instance_choices(answer)
        picture, alt = view(read_photo(photo.file), answer, decided), alt_text(answer, decided)
        forget_answers(self.files, SESSION_SECONDS)
        archive, record = write_files(self.files / f"answer-{secrets.token_hex(16)}", picture, answer, threshold)
        return {
            self.answer: answer,
            self.decision: decision_html(answer, threshold),
            self.shown: gr.update(value=decided, visible=True),
            self.instance: gr.update(choices=choices, value=-1, visible=len(choices) > 2),
            self.stage: gr.update(value=picture, visible=True, alt_text=alt),
            self.after: gr.update(visible=True),
            self.facts: facts_html(photo, answer, threshold),
            self.archive: str(archive),
            self.record: str(record),
        }


def launch(args: DemoConfig, folder: Path, *, block: bool = True) -> Any:
    """Opens the run and serves the page; `folder` takes uploads and files to download.

    Raises:
        InputError: no such run, a run whose head reads no sentence, or an address that is taken.
    """
    os.environ["GRADIO_TEMP_DIR"] = str(folder)
    gr = import_gradio()
    predictor = open_run(Path(args.run), checkpoint=args.checkpoint).predictor
    if predictor.config.head in (NO_HEAD, "oracle"):
        raise InputError(f"{args.run}: its head, {predictor.config.head}, reads no sentence; give a run that decides")
    warnings.simplefilter("ignore", CutQuery)  # the page says it
    page = Page(predictor, make_examples(), folder)
    warm_up(predictor)
    page = page.build()
    page.queue(max_size=32, api_open=False)
    ink = gr.themes.colors.neutral
    sans = ["system-ui", "-apple-system", "Segoe UI", "Helvetica", "Arial", "sans-serif"]
    mono = ["ui-monospace", "Consolas", "monospace"]
    try:
        page.launch(
            server_name=args.host, server_port=args.port or _free_port(args.host), allowed_paths=[], quiet=True,
            max_file_size=f"{args.max_upload_mb}mb", state_session_capacity=SESSIONS, prevent_thread_lock=True,
            theme=gr.themes.Default(primary_hue=ink, secondary_hue=ink, neutral_hue=ink, font=sans, font_mono=mono),
            css_paths=Path(__file__).with_suffix(".css"), footer_links=[], share=False, ssr_mode=False, pwa=False,
            mcp_server=False, run_history=False, enable_monitoring=False, show_error=False,
        )  # fmt: skip
    except OSError:
        raise InputError(f"--port {args.port} at {args.host} cannot be opened; give another --port or --host") from None
    print(f"http://{args.host}:{page.server_port}", flush=True)
    if block:
        page.block_thread()
    return page


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def main() -> None:
    """Command line."""
    args = parse_flags(DemoConfig, sys.argv[1:], prog="python -m r2sm_jax.demo")
    if args.max_upload_mb < 1 or not 0 <= args.port < 65536:
        raise InputError("--max-upload-mb is at least 1, and --port between 0 and 65535; mend what is not")
    with tempfile.TemporaryDirectory(prefix="r2sm_jax_demo_") as folder:
        launch(args, Path(folder))


if __name__ == "__main__":
    exit_cleanly(main)
