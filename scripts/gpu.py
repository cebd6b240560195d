"""Everything that wants a GPU, in pieces of nine minutes: `python scripts/gpu.py PIECE --out DIR`.

    profile     where a training step spends its time: of configs/photos.py and of SAM-B at 1024 px
    release     completer, outliner and segmenter of a new `photos-small`, and its export
    checks      tests on the GPU, equal answers and losses, torch beside it, the default training

A piece is a list of parts. Each runs in a process of its own, so that none holds the memory of
another, prints into DIR/PART.log, and has its result in DIR/PART.json as soon as it ends. Called
again, a piece goes on with the parts that have no result; a training goes on from its checkpoint.
docs/scale.md says what has to be there.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from r2sm_jax.cli import cli_main, load_config_file, parse_flags
from r2sm_jax.config import Config, DecoderConfig, LoopConfig, ModelConfig, VisionConfig
from r2sm_jax.data.batches import NUM_TYPE_SENTENCES, Batch
from r2sm_jax.errors import InputError, atomic_write
from r2sm_jax.inference.model_folder import find_folder
from r2sm_jax.models.image_encoder import VisionEncoder
from r2sm_jax.models.mask_type_heads import LEARNED
from r2sm_jax.models.r2sm import build_model
from r2sm_jax.training import losses
from r2sm_jax.training.optimizer import make_optimizer
from r2sm_jax.training.run_folder import read_config, resolve_auto
from r2sm_jax.training.step import init_state, jit_train_step

ROOT = Path(__file__).parents[1]
DRY_CROPS = """--train.part {0} --train.steps 2 --train.batch-size 2 --train.evaluate-samples 8
    --data.scenes 8 --model.vision.image-size 64 --model.{0}.size 32 --model.{0}.dims 8 16
    --model.{0}.depth 1 --model.{0}.heads 2
"""
"""A training of a completer or an outliner in a dry run."""
PARTS = {
    "profile": ("photos", "sam"),
    "release": ("completer", "outliner", "segmenter", "photos-small"),
    "checks": ("tests", "encoder", "torch", "default"),
}
"""Piece -> its parts, the most important first."""
TESTS = (
    "test_gpu",
    "test_layers",
    "test_losses",
    "test_optimizer",
    "test_efficientnet",
    "test_r2sm",
)
"""Those that a GPU concerns."""
WORTH_STARTING = 20
"""Seconds that must be left for another part."""
TO_SAVE = 60
"""Seconds that a training has to write its checkpoint."""
NUM_KERNELS = 10
PEAKS = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "B200": 2250e12,
}
"""Dense bfloat16 FLOPs a second, from NVIDIA's data sheets, by what a device's name holds."""


@dataclass(frozen=True)
class GpuConfig:
    """Runs a piece of what wants a GPU, and goes on with it when it is called again."""

    piece: Annotated[Literal["profile", "release", "checks"], tyro.conf.Positional]
    out: Path = Path("gpu")
    """Folder of results, logs and runs."""
    minutes: float = 9
    """The piece ends after so long; a training writes a checkpoint before."""
    data: str = "scenes"
    """What the release is trained on: compose:FILE,FILE with all photos."""
    flags: str = ""
    """More flags of `train`, for every training, in one word of the shell."""
    dry_run: bool = False
    """Small shapes on a CPU: shows that the piece works, and measures nothing."""
    part: str | None = None
    """Only this measurement, in this process."""


def main() -> None:
    """Command line."""
    args = parse_flags(GpuConfig, sys.argv[1:], prog="python scripts/gpu.py")
    if args.part:
        write_result(args, args.part, measurement(args.part)(args))
        return
    if not args.dry_run and not has_gpu():
        raise InputError(
            "JAX sees no GPU; install its plugin (pip install '.[cuda]') or give --dry-run"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * args.minutes
    failed, left = [], []
    for part in PARTS[args.piece]:
        if result_file(args, part).exists():
            continue
        seconds = ends - time.monotonic()
        state = run_part(args, part, seconds) if seconds > WORTH_STARTING else "left"
        print(f"{part}: {state}", flush=True)
        if state == "failed":
            failed.append(part)
        elif state == "left":
            left.append(part)
    if failed:
        raise InputError(f"{', '.join(failed)} failed; the logs in {args.out} say why")
    if left:
        print(f"call it again for {', '.join(left)}")
    elif args.dry_run:
        print("dry run: no GPU was used, and no figure counts")


def has_gpu() -> bool:
    """Asks in a process of its own: this one must not hold the GPU's memory."""
    devices = [sys.executable, "-c", "import jax; jax.devices('cuda')"]
    return subprocess.run(devices, capture_output=True).returncode == 0


