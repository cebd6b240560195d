"""One check of everything that a GPU changes: `scripts/gpu_check.sh`, which calls this. Less than
ten minutes.

Each part runs in a process of its own, so that none holds the memory of another. Together they
write one JSON:

- `tests`: the tests that run on a GPU; - `ours`: SAM ViT-B at 1024 pixels, forward and with
gradients, and a whole training step with it: images a second,
  share of the GPU's dense bfloat16 peak (MFU, with the FLOPs that XLA counts), memory;
- `torch`: the same encoder of `transformers`, by torch in eager mode and compiled, if torch is
installed; - `train`: the default run.

`--dry-run` does all of it on a CPU with small shapes. That shows that the check works. Its figures
mean nothing.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from r2sm_jax.cli import cli_main, load_config_file, parse_flags
from r2sm_jax.config import Config, DecoderConfig, LoopConfig, ModelConfig, VisionConfig
from r2sm_jax.data.batches import NUM_TYPE_SENTENCES
from r2sm_jax.errors import InputError, atomic_write
from r2sm_jax.models.image_encoder import VisionEncoder
from r2sm_jax.models.mask_type_heads import LEARNED
from r2sm_jax.training.optimizer import make_optimizer
from r2sm_jax.training.run_folder import resolve_auto
from r2sm_jax.training.step import init_state, jit_train_step, split_model

PARTS = ("tests", "ours", "torch", "train")
SAM_CONFIG = Path(__file__).parents[1] / "configs/r2sm_cocoa_cls.py"
TESTS = ("test_gpu", "test_attention", "test_losses", "test_optimizer", "test_models")
PEAKS = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "B200": 2250e12,
}
"""Dense bfloat16 FLOPs a second, from NVIDIA's data sheets, by what a device's name holds."""
SIZES = {False: (4, 10), True: (2, 1)}
"""Images in a batch and repeats, of a real run and of a dry one."""
SMALL_RUN = """
    --train.steps 2 --train.evaluate-every 2 --train.evaluate-samples 2 --train.report-samples 2
    --train.batch-size 4 --data.scenes 32 --data.text-only-queries 64
