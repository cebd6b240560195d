"""Every configuration for real data is run for a few steps, at reduced size, on a tiny file of its
own dialect."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_models import WIDTH
from transformers import SamConfig

from r2sm_jax.cli import load_config_file
from r2sm_jax.config import Config, check_config
from r2sm_jax.data import masks
from r2sm_jax.data.__main__ import main as convert
from r2sm_jax.models.pretrained import fill_sizes
from r2sm_jax.train import train

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[1] / "configs"
HEIGHT, WIDE = 40, 60
NAMES = sorted(path.stem for path in CONFIGS.glob("r2sm_*.py"))
DIALECT = {
    "r2sm_cocoa_cls": "cocoa-cls",
    "r2sm_d2sa": "d2sa",
    "r2sm_muva": "muva",
}


def rectangle(x0: int, y0: int, x1: int, y1: int) -> np.ndarray:
    drawn = np.zeros((HEIGHT, WIDE), bool)
    drawn[y0:y1, x0:x1] = True
    return drawn


def write_dialect(folder: Path, dialect: str, images: int = 12) -> Path:
    """Photos with two objects, one behind the other, as the data set's authors annotate them."""
    rng = np.random.default_rng(0)
    content: dict[str, list[dict[str, Any]]] = {"images": [], "annotations": [], "categories": []}
    content["categories"] = [{"id": 3, "name": "bottle"}, {"id": 9, "name": "box"}]
    for i in range(images):
        x = int(rng.integers(0, 20))
        front, back = rectangle(x, 5, x + 15, 30), rectangle(x + 8, 10, x + 35, 38)
        picture = rng.integers(0, 60, (HEIGHT, WIDE, 3), dtype=np.uint8)
        picture[back], picture[front] = (200, 180, 40), (40, 80, 220)
        Image.fromarray(picture).save(folder / f"{i}.png")
        content["images"].append(
            {"id": i + 1, "file_name": f"{i}.png", "height": HEIGHT, "width": WIDE}
        )
        visible = back & ~front
        for order, (amodal, modal) in enumerate([(front, front), (back, visible)]):
            annotation = {
                "id": 2 * i + order + 1,
                "image_id": i + 1,
                "category_id": (3, 9)[order],
                "iscrowd": 0,
                "segmentation": masks.encode(amodal),
                "visible_mask": masks.encode(modal),
                "occlude_rate": 1 - modal.sum() / amodal.sum(),
            }
            content["annotations"].append(
                annotation | ({"occl_depth": order} if dialect == "d2sa" else {})
            )
    path = folder / "annotations.json"
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def data(tmp_path, request, monkeypatch) -> Path:
    """A file as `data convert` makes it, with template queries."""
    source, out = write_dialect(tmp_path, request.param), tmp_path / "train.json"
    monkeypatch.setattr(
        "sys.argv", ["data", "convert", request.param, str(source), "--out", str(out)]
    )
    convert()
    return out


def reduced(config: Config, data: Path, folder: Path, text: Path) -> Config:
    """The same experiment in small: every field that is not a size stays."""
    model, vision = config.model, config.model.vision
    vision = replace(
        vision,
        image_size=64,
        dim=32,
        depth=3,
        heads=2,
        mlp_dim=64,
        out_dim=32,
        window_size=3,
        global_blocks=(2,),
        sam=None,
    )
    decoder = replace(model.decoder, dim=32, depth=1, heads=2, mlp_dim=64, fine_dim=16, mask_dim=8)
    language = replace(model.text, name=str(text), layers=(1, 2), dim=WIDTH)
    return replace(
        config,
        run=str(folder),
        model=replace(model, vision=vision, decoder=decoder, text=language),
        data=replace(
            config.data,
            source=f"json:{data}",
            text_only_queries=min(20, config.data.text_only_queries),
        ),
        train=replace(
            config.train,
            steps=2,
            evaluate_every=2,
            checkpoint_every=2,
            report_samples=2,
            log_every=1,
        ),
    )


def test_every_configuration_is_run_here():
    assert set(NAMES) == set(DIALECT)


@pytest.mark.parametrize(("name", "data"), [(n, DIALECT[n]) for n in NAMES], indirect=["data"])
def test_a_configuration_trains_and_reports(name, data, tmp_path, bert_folder, request):
    reports = (
        name == "r2sm_cocoa_cls"
    )  # evaluation and report do not depend on where a data set comes from
    if not reports:
        request.getfixturevalue("steps_alone")
    config = check_config(load_config_file(CONFIGS / f"{name}.py"))
    folder = train(reduced(config, data, tmp_path / "run", bert_folder))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [np.isfinite(line["train/loss"]) for line in lines if "train/loss" in line] == [
        True,
        True,
    ]
    if reports:
        report = json.loads((folder / "report.json").read_text())
        assert report["splits"]["val"]["all"]["queries"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_the_protocol_is_the_papers(name):
    """Ten epochs of the training images that are not held out, and an evaluation after each."""
    config = load_config_file(CONFIGS / f"{name}.py")
    held_in = {"cocoa_cls": 2276, "d2sa": 2000, "muva": 3000}[name.removeprefix("r2sm_")] * 0.9
    loop = config.train
    assert loop.steps * loop.batch_size / held_in == pytest.approx(10, rel=0.01)
    assert loop.steps / loop.evaluate_every == pytest.approx(10, abs=0.01)
    assert config.data.queries == 10 and loop.batch_size // loop.accumulate == 2


def test_sizes_of_published_sam_fill_the_configuration(tmp_path):
    """`transformers`' default is ViT-B; sizes that contradict it would be refused."""
    model = load_config_file(CONFIGS / f"{NAMES[0]}.py").model
    SamConfig().save_pretrained(tmp_path)
    vision = replace(model.vision, sam=str(tmp_path))
    model = replace(model, vision=vision, decoder=replace(model.decoder, type="sam"))
    filled = fill_sizes(model)
    vision, decoder = filled.vision, filled.decoder
    assert (vision.dim, vision.depth, vision.global_blocks) == (768, 12, (2, 5, 8, 11))
    assert (vision.out_dim, decoder.dim, decoder.depth, decoder.heads) == (256, 256, 2, 8)
    assert fill_sizes(model, known=filled) == filled
