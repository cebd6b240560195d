"""`python -m r2sm_jax.demo [RUN|EXPORT]`: a web page on which people try a trained segmenter.

The page is local by default, and loads nothing from other hosts: no analytics, version checks, fonts or scripts.
Uploads are kept in a temporary folder of this process; the page reads no other files, and fetches no address that a
request names.
"""

import os
import secrets
import sys
import tempfile
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from PIL import Image

from r2sm_jax.cli import parse_flags
from r2sm_jax.config import NO_HEAD
from r2sm_jax.errors import InputError
from r2sm_jax.inference import web_answers as answers
from r2sm_jax.inference.predictor import Predictor, TruncatedQuery
from r2sm_jax.inference.run import enable_compilation_cache, load
from r2sm_jax.inference.web_answers import Answer, Photo, View, message_html

Changes = dict[Any, Any]
"""New values of components of the page; the others stay."""
SESSIONS, SESSION_SECONDS = 64, 3600
SENTENCES = 3
START = "Choose an image, then say what you want. The words decide which mask you get."
TITLE = "# Which mask do you mean?\nThe words decide: the visible part of a thing, or its complete shape."
SCROLL = "() => innerWidth < 700 && document.getElementById('decision').scrollIntoView({behavior: 'smooth'})"


@dataclass(frozen=True)
class DemoConfig:
    """A page where people try a trained segmenter."""

    run: Annotated[str, tyro.conf.Positional] = "photos-small"
    """Run folder, such as runs/latest, export, released model, or hf:owner/name of an export on the hub."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 lets other machines in."""
    port: int = 7860
    """0 = any that is free."""
    max_upload_mb: int = 10
    """Largest file that may be uploaded."""
    checkpoint: str = "best"
    """best (highest gIoU on the split --train.select-on), latest, or the number of a step."""