def result_file(args: GpuConfig, part: str) -> Path:
    return args.out / f"{part}.json"


def write_result(args: GpuConfig, part: str, result: Any) -> None:
    with atomic_write(result_file(args, part)) as file:
        file.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


def run_part(args: GpuConfig, part: str, seconds: float) -> str:
    """Runs a part for at most so long. Returns its result as JSON, or "failed" or "left"."""
    command = part_command(args, part)
    # Some tests compare with the CPU.
    environment = os.environ | {"JAX_PLATFORMS": "cpu" if args.dry_run else "cuda,cpu"}
    if part == "torch":  # JAX would take its memory
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    started = time.monotonic()
    log = args.out / f"{part}.log"
    with log.open("a") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        try:
            code = process.wait(max(WORTH_STARTING, seconds - TO_SAVE))
        except subprocess.TimeoutExpired:
            # A training writes a checkpoint; a measurement starts again the next time.
            process.terminate()
            process.wait()
            return "left"
    if code:
        return "failed"
    if not result_file(args, part).exists():
        # A command prints what it measured last.
        last = log.read_text("utf-8").strip().splitlines()[-12:]
        write_result(args, part, {"seconds": time.monotonic() - started, "printed": last})
    return json.dumps(json.loads(result_file(args, part).read_text("utf-8")))


def part_command(args: GpuConfig, part: str) -> list[str]:
    """The command of a part: a training, another command of the package, or this file again."""
    python = [sys.executable, "-m"]
    run = args.out / part
    flags = training_flags(args).get(part)
    if flags is not None:
        # A run keeps its configuration.
        flags = ["--resume"] if run.exists() else flags
        return [*python, "r2sm_jax.train", *flags, "--run", str(run)]
    if part == "photos-small":
        # A language model of this machine alone has to be in the export.
        compact = [] if args.dry_run else ["--compact"]
        models = [f"--{name}={args.out / name}" for name in ("completer", "outliner")]
        source = str(args.out / "segmenter")
        return [*python, "r2sm_jax.export", source, "--out", str(run), *compact, *models]
    if part == "tests":
        collected = ["--collect-only"] if args.dry_run else []
        tests = [str(ROOT / "tests" / f"{name}.py") for name in TESTS]
        return [*python, "pytest", "-n", "0", "-q", *collected, *tests]
    dry_run = ["--dry-run"] if args.dry_run else []
    return [
        sys.executable, __file__, args.piece, "--part", part, "--out", str(args.out), *dry_run
    ]  # fmt: skip


# Trainings


def training_flags(args: GpuConfig) -> dict[str, list[str]]:
    """Returns the flags of each training.

    Of the release, completer and outliner see at least ten times as many different crops as the
    released ones did, and the segmenter takes thirteen times the steps, all with new pictures.
    """
    if args.dry_run:
        parts = {name: DRY_CROPS.format(name) for name in ("completer", "outliner")}
        parts["outliner"] += "--model.outliner.efficientnet= --model.outliner.block-dims 8 16 8"
        parts |= dict.fromkeys(("segmenter", "default"), args.flags)
        return {name: shlex.split(flags) for name, flags in parts.items()}

    workers = max(1, (os.cpu_count() or 2) - 1)
    source = f"--data.source {shlex.quote(args.data)}"
    configs = shlex.quote(str(ROOT / "configs"))
    parts = {
        "completer": f"""{configs}/completer.py {source}
            --train.batch-size 256 --train.steps 13400 --train.evaluate-every 2680""",
        "outliner": f"""{configs}/outliner.py {source}
            --train.batch-size 64 --train.steps 9000 --train.evaluate-every 1800""",
        "segmenter": f"""{configs}/photos.py {source} --data.fresh --data.workers {workers}
            --train.batch-size 24 --train.steps 20000 --train.evaluate-every 2000
            --train.checkpoint-every 2000 --train.ema 0.999 --model.dtype bfloat16""",
    }
    parts["default"] = ""
    return {name: shlex.split(f"{flags} {args.flags}") for name, flags in parts.items()}


# Measurements