"""


@dataclass(frozen=True)
class CheckConfig:
    """Runs tests, benchmarks and the default training on this machine's GPU, and writes one
    JSON."""

    out: Path = Path("gpu_check.json")
    dry_run: bool = False
    """Small shapes on a CPU: shows that the check works, and measures nothing."""
    part: Literal["tests", "ours", "torch", "train"] | None = None
    """Only this part, in this process."""
    run: Path = Path("runs/gpu_check")
    """Folder of the training run; it must not exist."""


def main() -> None:
    """Command line."""
    args = parse_flags(CheckConfig, sys.argv[1:], prog="scripts/gpu_check.sh")
    if args.part:
        parts: dict[str, Callable[[CheckConfig], Any]] = {
            "tests": run_tests,
            "ours": measure_ours,
            "torch": measure_torch,
            "train": train,
        }
        args.out.write_text(json.dumps(parts[args.part](args)), "utf-8")
        return

    results: dict[str, Any] = {"dry_run": args.dry_run}
    failed = []
    for part in PARTS:
        started = time.monotonic()
        code, results[part] = run_part(part, args)
        if code:
            failed.append(part)
        print(f"{part}: {results[part]}, {time.monotonic() - started:.0f} s", flush=True)
        # After each part, so that a later one loses nothing.
        with atomic_write(args.out) as file:
            file.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    if args.dry_run:
        print("dry run on a CPU: no GPU was used, and no figure counts")
    else:
        print(f"wrote {args.out}")
    if failed:
        raise InputError(f"{', '.join(failed)} failed; the output above says why")


def run_part(part: str, args: CheckConfig) -> tuple[int, Any]:
    """Runs one part in a process of its own. Returns its exit code and its result."""
    file = args.out.with_suffix(f".{part}")
    command = [sys.executable, __file__, "--part", part, "--out", str(file), "--run", str(args.run)]
    environment = dict(os.environ)
    if args.dry_run:
        command.append("--dry-run")
        environment["JAX_PLATFORMS"] = "cpu"
    code = subprocess.run(command, env=environment).returncode
    if code:
        return code, f"failed, exit code {code}"
    result = json.loads(file.read_text("utf-8"))
    file.unlink()
    return code, result


def run_tests(args: CheckConfig) -> str:
    """The last line of pytest. Raises InputError if a test fails."""
    names = TESTS[:1] if args.dry_run else TESTS
    tests = [str(Path(__file__).parents[1] / "tests" / f"{name}.py") for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", *tests], capture_output=True, text=True
    )
    if done.returncode:
        raise InputError(f"tests failed\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return done.stdout.strip().splitlines()[-1]


def measure(work: Callable[[], Any], wait: Callable[[Any], Any], repeats: int) -> dict[str, float]:
    """Seconds of the first call, which compiles, and the median of the others."""
    times = []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        wait(work())
        times.append(time.perf_counter() - started)
    return {"first_seconds": times[0], "seconds": median(times[1:])}


def figures(
    timed: dict[str, float], images: int, flops: float, device: str, memory: int
) -> dict[str, Any]:
    """A measurement in the terms of the field. `mfu` is None for a device whose peak is not
    known."""
    peak = next((peak for name, peak in PEAKS.items() if name in device), None)
    return timed | {
        "images": images,
        "images_a_second": images / timed["seconds"],
        "mfu": flops / timed["seconds"] / peak if peak else None,
        "memory_gb": memory / 1e9,
    }


def vision_config(args: CheckConfig) -> VisionConfig:
    """SAM ViT-B without published weights, or a small one of the same layout."""
    vision = load_config_file(SAM_CONFIG).model.vision
    config = replace(
        vision,
        dim=768,
        depth=12,
        heads=12,
        mlp_dim=3072,
        window_size=14,
        global_blocks=(2, 5, 8, 11),
        relative_positions=True,
        out_dim=256,
        activation="gelu",
        sam=None,
        remat=False,
    )
    if args.dry_run:
        config = replace(
            config,
            image_size=64,
            dim=48,
            depth=2,
            heads=2,
            mlp_dim=96,
            window_size=2,
            global_blocks=(1,),
        )
    return config


def measure_ours(args: CheckConfig) -> dict[str, Any]:
    """SAM ViT-B of this package, in bfloat16."""
    device, vision = jax.devices()[0], vision_config(args)
    if device.platform != "gpu" and not args.dry_run:
        raise InputError(
            "JAX sees no GPU; install its plugin (pip install '.[cuda]') or give --dry-run"
        )
    images, repeats = SIZES[args.dry_run]

    def figures_of(lowered: Any, work: Callable[[], Any]) -> dict[str, Any]:
        timed = measure(work, jax.block_until_ready, repeats)
        memory = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
        return figures(timed, images, count_flops(lowered), device.device_kind, memory)

    graphdef, weights = nnx.split(
        VisionEncoder(vision, dtype=jnp.dtype("bfloat16"), rngs=nnx.Rngs(0))
    )
    pixels = jnp.zeros((images, vision.image_size, vision.image_size, 3), jnp.bfloat16)

    @jax.jit
    def forward(weights: nnx.State) -> jax.Array:
        return nnx.merge(graphdef, weights)(pixels).tokens.astype(jnp.float32).mean()

    backward = jax.jit(jax.grad(forward))
    results: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__}
    results["encoder"] = figures_of(forward.lower(weights), lambda: forward(weights))
    results["encoder with gradients"] = figures_of(
        backward.lower(weights), lambda: backward(weights)
    )

    decoder = (
        DecoderConfig(dim=32, heads=2, mlp_dim=64)
        if args.dry_run
        else DecoderConfig(dim=256, heads=8, mlp_dim=2048)
    )
    model = ModelConfig(vision, decoder=decoder, dtype="bfloat16")
    config = resolve_auto(
        Config(model=model, train=LoopConfig(batch_size=images, devices=1, accumulate=1))
    )
    graphdef, params, constants = split_model(config.model, 0)
    optimizer = make_optimizer(config.optimizer, config.train.steps, config.model.vision)
    batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch_shapes(config))
    names = {group: jnp.ones((count, config.model.text.dim)) for group, count in VOCABULARY.items()}
    step = jit_train_step(graphdef, optimizer, config)
    state = init_state(params, optimizer)

    def one_step() -> Any:
        nonlocal state
        state, values = step(state, constants, batch, names)
        return values

    results["training step"] = figures_of(step.lower(state, constants, batch, names), one_step)
    return results


def measure_torch(args: CheckConfig) -> dict[str, Any] | str:
    """The encoder of `transformers`' SAM, in torch with bfloat16 autocast: eager, then compiled."""
    try:
        import torch
        from torch.utils.flop_counter import FlopCounterMode
        from transformers.models.sam.modeling_sam import SamVisionConfig, SamVisionModel
    except ImportError as error:
        return f"not measured: {error}"
    if not args.dry_run and not torch.cuda.is_available():
        return "not measured: torch sees no GPU"
    kind, vision = "cpu" if args.dry_run else "cuda", vision_config(args)
    images, repeats = SIZES[args.dry_run]
    sizes = SamVisionConfig(
        image_size=vision.image_size,
        patch_size=vision.patch_size,
        hidden_size=vision.dim,
        mlp_dim=vision.mlp_dim,
        num_hidden_layers=vision.depth,
        num_attention_heads=vision.heads,
        window_size=vision.window_size,
        global_attn_indexes=list(vision.global_blocks),
        output_channels=vision.out_dim,
        initializer_range=0.02,
    )
    model = SamVisionModel(sizes)
    torch.nn.Module.to(model, kind)
    pixels = torch.zeros((images, 3, vision.image_size, vision.image_size), device=kind)
    device = "cpu" if args.dry_run else torch.cuda.get_device_name()

    def backward(encode: Callable[..., Any]) -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(kind, torch.bfloat16):
            mean = encode(pixels).last_hidden_state.float().mean()
        mean.backward()

    def forward(encode: Callable[..., Any]) -> None:
        with torch.no_grad(), torch.autocast(kind, torch.bfloat16):
            encode(pixels)

    results: dict[str, Any] = {"device": device, "torch": torch.__version__}
    for how in ("eager",) if args.dry_run else ("eager", "compiled"):
        encode = model if how == "eager" else torch.compile(model)
        for name, work in {"encoder": forward, "encoder with gradients": backward}.items():
            with FlopCounterMode(display=False) as counter:
                work(model)
            if not args.dry_run:
                torch.cuda.reset_peak_memory_stats()
            wait = (lambda _: None) if args.dry_run else (lambda _: torch.cuda.synchronize())
            timed = measure(partial(work, encode), wait, repeats)
            memory = 0 if args.dry_run else torch.cuda.max_memory_allocated()
            results[f"{name}, {how}"] = figures(
                timed, images, counter.get_total_flops(), device, memory
            )
    return results


