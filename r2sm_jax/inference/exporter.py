"""`python -m r2sm_jax.export RUN --out DIR`: writes a run as the folder that docs/export.md describes."""

import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Template
from safetensors import SafetensorError
from safetensors.numpy import save_file

import r2sm_jax
from r2sm_jax.cli import parse_flags, to_json
from r2sm_jax.config import MINILM, Config, ModelConfig
from r2sm_jax.data.images import PAD_COLOUR
from r2sm_jax.errors import InputError
from r2sm_jax.evaluation.tables import selection
from r2sm_jax.inference import exported
from r2sm_jax.inference.exported import CONFIG, LANGUAGE_MODEL, SUMS, WEIGHTS
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.inference.run import Run, open_run
from r2sm_jax.inference.verify import verify
from r2sm_jax.models.encoder_sizes import EncoderSizes
from r2sm_jax.models.mask_decoder import PixelFeatures
from r2sm_jax.models.matmul import products
from r2sm_jax.models.r2sm import PIXEL_MEAN, PIXEL_STD, Calibration, input_spec
from r2sm_jax.models.text_encoder import abstract_text_encoder, load_text_encoder
from r2sm_jax.models.weights import HUB, INDEX, TOKENIZER_FILES, Tensor, read_tensors, weight_files

PLATFORMS = ("cpu", "cuda", "tpu")
METRICS = {"giou": "gIoU", "ciou": "cIoU", "occluded_iou": "occluded IoU"}
LANGUAGE_MODEL_LICENCES = {MINILM: "Apache-2.0"}
Tensors = Mapping[str, Tensor]
"""Arrays by dotted name."""


@dataclass(frozen=True)
class ExportConfig:
    """Writes a run as a folder in Hugging Face's layout: safetensors, tokenizer, model card, StableHLO."""

    run: Annotated[str, tyro.conf.Positional]
    """Run folder, such as runs/latest."""
    out: str
    """Folder to write. Its name is the model's name on the card."""
    lm: Literal["embed", "reference"] = "embed"
    """embed: copy the frozen language model into the folder; reference: write its name and checksum, and download it
    at the first use."""
    compact: bool = False
    """Write the trained weights alone, in float16: published weights that are frozen and the language model are
    referred to by name, and there is no StableHLO."""
    checkpoint: str = "best"
    """best (highest gIoU on the split --train.select-on), latest, or the number of a step."""
    overwrite: bool = False
    """Replace an earlier export in the folder, with its model card."""
    verify: bool = False
    """Check that the run, the export, and the StableHLO without this package give the same answers."""


def main() -> None:
    """Command line."""
    args = parse_flags(ExportConfig, sys.argv[1:], prog="python -m r2sm_jax.export")
    out = Path(args.out)
    is_taken = (out / CONFIG).exists()
    if (
        out.is_file()
        or (out / "checkpoints").exists()
        or (is_taken and not exported.is_export(out))
    ):
        raise InputError(
            f"{out}: this is a file, a run folder, or has another model's {CONFIG}; give another --out"
        )
    if is_taken and not args.overwrite:
        raise InputError(f"{out}: it holds an export already; give another --out or --overwrite")
    run = open_run(Path(args.run), checkpoint=args.checkpoint)
    if run.exported:
        raise InputError(
            f"{args.run}: this is an export already; copy the folder, or give the run that it came from"
        )
    name, vision = run.config.model.text.name, run.config.model.vision
    if args.compact and args.verify:
        raise InputError(
            "--verify compares float32 weights with the StableHLO; leave it out with --compact"
        )
    if (args.compact or args.lm == "reference") and Path(name).expanduser().is_dir():
        flag = "--compact" if args.compact else "--lm reference"
        raise InputError(
            f"{flag}: the language model {name} is a folder of this machine; use --lm embed alone"
        )
    if args.compact and (
        local := [name for name in vision.pretrained if Path(name).expanduser().exists()]
    ):
        raise InputError(
            f"--compact: the image encoder {local[0]} is on this machine alone; leave --compact out"
        )
    export(run, out, lm=args.lm, compact=args.compact)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"wrote {out}: step {run.step}, {size / 1e6:.1f} MB")
    if args.verify:
        print(verify(run, out))


