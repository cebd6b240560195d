"""Draws what a model answers on two photographs in the public domain, which scikit-image brings along.

    pip install scikit-image && python scripts/draw_photos.py photos-small --out docs/photos.png

Chelsea the cat is by Stefan van der Walt, the cup of coffee by Rachel Michetti (both CC0).
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

import r2sm_jax
from r2sm_jax.data.sheet import Panel, save_sheet
from r2sm_jax.errors import InputError, exit_cleanly
from r2sm_jax.flags import parse_flags

QUESTIONS = {
    "chelsea": ("the cat", "the whole cat, with what the picture cuts off or anything hides"),
    "coffee": ("the cup", "the complete shape of the spoon, hidden parts included"),
}
"""Photo of scikit-image -> what is asked about it."""


@dataclass(frozen=True)
class DrawConfig:
    """Draws a model's answers on photographs of scikit-image."""

    run: Annotated[str, tyro.conf.Positional] = "photos-small"
    """Run, export or released model."""
    out: Path = Path("photos.png")
    """The picture."""


def main() -> None:
    """Command line."""
    args = parse_flags(DrawConfig, sys.argv[1:], prog="python scripts/draw_photos.py")
    try:
        from skimage import data  # pyright: ignore[reportMissingImports]  (only this script needs scikit-image)
    except ImportError:
        raise InputError("the photos come with scikit-image; pip install scikit-image") from None
    predictor = r2sm_jax.load(args.run)
    rows = []
    for name, queries in QUESTIONS.items():
        photo = getattr(data, name)()
        predictor.set_image(photo)
        answers = predictor.predict(list(queries))
        captions = [f"{p.mask_type}, predicted IoU {p.score:.2f}" for p in answers]
        rows.append([
            Panel(photo, f'"{p.query}"', caption, p.modal, p.occluded, p.mask_type)
            for p, caption in zip(answers, captions, strict=True)
        ])  # fmt: skip
    save_sheet(args.out, rows, title=f"Answers of {args.run}")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    exit_cleanly(main)