def import_gradio() -> Any:
    """gradio without reports home and version checks. Raises InputError where it is not installed."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    for name in ("GRADIO_ALLOWED_PATHS", "GRADIO_SHARE", "GRADIO_SERVER_PORT"):
        os.environ.pop(name, None)
    try:
        import gradio
    except ImportError:
        raise InputError("the page needs gradio; pip install 'r2sm_jax[demo]'") from None
    return gradio


def refuse_addresses(gr: Any) -> None:
    """Keeps gradio from fetching, in this process, any address that a request gives in the place of a file; the visitor
    gets an error. All that gradio fetches for its components goes through this one function."""

    async def refuse(url: str) -> Any:
        raise gr.Error("this page fetches no addresses; upload the image", print_exception=False)

    gr.processing_utils.async_ssrf_protected_get = refuse


class Page:
    """The page and its events. Photos and answers are kept in the state of the browser session."""

    def __init__(self, predictor: Predictor, folder: Path):
        self.gr, self.predictor, self.folder = import_gradio(), predictor, folder
        self.examples = []
        for number, (image, sentences) in enumerate(answers.make_examples(), start=1):
            self.examples.append((folder / f"example{number}.png", sentences))
            Image.fromarray(image).save(self.examples[-1][0])

    def build(self) -> Any:
        """The page as gradio Blocks."""
        gr = self.gr
        cleaning = (600, SESSION_SECONDS)
        with gr.Blocks(
            title="Which mask do you mean?", analytics_enabled=False, delete_cache=cleaning
        ) as page:
            self.photo = gr.State(None, time_to_live=SESSION_SECONDS)
            self.answer = gr.State(None, time_to_live=SESSION_SECONDS)
            gr.Markdown(TITLE, elem_id="title")
            with gr.Row():
                with gr.Column(scale=4, min_width=300):
                    self._build_question()
                with gr.Column(scale=7, min_width=300):
                    self._build_answer()
            self._connect()
        refuse_addresses(gr)
        return page

    def _build_question(self) -> None:
        gr = self.gr
        self.upload = gr.File(label="Image", file_types=["image"], height=130, elem_id="upload")
        # The examples are drawn. A model with a published EfficientNet was trained on photographs.
        with gr.Row(elem_id="examples", visible=self.predictor.config.vision.efficientnet is None):
            self.thumbnails = [
                gr.Button(f"Example {number}", icon=file, min_width=40, elem_classes="thumbnail")
                for number, (file, _) in enumerate(self.examples, start=1)
            ]
        hint = "the red mug, hidden parts included"
        self.query = gr.Textbox(
            label="What do you want?", placeholder=hint, lines=1, max_lines=4, elem_id="query"
        )
        with gr.Column(elem_id="sentences", visible=False) as self.suggestions:
            self.sentences = [
                gr.Button(size="sm", elem_classes="sentence") for _ in range(SENTENCES)
            ]
        self.send = gr.Button("Segment", variant="primary", elem_id="ask")

    def _build_answer(self) -> None:
        gr = self.gr
        views = [(name.capitalize(), name) for name in ("modal", "amodal", "occluded")]
        self.decision = gr.HTML(message_html(START), elem_id="decision", padding=False)
        self.shown = gr.Radio(views, value="modal", label="Mask", visible=False, elem_id="shown")
        self.stage = gr.Image(
            show_label=False,
            interactive=False,
            format="webp",
            visible=False,
            buttons=["fullscreen"],
            elem_id="stage",
        )
        with gr.Column(visible=False) as self.after:
            self.instance = gr.Radio(
                [("All", -1)], value=-1, label="Instance", visible=False, elem_id="instance"
            )
            self.facts = gr.HTML(elem_id="facts", padding=False)
            label = "Decision threshold: amodal above"
            self.threshold = gr.Slider(0, 1, 0.5, step=0.01, label=label, elem_id="threshold")
            with gr.Row():
                self.archive = gr.DownloadButton("Download masks (ZIP)", size="sm", elem_id="zip")
                self.record = gr.DownloadButton("Download JSON", size="sm", elem_id="json")

    def _connect(self) -> None:
        quiet = {
            "api_visibility": "private",
            "show_progress": "minimal",
            "show_progress_on": self.decision,
        }
        answered = [
            self.answer,
            self.decision,
            self.shown,
            self.instance,
            self.stage,
            self.after,
            self.facts,
            self.archive,
            self.record,
        ]
        chosen = [self.photo, self.suggestions, self.upload, self.query, *self.sentences, *answered]
        asked = [self.photo, self.query, self.threshold]
        self.upload.upload(self.choose_upload, self.upload, chosen, **quiet)
        self.upload.clear(lambda: self._without_photo(START), None, chosen, **quiet)
        for number, button in enumerate(self.thumbnails):
            button.click(partial(self.choose_example, number), None, chosen, **quiet)
        self.gr.on([self.send.click, self.query.submit], self.ask, asked, answered, **quiet).then(
            js=SCROLL
        )
        for button in self.sentences:
            written = button.click(lambda text: text, button, self.query, **quiet)
            written.then(self.ask, asked, answered, **quiet).then(js=SCROLL)
        decided = [self.photo, self.answer, self.threshold]
        self.threshold.input(
            self.show_answer, decided, answered, trigger_mode="always_last", **quiet
        )
        viewed = [self.photo, self.answer, self.shown, self.instance]
        self.gr.on(
            [self.shown.input, self.instance.input], self.show_mask, viewed, self.stage, **quiet
        )

    # A request can hold None in the place of any value.

    def choose_upload(self, path: str | None) -> Changes:
        """A photo was uploaded."""
        try:
            return self._with_photo(Path(path)) if path else self._without_photo(START)
        except InputError as error:
            return self._without_photo(error)

    def choose_example(self, index: int) -> Changes:
        """An example was chosen."""
        file, sentences = self.examples[index]
        texts = [*sentences, *[""] * (SENTENCES - len(sentences))]
        buttons = {
            b: self.gr.update(value=t, visible=bool(t))
            for b, t in zip(self.sentences, texts, strict=True)
        }
        shown = {self.suggestions: self.gr.update(visible=True), self.upload: None, self.query: ""}
        return self._with_photo(file) | buttons | shown

    def ask(self, photo: Photo | None, query: str | None, threshold: float | None) -> Changes:
        """A sentence was sent."""
        try:
            if photo is None:
                raise InputError("there is no image yet; choose one or an example")
            return self.show_answer(
                photo, answers.ask(self.predictor, photo, query or ""), threshold
            )
        except InputError as error:
            return {self.decision: message_html(error)}

    def show_answer(
        self, photo: Photo | None, answer: Answer | None, threshold: float | None
    ) -> Changes:
        """There is a new answer, or the threshold was moved."""
        if photo is None or answer is None or threshold is None:
            return {}
        gr, decided = self.gr, answer.decision(threshold)
        instances = enumerate(answer.by_type["amodal"]["instances"])
        choices = [
            ("All", -1),
            *((f"{number + 1} · {found['score']:.2f}", number) for number, found in instances),
        ]
        picture = answers.draw(photo, answer, decided)
        answers.remove_old_answers(self.folder, SESSION_SECONDS)
        folder = self.folder / f"answer-{secrets.token_hex(16)}"
        archive, record = answers.write_files(folder, picture, answer, threshold)
        return {
            self.answer: answer,
            self.decision: answers.decision_html(answer, threshold),
            self.shown: gr.update(value=decided, visible=True),
            self.instance: gr.update(choices=choices, value=-1, visible=len(choices) > 2),
            self.stage: gr.update(
                value=picture, visible=True, alt_text=answers.alt_text(answer, decided)
            ),
            self.after: gr.update(visible=True),
            self.facts: answers.facts_html(photo, answer, threshold),
            self.archive: archive,
            self.record: record,
        }

    def show_mask(
        self, photo: Photo | None, answer: Answer | None, shown: View | None, instance: int | None
    ) -> Changes:
        """Another mask or instance was chosen."""
        if photo is None or answer is None or shown is None or instance is None:
            return {}
        picture = answers.draw(photo, answer, shown, instance)
        return {self.stage: self.gr.update(value=picture, alt_text=answers.alt_text(answer, shown))}

    def _with_photo(self, file: Path) -> Changes:
        photo = answers.open_photo(self.predictor, file)
        note = f"It has {photo.frames} frames; the first one is used. " if photo.frames > 1 else ""
        picture = self.gr.update(
            value=photo.preview, visible=True, alt_text=f"The image {photo.name}"
        )
        start = self._without_photo(f"{note}Now say what you want, in a few words.")
        return start | {self.photo: photo, self.stage: picture}

    def _without_photo(self, message: str | InputError) -> Changes:
        hidden = self.gr.update(visible=False)
        hide = dict.fromkeys((self.suggestions, self.stage, self.shown, self.after), hidden)
        return hide | {self.photo: None, self.answer: None, self.decision: message_html(message)}


def launch(args: DemoConfig, folder: Path, *, block: bool = True) -> Any:
    """Opens the run and serves the page; uploads and files to download go into `folder`. Raises InputError if there is
    no such run, its head reads no sentence, or the address cannot be opened."""
    os.environ["GRADIO_TEMP_DIR"] = str(folder)
    gr = import_gradio()
    from fastapi import Depends, HTTPException  # come with gradio
    from fastapi.exceptions import RequestValidationError
    from fastapi.requests import HTTPConnection
    from fastapi.responses import JSONResponse

    def refuse_address(request: HTTPConnection) -> None:
        """gradio's `/gradio_api/file=ADDRESS` would fetch any public address for any visitor."""
        if "://" in request.scope["path"]:
            raise HTTPException(403, "This page fetches no addresses.")

    def refuse_body(request: HTTPConnection, error: Exception) -> JSONResponse:
        """FastAPI's own answer repeats the body, which fails with NaN or half a character; gradio looks up any number
        as that of a function."""
        return JSONResponse({"detail": "This page cannot read the request."}, 422)

    predictor = load(args.run, checkpoint=args.checkpoint).predictor
    if predictor.config.head in (NO_HEAD, "oracle"):
        raise InputError(
            f"{args.run}: its head, {predictor.config.head}, reads no sentence; give a run that decides"
        )
    warnings.simplefilter("ignore", TruncatedQuery)  # the page shows what was not read
    predictor.warm_up()
    page = Page(predictor, folder)
    answers.ask(
        predictor, answers.open_photo(predictor, page.examples[0][0]), "the red mug"
    )  # compiles the rest
    blocks, grey = page.build().queue(max_size=32, api_open=False), gr.themes.colors.neutral
    fonts = {
        "font": ["system-ui", "-apple-system", "Segoe UI", "Helvetica", "Arial", "sans-serif"],
        "font_mono": ["ui-monospace", "Consolas", "monospace"],
    }
    host = (
        f"[{args.host.strip('[]')}]" if ":" in args.host else args.host
    )  # an IPv6 address, as URLs have it
    try:
        blocks.launch(
            server_name=host,
            server_port=args.port or None,
            allowed_paths=[],
            quiet=True,
            max_file_size=f"{args.max_upload_mb}mb",
            state_session_capacity=SESSIONS,
            prevent_thread_lock=True,
            theme=gr.themes.Default(
                primary_hue=grey, secondary_hue=grey, neutral_hue=grey, **fonts
            ),
            css_paths=Path(__file__).with_name("demo.css"),
            footer_links=[],
            share=False,
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            run_history=False,
            enable_monitoring=False,
            show_error=False,
            app_kwargs={
                "dependencies": [Depends(refuse_address)],
                "exception_handlers": {RequestValidationError: refuse_body, KeyError: refuse_body},
            },
        )
    except OSError:
        raise InputError(
            f"--port {args.port} at {args.host} cannot be opened; give another --port or --host"
        ) from None
    print(f"http://{host}:{blocks.server_port}", flush=True)
    if block:
        blocks.block_thread()
    return blocks


def main() -> None:
    """Command line."""
    args = parse_flags(DemoConfig, sys.argv[1:], prog="python -m r2sm_jax.demo")
    if args.max_upload_mb < 1 or not 0 <= args.port < 65536:
        raise InputError("--max-upload-mb must be 1 or more, and --port between 0 and 65535")
    enable_compilation_cache()
    with tempfile.TemporaryDirectory(prefix="r2sm_jax_demo_") as folder:
        launch(args, Path(folder))