def export(run: Run, out: Path, *, lm: str = "embed", compact: bool = False) -> None:
    """Writes an export of an opened run; `lm` and `compact` as in `ExportConfig`. Files of an earlier export in `out`
    are replaced, other files stay. Raises InputError if the folder cannot be written, or the model cannot be exported.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as work:
            _write(run, Path(work), out.resolve().name, "reference" if compact else lm, compact)
            _move(Path(work), out)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{out}: the export cannot be written ({reason}); pass another --out"
        ) from None


def _write(run: Run, folder: Path, title: str, lm: str, compact: bool) -> None:
    report = report_of(run)
    run, trained = _in_float16(run) if compact else (run, None)
    texts, config = run.predictor.text_encoder, portable(run.config)
    weights = exported.by_dotted_path(run.predictor.weights)
    written = {
        "architectures": ["R2SM"],
        "model_type": exported.MODEL_TYPE,
        "format_version": exported.FORMAT_VERSION,
        "r2sm_jax_version": r2sm_jax.__version__,
        "language_model": {
            "name": config.model.text.name,
            **texts.identity,
            "embedded": lm == "embed",
            "folder": LANGUAGE_MODEL if lm == "embed" else None,
        },
        "image_encoder": to_json(run.sizes),
        "mask_threshold": run.config.model.mask_threshold,
        "calibration": run.predictor.calibration._asdict(),
        "compact": compact,
        "step": run.step,
        "weights_sha256": run.predictor.weights_sha256,
        "config": to_json(config),
    }
    (folder / CONFIG).write_text(json.dumps(written, indent=1) + "\n", "utf-8")
    (folder / "preprocessor_config.json").write_text(
        json.dumps(preprocessing(run.config), indent=1) + "\n", "utf-8"
    )
    kept = trained or {name: np.asarray(x) for name, x in weights.items()}
    save_file(kept, folder / WEIGHTS, {"format": "np"})
    if lm == "embed":
        names = [
            CONFIG,
            INDEX,
            *(file.name for file in weight_files(texts.folder)),
            *TOKENIZER_FILES,
        ]
        _copy(texts.folder, folder / LANGUAGE_MODEL, names)
    if not compact:
        _copy(texts.folder, folder, TOKENIZER_FILES)
        functions = export_functions(
            run.config.model,
            run.sizes,
            weights,
            run.predictor.calibration,
            texts.folder,
            read_tensors(texts.folder),
        )
        write_functions(folder / exported.FUNCTIONS, functions)
    (folder / exported.CARD).write_text(model_card(title, written, config, report), "utf-8")
    exported.write_sums(folder)


def _copy(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copies those of the files that exist."""
    target.mkdir(exist_ok=True)
    for name in names:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def _move(new: Path, out: Path) -> None:
    """Moves the files of a new export to `out` and removes those of an earlier one."""
    out.mkdir(exist_ok=True)
    # The checksums go first and come last: a folder without them does not load.
    for name in (SUMS, exported.FUNCTIONS, *TOKENIZER_FILES):
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / LANGUAGE_MODEL, ignore_errors=True)
    for path in sorted(new.iterdir(), key=lambda path: path.name == SUMS):
        os.replace(path, out / path.name)


