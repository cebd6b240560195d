"""`python -m r2sm_jax.demo [RUN|EXPORT]`: a web page on which people try a trained segmenter.

A photo, a sentence, clicks, a box or a given mask go in; masks, the decision and scores come out.
Needs gradio (`pip install 'r2sm_jax[demo]'`).
"""

import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from r2sm_jax.cli import cli_main
from r2sm_jax.flags import DemoConfig, check_flags, read_flags

if __name__ == "__main__":
    # A slip in a flag is told at once: the imports below take seconds.
    check_flags(DemoConfig)

import numpy as np
from PIL import Image, ImageDraw

from r2sm_jax.data.masks import read_file
from r2sm_jax.errors import InputError
from r2sm_jax.inference.load import enable_compilation_cache, load
from r2sm_jax.inference.predictor import Photo, Predictor
from r2sm_jax.inference.prompts import MASK_TYPE_CHOICES

TITLE = "Which mask do you mean?"
INTRODUCTION = f"# {TITLE}\nThe words decide: the visible part of a thing, or its complete shape."
MARKS = {"on the object": "limegreen", "beside it": "red", "a corner of a box": "white"}
"""What a click can be, and the colour of its mark."""
ON, BESIDE, CORNER = MARKS
MAX_SIDE = 2000
"""Pixels of a picture that is shown; larger photos are answered at their own size."""
MAX_PEOPLE = 32


class Visit(NamedTuple):
    """The photo that a visitor looks at, and the clicks on it: x, y and one of `MARKS`."""

    photo: Photo
    clicks: tuple[tuple[float, float, str], ...] = ()


class Page:
    """What the controls of the page do. `folder` gets the files that can be downloaded."""

    def __init__(self, predictor: Predictor, folder: Path):
        self.predictor = predictor
        self.folder = folder

    def open_photo(self, file: str | None) -> tuple[Visit | None, np.ndarray | None]:
        """Opens an upload. Returns the visit and the picture; raises InputError as `encode`."""
        if file is None:
            return None, None
        return shown(Visit(self.predictor.encode(file)))

    def add_click(
        self, visit: Visit | None, kind: str, place: tuple[float, float]
    ) -> tuple[Visit | None, np.ndarray | None]:
        """Adds a click at a place of the picture. Returns the visit and the picture."""
        if visit is None:
            return None, None
        clicks = visit.clicks
        if kind == CORNER and sum(click[2] == CORNER for click in clicks) == 2:
            # A third corner begins another box.
            clicks = tuple(click for click in clicks if click[2] != CORNER)
        scale = picture_scale(visit.photo.pixels)
        return shown(visit._replace(clicks=(*clicks, (place[0] / scale, place[1] / scale, kind))))

    def clear_clicks(self, visit: Visit | None) -> tuple[Visit | None, np.ndarray | None]:
        """Takes all clicks away. Returns the visit and the picture."""
        return (None, None) if visit is None else shown(visit._replace(clicks=()))

    def answer(
        self, visit: Visit | None, query: str, mask_type: str, mask_file: str | None
    ) -> tuple[np.ndarray, str, str, str]:
        """Answers a sentence, clicks, a box or a given mask.

        Returns the picture, words about it, a PNG file and a JSON file with the masks as COCO RLEs.
        Raises InputError as `Predictor.predict`, and where there is no photo.
        """
        if visit is None:
            raise InputError("there is no photo yet; upload one")
        mask = read_file(Path(mask_file), visit.photo.size) if mask_file else None
        corners = np.array([(x, y) for x, y, kind in visit.clicks if kind == CORNER])
        box = (*corners.min(0), *corners.max(0)) if len(corners) == 2 else None
        points = [(x, y, kind == ON) for x, y, kind in visit.clicks if kind != CORNER]
        (prediction,) = self.predictor.predict(
            [query.strip()],
            mask_type=mask_type,
            image=visit.photo,
            masks=[mask],
            boxes=[box],
            points=[points],
        )
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        prediction.write(folder)
        picture = draw_marks(prediction.overlay(), visit.clicks)
        files = str(folder / "mask.png"), str(folder / "prediction.json")
        return picture, prediction.summary(), *files


def shown(visit: Visit) -> tuple[Visit, np.ndarray]:
    """Returns a visit and the picture of its photo with the clicks."""
    return visit, draw_marks(visit.photo.pixels, visit.clicks)


def picture_scale(pixels: np.ndarray) -> float:
    """Returns the size of the picture that is shown of a photo `[H W 3]`, in sizes of the photo."""
    return min(1.0, MAX_SIDE / max(pixels.shape[:2]))


def draw_marks(pixels: np.ndarray, clicks: tuple[tuple[float, float, str], ...]) -> np.ndarray:
    """Draws clicks over a photo, at the size that is shown."""
    scale = picture_scale(pixels)
    size = (round(pixels.shape[1] * scale), round(pixels.shape[0] * scale))
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
                raise gr.Error(str(error)) from None

        return call

    def click(visit: Visit | None, kind: str, event: gr.SelectData) -> Any:
        return page.add_click(visit, kind, (event.index[0], event.index[1]))

    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(600, 3600)) as blocks:
        visit = gr.State()
        gr.Markdown(INTRODUCTION)
        with gr.Row():
            with gr.Column(scale=4):
                # A file component: gr.Image would convert the upload.
                upload = gr.File(label="Photo", file_types=["image"])
                query = gr.Textbox(label="What do you want?", placeholder="the whole red mug")
                mask_type = gr.Radio(list(MASK_TYPE_CHOICES), value="auto", label="Mask type")
                kind = gr.Radio(list(MARKS), value=ON, label="A click on the picture is")
                mask_file = gr.File(label="Given visible mask", file_types=["image", ".json"])
                segment = gr.Button("Segment", variant="primary")
                clear = gr.Button("Clear clicks")
            with gr.Column(scale=7):
                words = gr.Markdown()
                picture = gr.Image(show_label=False, interactive=False)
                png = gr.DownloadButton("Mask as PNG")
                json = gr.DownloadButton("Masks as COCO JSON")

        upload.change(told(page.open_photo), upload, [visit, picture])
        picture.select(click, [visit, kind], [visit, picture])
        clear.click(page.clear_clicks, visit, [visit, picture])
        inputs, outputs = [visit, query, mask_type, mask_file], [picture, words, png, json]
        segment.click(told(page.answer), inputs, outputs)
        query.submit(told(page.answer), inputs, outputs)
    return blocks.queue(max_size=MAX_PEOPLE, api_open=False)


def main() -> None:
    """Command line."""
    args = read_flags(DemoConfig)
    enable_compilation_cache()
    with tempfile.TemporaryDirectory(prefix="r2sm_jax_demo_") as folder:
        # gradio reads both when it is imported: no reports home, and uploads go into our folder.
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
        os.environ["GRADIO_TEMP_DIR"] = folder
        try:
            import gradio as gr
        except ImportError:
            raise InputError("the page needs gradio; pip install 'r2sm_jax[demo]'") from None
        predictor = load(args.run).predictor
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
