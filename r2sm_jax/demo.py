"""`python -m r2sm_jax.demo [RUN|EXPORT]`: a web page on which people try a trained segmenter.

A photo, a sentence, clicks, a box or a given mask go in; masks, the decision and scores come out.
Needs gradio (`pip install 'r2sm_jax[demo]'`).
"""

import os
import re
import signal
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from r2sm_jax.cli import cli_main
from r2sm_jax.flags import DemoConfig, check_flags, read_flags

if __name__ == "__main__":
    # A slip in a flag is told at once: the imports below take seconds.
    check_flags(DemoConfig)

import numpy as np
from PIL import Image, ImageDraw

from r2sm_jax.data.mask_reader import INVERTED, covers_corners, read_mask
from r2sm_jax.errors import InputError
from r2sm_jax.inference.load import enable_compilation_cache, load_run
from r2sm_jax.inference.predictor import Photo, Predictor
from r2sm_jax.inference.prompts import MASK_TYPE_CHOICES

TITLE = "Which mask do you mean?"
INTRODUCTION = f"# {TITLE}\nThe words decide: the visible part of a thing, or its complete shape."
LEGEND = "Blue: what shows. Orange: what is hidden. White line: the mask that is asked for."
MARKS = {"on the object": "limegreen", "beside it": "red", "a corner of a box": "white"}
"""What a click can be, and the colour of its mark."""
ON, BESIDE, CORNER = MARKS
MAX_SIDE = 2000
"""Pixels of a picture that is shown; larger photos are answered at their own size."""
NUM_PHOTOS_IN_MEMORY = 8
"""Of all visitors. The others are read again from their files, which are small."""
MAX_PEOPLE = 10_000
"""For each the page remembers the name of a file and some clicks."""
MAX_WAITING = 32
"""Questions that wait for an answer."""
FILES_LIVE = (600, 3600)
"""Seconds between two looks for old files, and after which a photo is forgotten."""
EXAMPLE = ("coffee.jpg", "the saucer as if the cup were gone", "saucer.png")
"""Photo, sentence and given mask of the documentation."""


class Visit(NamedTuple):
    """The file of the photo that a visitor looks at, and the clicks on it: x, y and one of
    `MARKS`."""

    file: str
    clicks: tuple[tuple[float, float, str], ...] = ()


class Page:
    """What the controls of the page do. `folder` gets the files that can be downloaded."""

    def __init__(self, predictor: Predictor, folder: Path):
        self.predictor = predictor
        self.folder = folder
        self._photo = lru_cache(maxsize=NUM_PHOTOS_IN_MEMORY)(predictor.encode)

    def photo(self, visit: Visit | None) -> Photo:
        """Returns the photo of a visit. Raises InputError if there is none, or none any more."""
        if visit is None:
            raise InputError("there is no photo yet; upload one")
        if not Path(visit.file).is_file():
            raise InputError("your photo is no longer here; upload it again")
        return self._photo(visit.file)

    def open_photo(self, file: str | None) -> tuple[Visit | None, np.ndarray | None]:
        """Opens an upload. Returns the visit and the picture; raises InputError as `encode`."""
        return (None, None) if file is None else self._shown(Visit(file))

    def add_click(
        self, visit: Visit | None, kind: str, place: tuple[float, float]
    ) -> tuple[Visit | None, np.ndarray | None]:
        """Adds a click at a place of the picture. Returns the visit and the picture; raises
        InputError as `photo`."""
        pixels = self.photo(visit).pixels
        assert visit is not None
        clicks = visit.clicks
        if kind == CORNER and sum(click[2] == CORNER for click in clicks) == 2:
            # A third corner begins another box.
            clicks = tuple(click for click in clicks if click[2] != CORNER)
        scale = picture_scale(pixels)
        click = (place[0] / scale, place[1] / scale, kind)
        return self._shown(visit._replace(clicks=(*clicks, click)))

    def clear_clicks(self, visit: Visit | None) -> tuple[Visit | None, np.ndarray | None]:
        """Takes all clicks away. Returns the visit and the picture; raises InputError as `photo`
        where there was one."""
        return (None, None) if visit is None else self._shown(visit._replace(clicks=()))

    def answer(
        self, visit: Visit | None, query: str, mask_type: str, mask_file: str | None
    ) -> tuple[np.ndarray, str, str, str]:
        """Answers a sentence, clicks, a box or a given mask.

        Returns the picture, words about it, a PNG file and a JSON file with the masks as COCO RLEs.
        Raises InputError as `Predictor.predict` and `photo`.
        """
        photo = self.photo(visit)
        assert visit is not None
        mask = read_mask(Path(mask_file), photo.size, "the mask") if mask_file else None
        corners = np.array([(x, y) for x, y, kind in visit.clicks if kind == CORNER])
        if len(corners) == 1:
            raise InputError("a box has two corners; click on the other one, or clear the clicks")
        box = (*corners.min(0), *corners.max(0)) if len(corners) else None
        points = [(x, y, kind == ON) for x, y, kind in visit.clicks if kind != CORNER]
        (prediction,) = self.predictor.predict(
            [query.strip()],
            mask_type=mask_type,
            image=photo,
            masks=[mask],
            boxes=[box],
            points=[points],
        )
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        prediction.write(folder)
        words = prediction.summary()
        if mask is not None and covers_corners(mask):
            words += f"\n\n**The given mask**: {INVERTED}"
        picture = draw_marks(prediction.overlay(), visit.clicks)
        return picture, words, str(folder / "mask.png"), str(folder / "prediction.json")

    def _shown(self, visit: Visit) -> tuple[Visit, np.ndarray]:
        """Returns a visit and the picture of its photo with the clicks."""
        return visit, draw_marks(self.photo(visit).pixels, visit.clicks)

    def hide_folder(self, text: str) -> str:
        """Leaves the page's folder out of a text, which may name a file that a visitor sent."""
        return re.sub(rf"{re.escape(str(self.folder))}/(?:[^\s/]+/)*", "", text)


