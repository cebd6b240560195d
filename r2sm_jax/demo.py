"""`python -m r2sm_jax.demo RUN`: a page where people try a trained segmenter.

Local by default, without analytics, version checks, fonts or scripts from elsewhere. Uploads live in a temporary
folder of this process and nowhere else is read.
"""

import os
import secrets
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from PIL import Image

from r2sm_jax.config import parse_flags
from r2sm_jax.demo_answers import (
    Answer,
    Answerer,
    Example,
    decision_html,
    error_html,
    facts_html,
    hint_html,
    instance_choices,
    make_examples,
    read_photo,
    view,
    write_files,
)
from r2sm_jax.errors import InputError, exit_cleanly
from r2sm_jax.runs import open_run

SESSIONS, SESSION_SECONDS = 64, 3600
SENTENCES = 3
MASK_VIEWS = [("Modal", "modal"), ("Amodal", "amodal"), ("Occluded", "occluded")]
START = "Choose an image or an example, then say what you want. The words decide which mask you get."
SCROLL = "() => innerWidth < 700 && document.getElementById('decision').scrollIntoView({behavior: 'smooth'})"


@dataclass(frozen=True)
class DemoConfig:
    """A page where people try a trained segmenter."""

    run: Annotated[str, tyro.conf.Positional]
    """Run folder, such as runs/latest."""
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
    """The events of the page. Photos and answers live in the browser session's state."""

    def __init__(self, answerer: Answerer, examples: list[Example], files: Path):
        self.gr, self.answerer, self.examples, self.files = import_gradio(), answerer, examples, files

    def build(self) -> Any:
        """The page as gradio Blocks."""
        gr = self.gr
        with gr.Blocks(
            title="Which mask do you mean?", analytics_enabled=False, delete_cache=(600, SESSION_SECONDS)
        ) as page:
            photo = gr.State(None, time_to_live=SESSION_SECONDS)
            answer = gr.State(None, time_to_live=SESSION_SECONDS)
            gr.Markdown(
                "# Which mask do you mean?\nThe words decide: the visible part of a thing, or its complete shape.",
                elem_id="title",
            )
            with gr.Row():
                with gr.Column(scale=4, min_width=300):
                    upload = gr.File(label="Image", file_types=["image"], height=130, elem_id="upload")
                    with gr.Row(elem_id="examples"):
                        thumbnails = [self._thumbnail(number) for number in range(len(self.examples))]
                    query = gr.Textbox(label="What do you want?", placeholder="the red mug, hidden parts included",
                                       lines=1, max_lines=4, elem_id="query")  # fmt: skip
                    with gr.Column(elem_id="sentences", visible=False) as suggestions:
                        sentences = [gr.Button(size="sm", elem_classes="sentence") for _ in range(SENTENCES)]
                    ask = gr.Button("Segment", variant="primary", elem_id="ask")
                with gr.Column(scale=7, min_width=300):
                    decision = gr.HTML(hint_html(START), elem_id="decision", padding=False)
                    with gr.Group(visible=False) as controls:
                        shown = gr.Radio(MASK_VIEWS, value="modal", label="Mask", elem_id="shown")
                        instance = gr.Radio(
                            [("All", -1)], value=-1, label="Instance", visible=False, elem_id="instance"
                        )
                    stage = gr.Image(show_label=False, interactive=False, format="webp", visible=False, elem_id="stage",
                                     buttons=["fullscreen"])  # fmt: skip
                    with gr.Column(visible=False) as after:
                        facts = gr.HTML(elem_id="facts", padding=False)
                        threshold = gr.Slider(0, 1, 0.5, step=0.01, label="Decision threshold: amodal above",
                                              elem_id="threshold")  # fmt: skip
                        with gr.Row():
                            archive = gr.DownloadButton("Download masks (ZIP)", size="sm", elem_id="zip")
                            record = gr.DownloadButton("Download JSON", size="sm", elem_id="json")
            result = [answer, decision, controls, shown, instance, stage, after, facts, archive, record]
            quiet = {"api_visibility": "private", "show_progress": "minimal", "show_progress_on": decision}
            upload.upload(self.take, upload, [photo, suggestions, *result], **quiet)
            upload.clear(self.clear, None, [photo, suggestions, *result], **quiet)
            for number, button in enumerate(thumbnails):
                chosen = [photo, suggestions, *result, upload, query, *sentences]
                button.click(partial(self.take_example, number), None, chosen, **quiet)
            asked = [photo, query, threshold]
            gr.on([ask.click, query.submit], self.ask, asked, result, **quiet).then(js=SCROLL)
            for button in sentences:
                chosen = button.click(lambda text: text, button, query, **quiet)
                chosen.then(self.ask, asked, result, **quiet).then(js=SCROLL)
            threshold.release(self.decide, [photo, answer, threshold], result, **quiet)
            gr.on([shown.input, instance.input], self.look, [photo, answer, shown, instance], stage, **quiet)
        return page

    def _thumbnail(self, number: int) -> Any:
        """A button that shows an example and is called by a name."""
        path = self.files / f"example{number}.png"
        Image.fromarray(self.examples[number].image).save(path)
        return self.gr.Button(f"Example {number + 1}", icon=path, min_width=40, elem_classes="thumbnail")

    def take(self, path: str) -> list[Any]:
        """A photo was uploaded."""
        try:
            image = read_photo(path)
        except InputError as error:
            return [None, self.gr.update(visible=False), *self._nothing(error_html(error))]
        return [path, self.gr.update(visible=False), *self._photo(image)]

    def take_example(self, index: int) -> list[Any]:
        """An example was chosen."""
        example = self.examples[index]
        texts = [*example.sentences, *[""] * SENTENCES][:SENTENCES]
        buttons = [self.gr.update(value=text, visible=bool(text)) for text in texts]
        return [index, self.gr.update(visible=True), *self._photo(example.image), None, "", *buttons]

    def clear(self) -> list[Any]:
        """The photo was taken away."""
        return [None, self.gr.update(visible=False), *self._nothing(hint_html(START))]

    def ask(self, photo: str | int | None, query: str, threshold: float) -> list[Any]:
        """A sentence was sent."""
        try:
            if photo is None:
                raise InputError("there is no image yet; choose one or an example")
            image = self._open(photo)
            answer = self.answerer.ask(image, query)
        except InputError as error:
            keep = [self.gr.skip()] * 9
            return [self.gr.skip(), error_html(error), *keep[1:]]
        return self._result(image, answer, threshold)

    def decide(self, photo: str | int | None, answer: Answer | None, threshold: float) -> list[Any]:
        """The threshold was moved."""
        if photo is None or answer is None:
            return [self.gr.skip()] * 10
        return self._result(self._open(photo), answer, threshold)

    def look(self, photo: str | int | None, answer: Answer | None, shown: str, instance: int) -> Any:
        """Another mask or instance is to be shown."""
        if photo is None or answer is None:
            return self.gr.skip()
        return view(self._open(photo), answer, shown, None if instance < 0 else instance)

    def _open(self, photo: str | int):
        return self.examples[photo].image if isinstance(photo, int) else read_photo(photo)

    def _nothing(self, html: str) -> list[Any]:
        hidden = self.gr.update(visible=False)
        return [None, html, hidden, self.gr.skip(), hidden, hidden, hidden, "", None, None]

    def _photo(self, image) -> list[Any]:
        found = self._nothing(hint_html("Now say what you want, in a few words."))
        found[5] = self.gr.update(value=view(image, None), visible=True)
        return found

    def _result(self, image, answer: Answer, threshold: float) -> list[Any]:
        gr, decided = self.gr, answer.decision(threshold)
        choices = instance_choices(answer, threshold)
        archive, record = write_files(self.files / secrets.token_hex(8), image, answer, threshold)
        return [
            answer, decision_html(answer, threshold), gr.update(visible=True), decided,
            gr.update(choices=choices, value=-1, visible=len(choices) > 2),
            gr.update(value=view(image, answer, decided), visible=True), gr.update(visible=True),
            facts_html(image, answer, threshold), str(archive), str(record),
        ]  # fmt: skip