def measurement(part: str) -> Callable[[GpuConfig], Any]:
    """The function that measures a part in this process."""
    parts: dict[str, Callable[[GpuConfig], Any]] = {
        "photos": measure_photos,
        "sam": measure_sam,
        "encoder": measure_encoder,
        "torch": measure_torch,
    }
    return parts[part]


def measure_photos(args: GpuConfig) -> dict[str, Any]:
    """The training step of configs/photos.py, with the sizes of the released model."""
    model = read_config(find_folder("photos-small")).model
    vision = model.vision
    if args.dry_run:
        vision = replace(
            vision,
            image_size=64,
            dim=24,
            depth=1,
            mlp_dim=48,
            efficientnet_dims=(8, 8, 16, 24, 32, 40, 48),
            out_dim=16,
        )
    config = load_config_file(ROOT / "configs/photos.py")
    config = replace(
        config,
        model=replace(model, vision=vision, dtype="bfloat16", completer=None, outliner=None),
        train=replace(config.train, batch_size=2 if args.dry_run else 24),
    )
    return measure_step(args, config)


def measure_sam(args: GpuConfig) -> dict[str, Any]:
    """The training step with SAM ViT-B at 1024 pixels."""
    decoder = (
        DecoderConfig(dim=32, heads=2, mlp_dim=64)
        if args.dry_run
        else DecoderConfig(dim=256, heads=8, mlp_dim=2048)
    )
    model = ModelConfig(sam_config(args), decoder=decoder, dtype="bfloat16")
    train = LoopConfig(batch_size=num_images(args))
    return measure_step(args, Config(model=model, train=train))


def measure_step(args: GpuConfig, config: Config) -> dict[str, Any]:
    """Compiles and times the training step of a configuration, on a batch of zeros."""
    loop = replace(config.train, devices=1, accumulate=1)
    config = resolve_auto(replace(config, train=loop))
    model = build_model(config.model, rngs=nnx.Rngs(0))
    graphdef, params, constants = nnx.split(model, nnx.Param, ...)
    optimizer = make_optimizer(config.optimizer, config.train.steps, config.model.vision)
    batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch_shapes(config))
    dim = config.model.text.dim
    names = {group: np.ones((count, dim), np.float32) for group, count in VOCABULARY.items()}
    state = init_state(params, optimizer)
    step = jit_train_step(graphdef, losses.segmenter_loss(config, names), optimizer, config.train)

    started = time.monotonic()
    compiled = step.lower(state, constants, batch).compile()
    compile_seconds = time.monotonic() - started

    def one_step() -> Any:
        nonlocal state
        state, values = compiled(state, constants, batch)
        return values

    seconds = measure(one_step, jax.block_until_ready, args.dry_run)
    results = describe_device() | figures(seconds, config.train.batch_size, count_flops(compiled))
    return results | {
        "compile_seconds": compile_seconds,
        "kernels": dearest_kernels(one_step, compiled.as_text()),
    }


def measure_encoder(args: GpuConfig) -> dict[str, Any]:
    """SAM ViT-B of this package alone, forward and with gradients, in bfloat16."""
    vision, images = sam_config(args), num_images(args)
    graphdef, weights = nnx.split(
        VisionEncoder(vision, dtype=jnp.dtype("bfloat16"), rngs=nnx.Rngs(0))
    )
    pixels = jnp.zeros((images, vision.image_size, vision.image_size, 3), jnp.bfloat16)

    def forward(weights: nnx.State) -> jax.Array:
        return nnx.merge(graphdef, weights)(pixels).tokens.astype(jnp.float32).mean()

    results = describe_device()
    for name, function in {"forward": forward, "with gradients": jax.grad(forward)}.items():
        compiled = jax.jit(function).lower(weights).compile()
        work = partial(compiled, weights)
        seconds = measure(work, jax.block_until_ready, args.dry_run)
        results[name] = figures(seconds, images, count_flops(compiled))
    return results