def train(args: CheckConfig) -> dict[str, Any]:
    """The default run, or two steps of it."""
    words = [sys.executable, "-m", "r2sm_jax.train", "--run", str(args.run)]
    words += SMALL_RUN.split() if args.dry_run else []
    started = time.monotonic()
    if code := subprocess.run(words).returncode:
        raise InputError(f"training failed with exit code {code}; its output is above")
    report = json.loads((args.run / "report.json").read_text("utf-8"))
    splits = {name: split["all"] for name, split in report["splits"].items()}
    return {
        "minutes": (time.monotonic() - started) / 60,
        "giou": {name: x.get("giou") for name, x in splits.items()},
    }


QUERY_TOKENS = 26
"""Tokens that 99 % of the queries of `scenes` do not exceed; training pads to them."""
TYPE_TOKENS = 42
"""The same for sentences without an image."""
VOCABULARY = {"category": 100}
"""Group -> number of names that pixels are compared with; others hardly change the figures."""


def batch_shapes(config: Config) -> dict[str, Any]:
    """Returns the shapes of a training batch, as data/batches.py lists them."""
    b = config.train.batch_size
    k = config.data.queries
    m = config.data.instances
    size = config.model.vision.image_size
    mask = config.model.mask_size
    slots = config.model.decoder.slots
    text = config.model.text
    t = min(QUERY_TOKENS, text.max_tokens)
    type_t = min(TYPE_TOKENS, text.max_tokens)

    # Name -> shape of one row, and type.
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "image": ((size, size, 3), jnp.uint8),
        "image_mask": ((size, size), jnp.bool_),
        "modal": ((m, mask, mask), jnp.uint8),
        "amodal": ((m, mask, mask), jnp.uint8),
        "has_amodal": ((m,), jnp.bool_),
        "boxes": ((m, 4), jnp.float32),
        "pixel_weight": ((mask, mask), jnp.uint8),
        "query_instances": ((k, m), jnp.bool_),
        "slot_targets": ((k, slots), jnp.int32),
        "is_amodal": ((k,), jnp.bool_),
        "query_mask": ((k,), jnp.bool_),
        "text": ((k, t, len(text.layers), text.dim), jnp.float16),
        "text_mask": ((k, t), jnp.bool_),
    }
    if config.model.head in LEARNED:
        f = NUM_TYPE_SENTENCES
        shapes |= {
            "type_text": ((f, type_t, len(text.layers), text.dim), jnp.float16),
            "type_text_mask": ((f, type_t), jnp.bool_),
            "type_is_amodal": ((f,), jnp.bool_),
            "type_valid": ((f,), jnp.bool_),
        }

    batch: dict[str, Any] = {}
    for name, (shape, dtype) in shapes.items():
        batch[name] = jax.ShapeDtypeStruct((b, *shape), dtype)
    labels = jax.ShapeDtypeStruct((b, m), jnp.int32)
    batch["labels"] = dict.fromkeys(VOCABULARY, labels)
    return batch


def count_flops(lowered: Any) -> float:
    """Returns the FLOPs that XLA counts before it optimises, or after it."""
    # For a GPU, XLA counts nothing before it compiles.
    analysis = lowered.cost_analysis() or lowered.compile().cost_analysis()
    if isinstance(analysis, list):
        analysis = analysis[0]
    return float(analysis["flops"])


if __name__ == "__main__":
    cli_main(main)
