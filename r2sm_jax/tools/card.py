"""The model card of an export: `README.md`, whose front matter the Hugging Face hub reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from r2sm_jax.config import MINILM, Config, is_procedural

FIGURES = {"giou": "gIoU", "ciou": "cIoU", "occluded_iou": "occluded IoU"}

TEXT = """---
{front}
---

# {title}

Text-guided segmentation that knows whether the **visible** (modal) or the **complete** (amodal, hidden parts included)
shape is meant (R2SM, arXiv 2506.01795). Given an image and a sentence it gives the probability that the amodal shape is
meant, the modal, occluded and amodal mask, and up to {slots} instances.

## Use

```python
import r2sm_jax

predictor = r2sm_jax.load("{title}")  # this folder, or OWNER/NAME on the hub
predictor.set_image("photo.jpg")
for p in predictor.predict(["the red mug", "the red mug as if nothing stood in front of it"]):
    print(p.mask_type, p.amodal_probability, p.mask.shape)
```

`model.stablehlo` holds the same model as three functions that need JAX alone; docs/export.md of r2sm_jax shows them.

## Figures

{figures}

## Trained on

{data}

## Limits

- It sees {size} x {size} pixels, whatever the image's size; masks come back at its own resolution, no sharper.
- It reads the first {tokens} tokens of an English sentence.
{limits}- Hidden parts are a guess at what is usual, not a measurement: rest no decision about people or safety on it.
- Probabilities are calibrated (temperature {temperature:.3f}) on data like the training data, and on no other.

## Licences

| weights | from | licence |
|---|---|---|
| `model.safetensors` | {origin} | {licence} |
| {where} | {language_model}, sha256 `{language_sha256}` | {language_licence} |

Weights sha256 `{weights_sha256}`.
"""

LICENCES = {MINILM: "Apache-2.0"}
"""Of language models."""


def model_card(title: str, written: Mapping[str, Any], config: Config, report: Mapping[str, Any] | None) -> str:
    """The card as Markdown. `written` is the export's `config.json`; `report` the run's `report.json`, or None where
    it has none about these weights."""
    language, name = written["language_model"], config.model.text.name
    front = ModelCardData(
        language="en",
        license="other" if _encoders(config) else "apache-2.0",
        library_name="r2sm_jax",
        pipeline_tag="image-segmentation",
        tags=["jax", "flax", "stablehlo", "amodal-segmentation", "referring-expression-segmentation"],
        base_model=name if "/" in name and not name.startswith(("/", ".", "~")) else None,
        model_name=title,
        eval_results=_eval_results(report) if report else None,
    )
    embedded = f"`{written['language_model']['folder']}/`" if language["embedded"] else "not in this folder"
    return TEXT.format(
        front=front.to_yaml(),
        title=title,
        slots=config.model.decoder.slots,
        figures=_figures(report) if report else "There is no report about these weights.",
        data=_data(config),
        size=config.model.vision.image_size,
        tokens=config.model.text.max_tokens,
        limits=_limits(config),
        temperature=written["type_temperature"],
        origin=f"trained by r2sm_jax {written['r2sm_jax_version']}, step {written['step']}{_began_as(config)}",
        licence="as the publisher of what it began as says" if _encoders(config) else "Apache-2.0",
        where=embedded,
        language_model=name if front.base_model else "a local language model",
        language_sha256=language["sha256"],
        language_licence=LICENCES.get(name, "as its publisher says"),
        weights_sha256=written["weights_sha256"],
    )


def _began_as(config: Config) -> str:
    """Published weights of the image encoder."""
    names = [Path(n).name if Path(n).is_dir() else n for n in _encoders(config)]
    return f", its image encoder from {' and '.join(names)}" if names else ""


def _encoders(config: Config) -> list[str]:
    return [name for name in (config.model.vision.init, config.model.vision.name) if name]


def _eval_results(report: Mapping[str, Any]) -> list[EvalResult]:
    source = report["meta"]["source"].split(":")[0]
    return [
        EvalResult(
            task_type="image-segmentation", dataset_type=source, dataset_name=f"{source} {split}",
            dataset_split=split, metric_type=metric, metric_name=name, metric_value=figures["all"][metric],
        )
        for split, figures in report["splits"].items()
        for metric, name in FIGURES.items()
        if figures["all"][metric] is not None
    ]  # fmt: skip


def _figures(report: Mapping[str, Any]) -> str:
    rows = ["| split | queries | gIoU | modal | amodal | cIoU | occluded IoU | type accuracy | data sha256 |"]
    rows.append("|---|---|---|---|---|---|---|---|---|")
    for split, figures in report["splits"].items():
        every = figures["all"]
        values = [every["giou"], figures["modal"]["giou"], figures["amodal"]["giou"], every["ciou"]]
        values += [every["occluded_iou"], figures["mask_type"].get("accuracy")]
        shown = " | ".join("-" if value is None else f"{value:.3f}" for value in values)
        digest = report["meta"]["data_sha256"][split]
        rows.append(f"| `{split}` | {every['queries']} | {shown} | `{digest}` |")
    said = "Free-running, at the images' own resolution: the predicted type picks the mask; every query is counted."
    return "\n".join([*rows, "", said])


def _data(config: Config) -> str:
    data = config.data
    if data.source == "scenes":
        return (
            f"{data.scenes:,} procedural scenes (seed {data.seed}): drawn everyday objects that hide one another, with "
            "exact masks, and queries from a grammar. No photograph and no sentence by a person."
        )
    return f"`{data.source}`. Its licence is its publisher's; say it here before you pass these weights on."


def _limits(config: Config) -> str:
    if is_procedural(config.data.source):
        return "- It was trained on drawn or composed scenes alone: on photographs expect far less than the figures.\n"
    return ""