def measure_torch(args: GpuConfig) -> dict[str, Any]:
    """The encoder of `transformers`' SAM, in torch with bfloat16 autocast: eager, then compiled."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers.models.sam.modeling_sam import SamVisionConfig, SamVisionModel

    device, vision = "cpu" if args.dry_run else "cuda", sam_config(args)
    images = num_images(args)
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
    torch.nn.Module.to(model, device)
    pixels = torch.zeros((images, 3, vision.image_size, vision.image_size), device=device)

    def backward(encode: Callable[..., Any]) -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            mean = encode(pixels).last_hidden_state.float().mean()
        mean.backward()

    def forward(encode: Callable[..., Any]) -> None:
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            encode(pixels)

    results: dict[str, Any] = {"torch": torch.__version__}
    for how in ("eager",) if args.dry_run else ("eager", "compiled"):
        encode = model if how == "eager" else torch.compile(model)
        for name, work in {"forward": forward, "with gradients": backward}.items():
            with FlopCounterMode(display=False) as counter:
                work(model)
            wait = (lambda _: None) if args.dry_run else (lambda _: torch.cuda.synchronize())
            seconds = measure(partial(work, encode), wait, args.dry_run)
            memory = 0 if args.dry_run else torch.cuda.max_memory_allocated()
            of_torch = figures(seconds, images, counter.get_total_flops())
            results[f"{name}, {how}"] = of_torch | {"memory_gb": memory / 1e9}
    return results


def sam_config(args: GpuConfig) -> VisionConfig:
    """SAM ViT-B without published weights, or a small one of the same layout."""
    vision = load_config_file(ROOT / "configs/r2sm_cocoa_cls.py").model.vision
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


def num_images(args: GpuConfig) -> int:
    """Images in a batch for SAM."""
    return 2 if args.dry_run else 4


# Figures


def describe_device() -> dict[str, Any]:
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def measure(work: Callable[[], Any], wait: Callable[[Any], Any], is_dry_run: bool) -> float:
    """Seconds of a call: the median of ten, after one that warms up."""
    times = []
    for _ in range(2 if is_dry_run else 11):
        started = time.perf_counter()
        wait(work())
        times.append(time.perf_counter() - started)
    return median(times[1:])


def figures(seconds: float, images: int, flops: float) -> dict[str, Any]:
    """A measurement in the terms of the field. `mfu`, the share of the device's dense bfloat16
    peak, is None for a device whose peak is not known."""
    device = jax.devices()[0]
    peak = next((peak for name, peak in PEAKS.items() if name in device.device_kind), None)
    memory = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    return {
        "seconds": seconds,
        "images": images,
        "images_a_second": images / seconds,
        "mfu": flops / seconds / peak if peak else None,
        "memory_gb": memory / 1e9,
    }


def count_flops(compiled: Any) -> float:
    """The FLOPs that XLA counts."""
    analysis = compiled.cost_analysis()
    if isinstance(analysis, list):
        analysis = analysis[0]
    return float(analysis["flops"])


def dearest_kernels(work: Callable[[], Any], program: str) -> list[dict[str, Any]]:
    """What takes most of the time of two calls: kernels, with where they come from.

    `program` is the text of what XLA compiled: it says from which operation of JAX each came.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(2):
                jax.block_until_ready(work())
        file = next(Path(folder).rglob("*.xplane.pb"))
        trace = jax.profiler.ProfileData.from_file(str(file))

    nanoseconds: Counter[str] = Counter()
    for plane in trace.planes:
        for line in plane.lines:
            for event in line.events:
                operation = dict(event.stats).get("hlo_op")
                if operation is not None:
                    nanoseconds[str(operation)] += event.duration_ns

    origins = dict(re.findall(r'%?([\w.-]+) = .*op_name="([^"]+)"', program))
    total = sum(nanoseconds.values())
    return [
        {"kernel": name, "from": origins.get(name), "share": spent / total}
        for name, spent in nanoseconds.most_common(NUM_KERNELS)
    ]


# A batch without data


QUERY_TOKENS = 26
"""Tokens that 99 % of the queries of `scenes` do not exceed; training pads to them."""
TYPE_TOKENS = 42
"""The same for sentences without an image."""
VOCABULARY = {"category": 100}
"""Group -> number of names that pixels are compared with; others hardly change the figures."""


def batch_shapes(config: Config) -> Batch:
    """Returns the shapes of a training batch."""
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
        "masks": ((m, 2, mask, mask), jnp.uint8),
        "is_known": ((m, 2), jnp.bool_),
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

    arrays = {
        name: jax.ShapeDtypeStruct((b, *shape), dtype) for name, (shape, dtype) in shapes.items()
    }
    labels = jax.ShapeDtypeStruct((b, m), jnp.int32)
    return Batch(labels=dict.fromkeys(VOCABULARY, labels), **arrays)


if __name__ == "__main__":
    cli_main(main)
