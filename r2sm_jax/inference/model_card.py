"""The model card of an export, as the Hugging Face hub shows it."""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from r2sm_jax.config import MINILM, Config
from r2sm_jax.inference.model_folder import LANGUAGE_MODEL
from r2sm_jax.markdown import Table
from r2sm_jax.models.hub import HUB

CARD_COLUMNS = {
    "gIoU": ("all", "giou"),
    "modal": ("modal", "giou"),
    "amodal": ("amodal", "giou"),
    "cIoU": ("all", "ciou"),
    "occluded IoU": ("all", "occluded_iou"),
    "type accuracy": ("mask_type", "accuracy"),
}
"""Of the table of figures: where a split of a report has them."""
METRICS = ("gIoU", "cIoU", "occluded IoU")
"""Those that the hub lists."""

FUNCTIONS_TEXT = (
    "\n`model.stablehlo` holds the same model as three functions that need only JAX; "
    "docs/export.md of r2sm_jax shows how to call them.\n"
)
SCENES_TEXT = (
    "{scenes:,} procedural scenes (seed {seed}): drawn everyday objects that hide one another, "
    "with exact masks, and queries from a grammar. No photographs, and no sentences written by "
    "people."
)
OTHER_DATA_TEXT = (
    "`{source}`. Its publisher sets its licence; state it here before you pass these weights on."
)
PART_TEXTS = {
    "completer": (
        "\n## Completer\n\n"
        "These files hold a completer as well: it turns the visible mask of an object, from "
        "whatever source, into the complete one. docs/complete.md of r2sm_jax shows how.\n"
    ),
    "outliner": (
        "\n## Outliner\n\n"
        "These files hold an outliner as well: it draws the visible mask of what a box or clicks "
        "mean. docs/predict.md of r2sm_jax shows how.\n"
    ),
}
"""By the name of a part."""
NO_PHOTOS_TEXT = (
    "\n- It was trained on drawn or composed scenes only: expect much lower figures on photographs."
)


def model_card(
    title: str, stored: Mapping[str, Any], config: Config, report: Mapping[str, Any] | None
) -> str:
    """Returns the model card as Markdown: card.md filled in.

    Args:
        title: the name of the model.
        stored: the export's `config.json`.
        config: its configuration, without local folders.
        report: the run's `report.json`; None where there is none about these weights.
    """
    data, model = config.data, config.model
    encoders = model.vision.pretrained
    origin = f"trained by r2sm_jax {stored['r2sm_jax_version']}, step {stored['step']}"
    if encoders:
        origin += f", image encoder from {' and '.join(encoders)}"
    data_text = SCENES_TEXT if data.source == "scenes" else OTHER_DATA_TEXT
    language_model = stored["language_model"]
    text_name = model.text.name

    card = (files("r2sm_jax.inference") / "card.md").read_text("utf-8")
    return card.format(
        front_matter=_front_matter(title, config, report, stored["compact"]),
        title=title,
        num_slots=model.decoder.slots,
        functions="" if stored["compact"] else FUNCTIONS_TEXT,
        figures=_figures(report) if report else "There is no report about these weights.",
        data=data_text.format(scenes=data.scenes, seed=data.seed, source=data.source),
        image_size=model.vision.image_size,
        max_tokens=model.text.max_tokens,
        no_photos=NO_PHOTOS_TEXT if data.source.startswith(("scenes", "cutouts:")) else "",
        temperature=stored["calibration"]["type_temperature"],
        origin=origin,
        licence="that of the image encoder's publisher" if encoders else "Apache-2.0",
        language_model_folder=f"`{LANGUAGE_MODEL}/`"
        if language_model["embedded"]
        else "not in this folder",
        language_model=text_name if "/" in text_name else "a local language model",
        language_model_sha256=language_model["sha256"],
        language_model_licence="Apache-2.0" if text_name == MINILM else "that of its publisher",
        weights_sha256=stored["weights_sha256"],
    )


def _front_matter(
    title: str, config: Config, report: Mapping[str, Any] | None, compact: bool
) -> str:
    """Returns the YAML that the hub reads."""
    text_name = config.model.text.name
    tags = ["jax", "flax", "amodal-segmentation", "referring-expression-segmentation"]
    if not compact:
        tags.append("stablehlo")
    data = ModelCardData(
        language="en",
        license="other" if config.model.vision.pretrained else "apache-2.0",
        library_name="r2sm_jax",
        pipeline_tag="image-segmentation",
        tags=tags,
        base_model=text_name.removeprefix(HUB).partition("@")[0] if "/" in text_name else None,
        model_name=title,
        eval_results=_eval_results(report) if report else None,
    )
    return data.to_yaml()


def _eval_results(report: Mapping[str, Any]) -> list[EvalResult]:
    """Returns the figures that the hub lists."""
    source = report["meta"]["source"].partition(":")[0]
    results = []
    for split, figures in report["splits"].items():
        for name in METRICS:
            group, metric = CARD_COLUMNS[name]
            if figures[group][metric] is None:
                continue
            result = EvalResult(
                task_type="image-segmentation",
                dataset_type=source,
                dataset_name=f"{source} {split}",
                dataset_split=split,
                metric_type=metric,
                metric_name=name,
                metric_value=figures[group][metric],
            )
            results.append(result)
    return results


def _figures(report: Mapping[str, Any]) -> str:
    """Returns a table of the report's splits, and what the weights were selected on."""
    rows = []
    for split, figures in report["splits"].items():
        values = [figures[group][metric] for group, metric in CARD_COLUMNS.values()]
        cells = ["-" if value is None else f"{value:.3f}" for value in values]
        digest = report["meta"]["data_sha256"][split]
        num_queries = figures["all"]["queries"]
        rows.append([f"`{split}`", f"{num_queries}", *cells, f"`{digest}`"])
    lines = Table("", ["split", "queries", *CARD_COLUMNS, "data sha256"], rows).markdown()
    lines.append("")
    lines.append(
        "At the images' own resolution, over all queries; the predicted mask type picks the mask."
    )
    if selected_on := report["meta"].get("selected_on"):
        lines.append(f"The checkpoint was selected on `{selected_on}`.")
    return "\n".join(lines)