def report_of(run: Run) -> dict[str, Any] | None:
    """The run's own `report.json`, if it is about these weights."""
    try:
        report = json.loads((run.folder / "report.json").read_text("utf-8"))
        return (
            report if report["meta"].get("weights_sha256") == run.predictor.weights_sha256 else None
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _in_float16(run: Run) -> tuple[Run, dict[str, np.ndarray]]:
    """The run with all weights rounded to float16 that are not as published, and these weights by dotted path."""
    published = exported.published_weights(run.config.model, run.sizes)
    weights = {
        name: np.asarray(x) for name, x in exported.by_dotted_path(run.predictor.weights).items()
    }
    trained = {
        name: x.astype(np.float16)
        for name, x in weights.items()
        if name not in published or not np.array_equal(x, published[name])
    }
    rounded = weights | {name: x.astype(np.float32) for name, x in trained.items()}
    graphdef, state = nnx.split(
        exported.with_weights(run.config.model, run.sizes, rounded, run.folder)
    )
    before = run.predictor
    predictor = Predictor(
        run.config.model, graphdef, state, before.text_encoder, before.calibration
    )
    return replace(run, predictor=predictor), trained


def portable(config: Config) -> Config:
    """A run's configuration with names in place of local folders."""
    kind, colon, where = config.data.source.partition(":")
    data = replace(
        config.data,
        source=kind + colon + Path(where).name,
        images=None,
        backgrounds=None,
        cutouts=None,
    )
    text, vision = config.model.text, config.model.vision
    vision = replace(
        vision,
        sam=vision.sam and _name(vision.sam),
        vit=vision.vit and _name(vision.vit),
        efficientnet=vision.efficientnet and _name(vision.efficientnet),
    )
    model = replace(config.model, text=replace(text, name=_name(text.name)), vision=vision)
    return replace(config, run=None, init=None, resume=False, data=data, model=model)


def _name(model: str) -> str:
    """The name of a published model, or of the local folder or file that holds one."""
    return Path(model).name if Path(model).expanduser().exists() else model


def preprocessing(config: Config) -> dict[str, Any]:
    """How an image becomes the frame that `encode_image` takes, in the terms of Hugging Face's image processors."""
    size = config.model.vision.image_size
    fixed = json.loads(
        (files("r2sm_jax.inference") / "preprocessor_config.json").read_text("utf-8")
    )
    return fixed | {
        "size": {"longest_edge": size},
        "pad_size": {"height": size, "width": size},
        "pad_color": list(PAD_COLOUR),
        "image_mean": PIXEL_MEAN.tolist(),
        "image_std": PIXEL_STD.tolist(),
        "max_tokens": config.model.text.max_tokens,
    }


def model_card(
    title: str, written: Mapping[str, Any], config: Config, report: Mapping[str, Any] | None
) -> str:
    """The model card as Markdown: card.md filled in. The Hugging Face hub reads its front matter.

    `written` is the export's `config.json`, `config` its configuration without local folders, `report` the run's
    `report.json`, or None where there is none about these weights.
    """
    language, name = written["language_model"], config.model.text.name
    is_published = "/" in name
    began_as = config.model.vision.pretrained
    functions = () if written.get("compact") else ("stablehlo",)
    front = ModelCardData(
        language="en",
        license="other" if began_as else "apache-2.0",
        library_name="r2sm_jax",
        pipeline_tag="image-segmentation",
        tags=[
            "jax",
            "flax",
            *functions,
            "amodal-segmentation",
            "referring-expression-segmentation",
        ],
        base_model=name.removeprefix(HUB).partition("@")[0] if is_published else None,
        model_name=title,
        eval_results=_eval_results(report) if report else None,
    )
    card = (files("r2sm_jax.inference") / "card.md").read_text("utf-8")
    template = Template(card, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return template.render(
        title=title,
        front=front.to_yaml(),
        config=config,
        written=written,
        report=report,
        selection=selection(report) if report else "",
        began_as=began_as,
        language=language,
        language_model=name if is_published else "a local language model",
        language_licence=LANGUAGE_MODEL_LICENCES.get(name, "that of its publisher"),
    )


def _eval_results(report: Mapping[str, Any]) -> list[EvalResult]:
    source = report["meta"]["source"].split(":")[0]
    return [
        EvalResult(
            task_type="image-segmentation",
            dataset_type=source,
            dataset_name=f"{source} {split}",
            dataset_split=split,
            metric_type=metric,
            metric_name=name,
            metric_value=figures["all"][metric],
        )
        for split, figures in report["splits"].items()
        for metric, name in METRICS.items()
        if figures["all"][metric] is not None
    ]


def export_functions(
    config: ModelConfig,
    encoder_sizes: EncoderSizes,
    weights: Tensors,
    calibration: Calibration,
    language_model: Path,
    text_weights: Tensors,
) -> dict[str, bytes]:
    """`model.stablehlo`: the segmenter as three functions that need only JAX, lowered for `PLATFORMS` and serialised.

    Their first argument is the content of a safetensors file, as `safetensors.numpy.load_file` returns it. Batch size,
    number of queries and number of tokens are free. `calibration` is part of `answer`. They multiply in float32, whatever JAX's default is.

    encode_text(language model, ids [b t], mask [b t]) -> states [b t l e]
    encode_image(weights, image [b S S 3], valid [b S S]) -> features
    answer(weights, features, states [b k t l e], mask [b k t]) -> answers

    `language_model` is a folder, `text_weights` the content of its safetensors files. Raises InputError if the language
    model reads its padding, as SigLIP does, so that the number of tokens cannot be free.
    """
    sizes = abstract_text_encoder(language_model).sizes
    if sizes.reads_padding:
        raise InputError(
            f"{language_model}: a language model that reads its padding (SigLIP) cannot be exported yet"
        )

    def encode_text(tensors: Tensors, ids: jax.Array, mask: jax.Array) -> jax.Array:
        return load_text_encoder(language_model, tensors).kept_states(ids, mask, config.text.layers)

    def encode_image(tensors: Tensors, image: jax.Array, valid: jax.Array) -> dict[str, jax.Array]:
        tokens, pixels = exported.with_weights(
            config, encoder_sizes, tensors, Path(WEIGHTS)
        ).encode_image(image, valid)
        return {"tokens": tokens, **pixels._asdict()}

    def answer(
        tensors: Tensors, features: dict[str, jax.Array], text: jax.Array, text_mask: jax.Array
    ) -> dict[str, jax.Array]:
        pixels = PixelFeatures(**{name: features[name] for name in PixelFeatures._fields})
        model = exported.with_weights(config, encoder_sizes, tensors, Path(WEIGHTS))
        out = model.answer(features["tokens"], pixels, text, text_mask, calibration)
        return out._asdict()

    ours, theirs = jax.eval_shape(lambda *tensors: tensors, dict(weights), dict(text_weights))
    ids, mask = (jax.ShapeDtypeStruct((1, 1), dtype) for dtype in (jnp.int32, jnp.bool_))
    image, valid, text, text_mask = input_spec(config, 1, 1).values()
    programs = {}
    with products("float32"):
        features = jax.eval_shape(encode_image, ours, image, valid)
        for function, inputs, shapes, limits in (
            (
                encode_text,
                (theirs, ids, mask),
                ("...", "b, t", "b, t"),
                [f"t <= {sizes.max_tokens}"],
            ),
            (encode_image, (ours, image, valid), ("...", "b, ...", "b, ..."), []),
            (
                answer,
                (ours, features, text, text_mask),
                ("...", "b, ...", "b, k, t, ...", "b, k, t"),
                [],
            ),
        ):
            symbolic = jax.export.symbolic_args_specs(inputs, shapes, constraints=limits)
            lowered = jax.export.export(jax.jit(function), platforms=PLATFORMS)(*symbolic)
            programs[function.__name__] = bytes(lowered.serialize())
    return programs


def write_functions(path: Path, functions: Mapping[str, bytes]) -> None:
    """Writes `model.stablehlo`; equal functions give equal bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in functions.items():
            file.writestr(
                zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED
            )
