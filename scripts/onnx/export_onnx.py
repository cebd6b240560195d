"""`python scripts/onnx/export_onnx.py --model MODEL --out DIR`: decide and complete as ONNX files.

    decide.onnx      ids [b t], mask [b t] -> probability [b], logit [b]
    complete.onnx    crops [m s s 6], others_known [m] -> logits [m s s]

They need onnxruntime alone, and a page that runs them in a browser lies beside them. Each is run by
onnxruntime and compared with JAX (docs/onnx.md).
"""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from onnx_convert import Part, convert, largest_difference

from r2sm_jax.config import LEARNED_HEADS
from r2sm_jax.data.crops import CROP_EXTENT, MIN_CROP_SIDE
from r2sm_jax.data.tokenizer import pad_ids, write_tokenizer
from r2sm_jax.errors import InputError
from r2sm_jax.inference.crop_models import MaskCompleter
from r2sm_jax.inference.load import Run, load, load_part
from r2sm_jax.models.crop_unet import make_completer
from r2sm_jax.models.depthwise import depthwise_conv
from r2sm_jax.models.hub import TOKENIZER
from r2sm_jax.models.r2sm import abstract_model
from r2sm_jax.models.text_encoder import load_text_encoder

SETTINGS = "onnx.json"
PAGE = Path(__file__).with_name("page")
SENTENCES = ("the red mug", "the whole mug, hidden parts included, as if the book were not there")
MAX_DIFFERENCE = 1e-4
"""Of each output, as a share of its largest value, or of 1 where that is smaller."""


def decide_part(run: Run) -> Part:
    """Builds the function that decides. Raises InputError if the head reads more than words."""
    config = run.config.model
    if config.head not in LEARNED_HEADS:
        raise InputError(
            f"the mask-type head {config.head} is no network that reads words alone; give a model "
            f"whose head is one of {', '.join(LEARNED_HEADS)}"
        )
    predictor = run.predictor
    graphdef, _ = nnx.split(abstract_model(config))
    model = nnx.merge(graphdef, predictor.weights)
    encoder = load_text_encoder(predictor.text_encoder.folder)

    def decide(ids: jax.Array, mask: jax.Array) -> tuple[jax.Array, ...]:
        states = encoder(ids, mask, config.text.layers)
        logits = model.amodal_logit(states[:, None], mask[:, None])[:, 0]
        logits = logits / predictor.calibration.type_temperature
        return jax.nn.sigmoid(logits), logits

    # One sentence alone, and two of different lengths.
    samples = []
    for batch in (SENTENCES[:1], SENTENCES):
        token_ids = predictor.text_encoder.tokenizer(batch)
        ids, mask = pad_ids(token_ids, len(token_ids), max(map(len, token_ids)))
        samples.append({"ids": np.asarray(ids, np.int32), "mask": np.asarray(mask, bool)})
    return Part("decide", decide, ("b, t", "b, t"), ("probability", "logit"), tuple(samples))


def complete_part(completer: MaskCompleter) -> Part:
    """Builds the function that completes; its samples are noise, which is completed as well."""
    model = make_completer(completer.config, rngs=nnx.Rngs(0))
    nnx.update(model, completer.weights)
    # ONNX has XLA's convolution. Ours is chosen when a program runs, and on CPUs only.
    for _, layer in nnx.iter_graph(model):
        if isinstance(layer, nnx.Conv) and layer.conv_general_dilated is depthwise_conv:
            layer.conv_general_dilated = jax.lax.conv_general_dilated

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


def write_part(part: Part, folder: Path) -> None:
    """Writes a part. Raises InputError if onnxruntime and JAX differ, and removes the file."""
    path = folder / part.file
    convert(part, path)
    difference = largest_difference(part, path)
    if not difference <= MAX_DIFFERENCE:
        path.unlink()
        raise InputError(f"{path}: differs from JAX by {difference:.2g}")
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {difference:.1g} from JAX")


def main(model: str, out: Path, completer: Path | None = None) -> None:
    """Writes the ONNX files of a model, their settings, its words and the page.

    Args:
        model: Run folder, export or released model.
        out: Folder for the files.
        completer: Run of a completer, in place of the one that the model has.
    """
    run = load(model)
    completes = run.predictor.completer if completer is None else load_part(completer, "completer")
    parts = [decide_part(run)]
    if completes is not None:
        parts.append(complete_part(completes))
    out.mkdir(parents=True, exist_ok=True)
    for part in parts:
        write_part(part, out)

    settings = {
        "max_tokens": run.config.model.text.max_tokens,
        "crop_size": completes and completes.config.size,
        "crop_extent": CROP_EXTENT,
        "min_crop_side": MIN_CROP_SIDE,
        "complete_threshold": completes and completes.threshold,
    }
    (out / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n", "utf-8")
    write_tokenizer(run.predictor.text_encoder.folder / TOKENIZER, out / TOKENIZER)
    shutil.copytree(PAGE, out, dirs_exist_ok=True)


if __name__ == "__main__":
    tyro.cli(main)
