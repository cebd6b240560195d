"""The model card of an export: `card.md` filled in. The Hugging Face hub reads its front matter."""

from collections.abc import Mapping
from importlib.resources import files
from string import Template
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from r2sm_jax.config import MINILM, Config, is_procedural

METRICS = {"giou": "gIoU", "ciou": "cIoU", "occluded_iou": "occluded IoU"}
LANGUAGE_MODEL_LICENCES = {MINILM: "Apache-2.0"}
DRAWN_ONLY = "- It was trained on drawn or composed scenes only: expect much lower figures on photographs.\n"


def model_card(title: str, written: Mapping[str, Any], config: Config, report: Mapping[str, Any] | None) -> str:
    """The card as Markdown.

    `written` is the export's `config.json`, `config` its configuration without local folders, `report` the run's
    `report.json`, or None where there is none about these weights.
    """
    language, name = written["language_model"], config.model.text.name
    is_published = "/" in name
    began_as = [encoder for encoder in (config.model.vision.init, config.model.vision.name) if encoder]
    front = ModelCardData(
        language="en",
        license="other" if began_as else "apache-2.0",
        library_name="r2sm_jax",
        pipeline_tag="image-segmentation",
        tags=["jax", "flax", "stablehlo", "amodal-segmentation", "referring-expression-segmentation"],
        base_model=name if is_published else None,
        model_name=title,
        eval_results=_eval_results(report) if report else None,
    )
    origin = f"trained by r2sm_jax {written['r2sm_jax_version']}, step {written['step']}"
    return Template((files("r2sm_jax.tools") / "card.md").read_text()).substitute(
        front=front.to_yaml(),
        title=title,
        slots=config.model.decoder.slots,
        figures=_figures(report) if report else "There is no report about these weights.",
        data=_data(config),
        size=config.model.vision.image_size,
        tokens=config.model.text.max_tokens,
        limits=DRAWN_ONLY if is_procedural(config.data.source) else "",
        temperature=f"{written['type_temperature']:.3f}",
        origin=origin + (f", image encoder from {' and '.join(began_as)}" if began_as else ""),
        licence="that of the image encoder's publisher" if began_as else "Apache-2.0",
        place=f"`{language['folder']}/`" if language["embedded"] else "not in this folder",
        language_model=name if is_published else "a local language model",
        language_sha256=language["sha256"],
        language_licence=LANGUAGE_MODEL_LICENCES.get(name, "that of its publisher"),
        weights_sha256=written["weights_sha256"],
    )


def _eval_results(report: Mapping[str, Any]) -> list[EvalResult]:
    source = report["meta"]["source"].split(":")[0]
    return [
        EvalResult(
            task_type="image-segmentation", dataset_type=source, dataset_name=f"{source} {split}",
            dataset_split=split, metric_type=metric, metric_name=name, metric_value=figures["all"][metric],
        )
        for split, figures in report["splits"].items()
        for metric, name in METRICS.items()
        if figures["all"][metric] is not None
    ]  # fmt: skip


def _figures(report: Mapping[str, Any]) -> str:
    rows = ["| split | queries | gIoU | modal | amodal | cIoU | occluded IoU | type accuracy | data sha256 |"]
    rows.append("|---|---|---|---|---|---|---|---|---|")
    for split, figures in report["splits"].items():
        both = figures["all"]
        values = [both["giou"], figures["modal"]["giou"], figures["amodal"]["giou"], both["ciou"]]
        values += [both["occluded_iou"], figures["mask_type"].get("accuracy")]
        columns = " | ".join("-" if value is None else f"{value:.3f}" for value in values)
        rows.append(f"| `{split}` | {both['queries']} | {columns} | `{report['meta']['data_sha256'][split]}` |")
    rows += ["", "At the images' own resolution, over all queries; the predicted mask type picks the mask."]
    return "\n".join(rows)


def _data(config: Config) -> str:
    data = config.data
    if data.source != "scenes":
        return f"`{data.source}`. Its publisher sets its licence; state it here before you pass these weights on."
    return (
        f"{data.scenes:,} procedural scenes (seed {data.seed}): drawn everyday objects that hide one another, with "
        "exact masks, and queries from a grammar. No photographs, and no sentences written by people."
    )