def launch(args: DemoConfig, folder: Path, *, block: bool = True) -> Any:
    """Opens the run and serves the page; `folder` takes uploads and files to download.

    Raises:
        InputError: no such run, a run whose head reads no sentence, or an address that is taken.
    """
    os.environ["GRADIO_TEMP_DIR"] = str(folder)
    gr = import_gradio()
    predictor = open_run(Path(args.run), checkpoint=args.checkpoint).predictor
    answerer, examples = Answerer(predictor), make_examples()
    answerer.ask(examples[0].image, examples[0].sentences[0])  # compiled before the first visitor comes
    page = Page(answerer, examples, folder).build()
    page.queue(max_size=32, api_open=False)
    ink = gr.themes.colors.neutral
    sans = ["system-ui", "-apple-system", "Segoe UI", "Helvetica", "Arial", "sans-serif"]
    mono = ["ui-monospace", "Consolas", "monospace"]
    page.launch(
        server_name=args.host, server_port=args.port, max_file_size=f"{args.max_upload_mb}mb", allowed_paths=[],
        theme=gr.themes.Default(primary_hue=ink, secondary_hue=ink, neutral_hue=ink, font=sans, font_mono=mono),
        css_paths=Path(__file__).with_suffix(".css"), footer_links=[], share=False, ssr_mode=False,
        pwa=False, mcp_server=False, run_history=False, enable_monitoring=False, show_error=False, quiet=True,
        state_session_capacity=SESSIONS, prevent_thread_lock=True,
    )  # fmt: skip
    print(f"http://{args.host}:{page.server_port}", flush=True)
    if block:
        page.block_thread()
    return page


def main() -> None:
    """Command line."""
    args = parse_flags(DemoConfig, sys.argv[1:], prog="python -m r2sm_jax.demo")
    with tempfile.TemporaryDirectory(prefix="r2sm_jax_demo_") as folder:
        launch(args, Path(folder))


if __name__ == "__main__":
    exit_cleanly(main)