def picture_scale(pixels: np.ndarray) -> float:
    """Returns the size of the picture that is shown of a photo `[H W 3]`, in sizes of the photo."""
    return min(1.0, MAX_SIDE / max(pixels.shape[:2]))


def draw_marks(pixels: np.ndarray, clicks: tuple[tuple[float, float, str], ...]) -> np.ndarray:
    """Draws clicks over a photo, at the size that is shown."""
    scale = picture_scale(pixels)
    size = (max(1, round(pixels.shape[1] * scale)), max(1, round(pixels.shape[0] * scale)))
    picture = Image.fromarray(pixels).resize(size)
    radius = max(3, max(size) // 150)
    for x, y, kind in clicks:
        x, y = x * scale, y * scale
        corners = (x - radius, y - radius, x + radius, y + radius)
        ImageDraw.Draw(picture).ellipse(corners, fill=MARKS[kind], outline="black")
    return np.asarray(picture)


def build(page: Page) -> Any:
    """Lays out the page with gradio, which must be installed."""
    import gradio as gr

    def told(action: Any) -> Any:
        """Shows an InputError of an action on the page."""

        def call(*values: Any) -> Any:
            try:
                return action(*values)
            except InputError as error:
                raise gr.Error(page.hide_folder(str(error)), print_exception=False) from None

        return call

    def click(visit: Visit | None, kind: str, event: gr.SelectData) -> Any:
        return told(page.add_click)(visit, kind, (event.index[0], event.index[1]))

    def forget() -> tuple[None, str]:
        """The answer to another question is gone."""
        return None, ""

    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=FILES_LIVE) as blocks:
        visit = gr.State()
        gr.Markdown(INTRODUCTION)
        with gr.Row():
            with gr.Column(scale=3):
                # A file component: gr.Image would convert the upload.
                upload = gr.File(label="Photo", file_types=["image"], height=120)
                query = gr.Textbox(label="What do you want?", placeholder="the whole red mug")
                segment = gr.Button("Segment", variant="primary")
                mask_type = gr.Radio(list(MASK_TYPE_CHOICES), value="auto", label="Mask type")
                kind = gr.Radio(list(MARKS), value=ON, label="A click on the photo is")
                clear = gr.Button("Clear clicks")
                mask_file = gr.File(
                    label="Given visible mask", file_types=["image", ".json"], height=120
                )
            with gr.Column(scale=4):
                photo = gr.Image(label="Your photo: click on it", interactive=False)
            with gr.Column(scale=4):
                answer = gr.Image(label="The answer", interactive=False)
                words = gr.Markdown()
                gr.Markdown(LEGEND)
                with gr.Row():
                    png = gr.DownloadButton("Mask as PNG")
                    json = gr.DownloadButton("Masks as COCO JSON")
        docs = Path(__file__).parents[1] / "docs"
        if (docs / EXAMPLE[0]).is_file():  # a wheel has no documentation
            row = [str(docs / EXAMPLE[0]), EXAMPLE[1], str(docs / EXAMPLE[2])]
            gr.Examples([row], [upload, query, mask_file], label="For example")

        upload.change(told(page.open_photo), upload, [visit, photo]).then(
            forget, None, [answer, words]
        )
        photo.select(click, [visit, kind], [visit, photo]).then(forget, None, [answer, words])
        clear.click(told(page.clear_clicks), visit, [visit, photo]).then(
            forget, None, [answer, words]
        )
        inputs, outputs = [visit, query, mask_type, mask_file], [answer, words, png, json]
        segment.click(told(page.answer), inputs, outputs)
        query.submit(told(page.answer), inputs, outputs)
    return blocks.queue(max_size=MAX_WAITING, api_open=False)


def main() -> None:
    """Command line."""
    args = read_flags(DemoConfig)
    enable_compilation_cache()
    # As Ctrl-C does, so that the folder with the photos of visitors goes: services stop so.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="r2sm_jax_demo_") as folder:
        # gradio reads both when it is imported: no reports home, and uploads go into our folder.
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
        os.environ["GRADIO_TEMP_DIR"] = folder
        try:
            import gradio as gr
        except ImportError:
            raise InputError("the page needs gradio; pip install 'r2sm_jax[demo]'") from None
        predictor = load_run(args.run).predictor
        fonts = ["system-ui", "sans-serif"]  # gradio's own theme loads fonts from another host
        try:
            build(Page(predictor, Path(folder))).launch(
                server_name=args.host,
                server_port=args.port or None,
                max_file_size=f"{args.max_upload_mb}mb",
                state_session_capacity=MAX_PEOPLE,
                theme=gr.themes.Default(font=fonts, font_mono=["monospace"]),
                footer_links=[],
                share=False,
                ssr_mode=False,
            )
        except OSError:
            raise InputError(
                f"--port {args.port} at {args.host} cannot be opened; give another --port (0 takes "
                "a free one) or --host"
            ) from None


if __name__ == "__main__":
    cli_main(main)
