"""`export --onnx`: a model as ONNX files that need onnxruntime alone, and a page that runs them.

    decide.onnx          ids [b t], mask [b t] -> probability [b], logit [b], states [b t l e]
    decide_small.onnx    the same with smaller weights, if no decision about val_r2sm changes
    complete.onnx        crops [m s s 6], others_known [m] -> logits [m s s]
    image_encoder.onnx   image [b S S 3], valid [b S S] -> tokens, coarse, fine
    query_decoder.onnx   tokens, coarse, fine, states [b k t l e], mask [b k t] -> answers

Each is run by onnxruntime and compared with JAX before anything is written.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from time import perf_counter

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from r2sm_jax.config import LEARNED_HEADS
from r2sm_jax.data.crops import CROP_EXTENT, MIN_CROP_SIDE
from r2sm_jax.data.letterbox import Letterbox
from r2sm_jax.data.tokenizer import pad_ids
from r2sm_jax.errors import InputError, load_json
from r2sm_jax.inference.crop_models import MaskCompleter
from r2sm_jax.inference.export_folder import CARD
from r2sm_jax.inference.export_weights import flat_weights, model_with_weights
from r2sm_jax.inference.onnx_convert import (
    Part,
    convert,
    open_session,
    quantize,
    store_in_float16,
)
from r2sm_jax.inference.run import Run
from r2sm_jax.models.crop_unet import make_completer
from r2sm_jax.models.depthwise import depthwise_conv
from r2sm_jax.models.hub import TOKENIZER
from r2sm_jax.models.r2sm import ImageFeatures
from r2sm_jax.models.text_encoder import load_text_encoder
from r2sm_jax.synthetic.queries.sentences import intent_sentences
from r2sm_jax.synthetic.sources import open_source

SETTINGS = "onnx.json"
SMALL = "decide_small.onnx"
PAGE = ("index.html", "page.mjs", "wordpiece.mjs", "crops.mjs")
MAX_DIFFERENCE = 1e-4
"""Of each output, as a share of its largest value, or of 1 where that is smaller."""
SENTENCES = ("the red mug", "the whole mug, hidden parts included, as if the book were not there")
TIMED_RUNS = 10


def check_onnx_folder(out: Path, overwrite: bool) -> None:
    """Raises InputError if the folder holds anything but ONNX files that may be replaced."""
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not (out / SETTINGS).exists()):
        raise InputError(f"{out}: it is a file, or has files of something else; give another --out")
    if (out / SETTINGS).exists() and not overwrite:
        raise InputError(f"{out}: it holds ONNX files already; give another --out or --overwrite")


def export_onnx(run: Run, out: Path, completer: MaskCompleter | None = None) -> str:
    """Writes the ONNX files of a model, their settings, tokenizer, card and page.

    Files of an earlier call are replaced, others stay.

    Args:
        completer: in place of the one that the model has; without either, nothing completes.

    Returns the card's table of the files.

    Raises InputError if the head does not decide by words, a part cannot be converted or differs
    from JAX (nothing is written then), or the folder cannot be written.
    """
    completer = completer or run.predictor.completer
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as work:
            folder = Path(work)
            table = _write_files(run, folder, completer, out.resolve().name)
            out.mkdir(exist_ok=True)
            for name in (SMALL, "complete.onnx", *PAGE):
                (out / name).unlink(missing_ok=True)
            for path in sorted(folder.iterdir()):
                os.replace(path, out / path.name)
    except OSError as error:
        raise InputError(
            f"{out}: the ONNX files cannot be written ({error.strerror}); pass another --out"
        ) from None
    return table


def _write_files(run: Run, folder: Path, completer: MaskCompleter | None, title: str) -> str:
    """Writes all files into a new folder. Returns the card's table."""
    config = run.config.model
    parts = onnx_parts(run, completer)
    rows = []
    for part in parts:
        convert(part, folder / part.file)
        difference = verify_part(part, folder / part.file)
        rows.append(_row(part, folder / part.file, f"{difference:.1g} from JAX"))
    decide, *_ = parts
    small, notes = write_small(run, folder)
    if small:
        rows.insert(1, _row(decide, folder / SMALL, small))

    settings = {
        "head": config.head,
        "decide": SMALL if small else decide.file,
        "complete": None if completer is None else "complete.onnx",
        "max_tokens": config.text.max_tokens,
        "text_layers": list(config.text.layers),
        "image_size": config.vision.image_size,
        "crop_size": None if completer is None else completer.config.size,
        "crop_extent": CROP_EXTENT,
        "min_crop_side": MIN_CROP_SIDE,
        "complete_threshold": None if completer is None else completer.threshold,
    }
    (folder / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n", "utf-8")
    tokenizer = run.predictor.text_encoder.folder / TOKENIZER
    is_word_piece = False
    if tokenizer.is_file():
        shutil.copyfile(tokenizer, folder / TOKENIZER)
        is_word_piece = load_json(tokenizer, "a tokenizer")["model"]["type"] == "WordPiece"
    if completer is not None and is_word_piece:
        page = files("r2sm_jax.inference") / "onnx_page"
        for name in PAGE:
            (folder / name).write_text((page / name).read_text("utf-8"), "utf-8")

    head = "| file | MB | ms on one core | compared |\n|---|---:|---:|---|\n"
    table = head + "\n".join(rows)
    card = (files("r2sm_jax.inference") / "onnx_card.md").read_text("utf-8")
    filled = card.format(title=title, table=table, notes=notes, step=run.step)
    (folder / CARD).write_text(filled, "utf-8")
    return table


def onnx_parts(run: Run, completer: MaskCompleter | None) -> list[Part]:
    """The functions that become files; the first is `decide`.

    Raises InputError if the head does not decide by words.
    """
    config = run.config.model
    if config.head not in LEARNED_HEADS:
        raise InputError(
            f"--onnx: the mask-type head {config.head} is no network that reads words alone; give "
            f"a model whose head is one of {', '.join(LEARNED_HEADS)}"
        )
    predictor = run.predictor
    weights = flat_weights(predictor.weights)
    model = model_with_weights(config, weights, run.folder)
    _use_plain_convolutions(model)
    encoder = load_text_encoder(predictor.text_encoder.folder)
    calibration = predictor.calibration

    def decide(ids: jax.Array, mask: jax.Array) -> tuple[jax.Array, ...]:
        states = encoder(ids, mask, config.text.layers)
        logits = model.amodal_logit(states[:, None], mask[:, None])[:, 0]
        logits = logits / calibration.type_temperature
        return jax.nn.sigmoid(logits), logits, states

    def encode_image(image: jax.Array, valid: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(model.encode_image(image, valid))

    def decode(
        tokens: jax.Array, coarse: jax.Array, fine: jax.Array, states: jax.Array, mask: jax.Array
    ) -> tuple[jax.Array, ...]:
        return tuple(model.decode(ImageFeatures(tokens, coarse, fine), states, mask, calibration))

    # One sentence alone, and two of different lengths.
    sentences = []
    for batch in (SENTENCES[:1], SENTENCES):
        ids, mask = predictor.text_encoder.tokens(batch)
        sentences.append({"ids": np.asarray(ids, np.int32), "mask": np.asarray(mask, bool)})
    images = _sample_images(config.vision.image_size)
    queries = []
    for image, sentence in zip(images, sentences, strict=True):
        features = jax.jit(encode_image)(*image.values())
        states = np.asarray(jax.jit(decide)(*sentence.values())[2])
        batch = len(image["image"])
        arrays = {
            "tokens": np.asarray(features[0]),
            "coarse": np.asarray(features[1]),
            "fine": np.asarray(features[2]),
            # All sentences about each image.
            "states": np.repeat(states[None], batch, axis=0),
            "mask": np.repeat(sentence["mask"][None], batch, axis=0),
        }
        queries.append(arrays)

    parts = [
        Part(
            "decide",
            decide,
            ("b, t", "b, t"),
            ("probability", "logit", "states"),
            tuple(sentences),
        ),
        Part(
            "image_encoder",
            encode_image,
            ("b, ...", "b, ..."),
            ("tokens", "coarse", "fine"),
            tuple(images),
        ),
        Part(
            "query_decoder",
            decode,
            ("b, ...", "b, ...", "b, ...", "b, k, t, ...", "b, k, t"),
            ("amodal_logit", "modal", "amodal", "presence", "iou"),
            tuple(queries),
        ),
    ]
    if completer is not None:
        parts.insert(1, completer_part(completer))
    return parts


def completer_part(completer: MaskCompleter) -> Part:
    """The completer as a part; its samples are noise, which it answers like anything else."""
    model = make_completer(completer.config, rngs=nnx.Rngs(0))
    nnx.update(model, completer.weights)
    _use_plain_convolutions(model)

    def complete(crops: jax.Array, others_known: jax.Array) -> tuple[jax.Array, ...]:
        known = jnp.broadcast_to(255 * others_known[:, None, None, None], (*crops.shape[:3], 1))
        logits, _ = model(jnp.concatenate([crops.astype(jnp.float32), known], axis=-1))
        return (logits,)

    rng = np.random.default_rng(0)
    size = completer.config.size
    samples = []
    for others_known in ([1], [0, 1, 1]):
        crops = rng.integers(0, 256, (len(others_known), size, size, 6), np.uint8)
        samples.append({"crops": crops, "others_known": np.array(others_known, np.float32)})
    return Part("complete", complete, ("m, ...", "m"), ("logits",), tuple(samples))


def _use_plain_convolutions(model: nnx.Module) -> None:
    """Gives depthwise convolutions back to XLA's operation, which ONNX has, too. In JAX ours takes
    part of the time, but only on CPUs, and is chosen when a program runs."""
    for _, layer in nnx.iter_graph(model):
        if isinstance(layer, nnx.Conv) and layer.conv_general_dilated is depthwise_conv:
            layer.conv_general_dilated = jax.lax.conv_general_dilated


def _sample_images(size: int) -> list[dict[str, np.ndarray]]:
    """One drawn scene, and two of another shape, in their frames."""
    source = open_source("scenes", "val", count=3, size=size)
    batches = []
    for rows, height in (((0,), size), ((1, 2), size - size // 8)):
        frames = []
        valid = []
        for row in rows:
            image = source[row].image[:height]
            letterbox = Letterbox(image.shape[0], image.shape[1], size)
            frames.append(letterbox.image(image))
            valid.append(letterbox.valid())
        batches.append({"image": np.stack(frames), "valid": np.stack(valid)})
    return batches


def verify_part(part: Part, path: Path) -> float:
    """Returns the largest difference between a file in onnxruntime and its function in JAX.

    Raises InputError if it exceeds `MAX_DIFFERENCE`.
    """
    session = open_session(path)
    function = jax.jit(part.function)
    largest = 0.0
    for sample in part.samples:
        answers = session.run(list(part.outputs), dict(sample))
        with jax.default_matmul_precision("float32"):
            expected = function(*[jnp.asarray(value) for value in sample.values()])
        for answer, value in zip(answers, expected, strict=True):
            value = np.asarray(value)
            if answer.shape != value.shape:
                raise InputError(
                    f"--onnx: {part.file} gives the shape {answer.shape}, not {value.shape}; leave "
                    "--onnx out"
                )
            difference = np.abs(answer - value).max() / max(1.0, np.abs(value).max())
            # np.maximum and not max(), which would lose NaN.
            largest = np.maximum(largest, difference)
    if not largest <= MAX_DIFFERENCE:
        raise InputError(
            f"--onnx: {part.file} differs from JAX by {largest:.2g}, {MAX_DIFFERENCE:g} is "
            "allowed; leave --onnx out"
        )
    return float(largest)


def write_small(run: Run, folder: Path) -> tuple[str | None, str]:
    """Writes `decide_small.onnx`, the smallest one with which no decision about val_r2sm changes.

    Returns what it holds, None if there is none, and a line on each that was tried.
    """
    sentences = [sentence.text for sentence in intent_sentences("val_r2sm")]
    expected = decide_sentences(run, folder / "decide.onnx", sentences)
    notes = []
    chosen = None
    with tempfile.TemporaryDirectory() as work:
        part = Path(work) / "part.onnx"
        for name, operations in (
            ("int8", ("MatMul", "Gather")),
            ("int8 embeddings, the rest float16", ("Gather",)),
        ):
            quantize(folder / "decide.onnx", part, operations)
            store_in_float16(part, part, exact=False)
            logits = decide_sentences(run, part, sentences)
            changed = int(((logits > 0) != (expected > 0)).sum())
            megabytes = part.stat().st_size / 1e6
            notes.append(
                f"- {name}, {megabytes:.1f} MB: {changed} of {len(sentences)} decisions change"
            )
            if not changed:
                shutil.copyfile(part, folder / SMALL)
                chosen = name
                break
    return chosen, "\n".join(notes)


def decide_sentences(run: Run, path: Path, sentences: Sequence[str]) -> np.ndarray:
    """The logits of a `decide` file for sentences, one by one."""
    session = open_session(path)
    token_ids = run.predictor.text_encoder.tokenizer(sentences)
    logits = []
    for ids in token_ids:
        padded, mask = pad_ids([ids], 1, max(1, len(ids)))
        (logit,) = session.run(["logit"], {"ids": padded, "mask": mask})
        logits.append(logit[0])
    return np.array(logits)


def _row(part: Part, path: Path, compared: str) -> str:
    """A line of the card's table: the median time of the first sample on one core."""
    session = open_session(path)
    inputs = dict(part.samples[0])
    times = []
    for _ in range(TIMED_RUNS):
        start = perf_counter()
        session.run(None, inputs)
        times.append(perf_counter() - start)
    milliseconds = 1000 * float(np.median(times))
    return f"| `{path.name}` | {path.stat().st_size / 1e6:.1f} | {milliseconds:.1f} | {compared} |"
