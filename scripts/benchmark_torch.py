"""Our training step beside the same step in PyTorch: `python scripts/benchmark_torch.py [CONFIG.py] [--flags]`.

Flags are those of training, and --no-compile (without torch.compile), --rounds N, --json FILE (writes all figures).
Run nothing else at the same time. First it checks that both compute the same in float32, and ends with exit code 1 if
they do not. Then it times both in turns. Every variant has a process of its own, which imports only its own framework;
its peak memory is that of the process after a few training steps. The step is that of `train.py`, with its batches.
"""

import argparse
import json
import math
import multiprocessing
import os
import pickle
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:  # processes that measure torch import neither jax nor r2sm_jax
    from r2sm_jax.config import Config

SCENES, FREE_SENTENCES, ROUNDS = 64, 2000, 10
"""Enough for batches of the shapes that training has."""
CALLS = {"step": 3, "encode 1": 12, "encode 8": 6, "query": 12}
"""What is timed, and how often in each turn of a variant. The first third of a turn only warms up."""
NAMES = {
    "step": "training step, ms", "encode 1": "one image encoded, ms", "encode 8": "eight images encoded, ms",
    "query": "one query about a known image, ms", "resident": "memory while training, MB",
    "memory": "peak memory, MB", "first": "seconds to the first step",
}  # fmt: skip
OURS = {"ours float32": "float32", "ours bfloat16": "bfloat16"}
"""Variant -> `--train.products`."""
THEIRS = {
    "torch float32": ("float32", False), "torch bfloat16": ("bfloat16", False),
    "torch.compile float32": ("float32", True), "torch.compile bfloat16": ("bfloat16", True),
}  # fmt: skip
"""Variant -> precision (bfloat16: autocast) and whether it is compiled."""
FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
STEPS = 8
FORWARD, LOSSES, TRAINED = 5e-6, 1e-6, 3e-5
"""Largest relative differences of outputs, of losses, and of losses during `STEPS` steps."""


class Difference(NamedTuple):
    """The largest difference of something between both frameworks, and the largest one that is allowed."""

    what: str
    found: float
    allowed: float


def arrays(state: Any) -> dict[str, Any]:
    """Weights of the JAX model by dotted path, copied."""
    import numpy as np
    from flax import nnx
    from flax.traverse_util import flatten_dict

    return {".".join(map(str, path)): np.array(x) for path, x in flatten_dict(nnx.to_pure_dict(state)).items()}


def tensors(tree: Any) -> Any:
    """A dict of numpy arrays as torch tensors."""
    import torch

    return {name: tensors(x) if isinstance(x, dict) else torch.from_numpy(x.copy()) for name, x in tree.items()}


def check_config(config: "Config") -> "Config":
    """The configuration, resolved. Raises InputError if the peer does not have all of it."""
    import torch_peer
    import torch_training

    from r2sm_jax.errors import InputError
    from r2sm_jax.runs import resolve

    if found := torch_peer.unsupported(config.model) or torch_training.unsupported(config):
        raise InputError(f"{found}: scripts/torch_peer.py has only the default; leave this flag out")
    return resolve(config)


# Equality


def compare(config: "Config", batches: list[Any], names: dict[str, Any]) -> Iterator[Difference]:
    """Trains both for as many steps as there are batches, in float32, and compares outputs and losses.

    An output is compared by its largest absolute difference, divided by its largest absolute value; a loss by the
    difference divided by its value.
    """
    import jax
    import torch
    from flax import nnx
    from torch_peer import Answer, Peer, load_weights
    from torch_training import Trainer

    from r2sm_jax.training.optimizer import make_optimizer
    from r2sm_jax.training.step import init_state, jit_train_step, split_model

    config = replace(config, train=replace(config.train, products="float32"))
    graphdef, params, constants = split_model(config.model, config.train.seed)
    inputs = [batches[0][name] for name in ("image", "valid", "text", "text_mask")]
    given = [torch.from_numpy(x.copy()) for x in inputs]
    forward = jax.jit(lambda weights, *inputs: nnx.merge(graphdef, weights)(*inputs))
    model = Peer(config.model)  # type: ignore[arg-type]  (SimpleNamespace where jax is missing)

    def outputs(when: str) -> Iterator[Difference]:
        weights = nnx.merge_state(params, constants)
        load_weights(model, arrays(weights))
        expected = forward(weights, *inputs)._asdict()
        with torch.inference_mode():
            found = model.answer(*model.encode_image(*given[:2]), *given[2:])
        masks = ("modal", "amodal", "slot_modal", "slot_amodal")
        for what, fields in ("mask logits", masks), ("scores", sorted(set(Answer._fields) - set(masks))):
            yield Difference(
                f"{what} {when}", max(_outputs_differ(expected[f], getattr(found, f)) for f in fields), FORWARD
            )

    yield from outputs("of initial weights")
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    step, state = jit_train_step(graphdef, optimizer, config), init_state(params, optimizer)
    trainer = Trainer(model, config)  # type: ignore[arg-type]  (SimpleNamespace where jax is missing)
    worst: list[float] = []
    for batch in batches:
        state, expected = step(state, constants, batch, names)
        found = trainer.step(tensors(batch), tensors(names))
        worst.append(
            max(
                abs(float(expected[name]) - float(x)) / max(abs(float(expected[name])), 1e-12)
                for name, x in found.items()
            )
        )
    yield Difference("losses of initial weights", worst[0], LOSSES)
    yield Difference(f"losses during {len(batches)} steps", max(worst), TRAINED)
    params = state.params
    yield from outputs(f"of our weights after {len(batches)} steps")


def _outputs_differ(expected: Any, found: Any) -> float:
    import numpy as np

    expected, found = np.asarray(expected), found.numpy()
    return float(np.abs(expected - found).max() / np.abs(expected).max())


# One process for each variant


def prepare(arguments: list[str], folder: Path) -> None:
    """Makes the data, writes what the variants need into `folder`, compares; exits 1 if the frameworks differ."""
    from r2sm_jax.errors import exit_cleanly

    exit_cleanly(lambda: _prepare(arguments, folder))


def _prepare(arguments: list[str], folder: Path) -> None:
    import jax
    import numpy as np
    from flax import nnx

    from r2sm_jax.flags import parse_config, to_json
    from r2sm_jax.train import prepare_data
    from r2sm_jax.training.step import split_model

    config = check_config(parse_config(arguments))
    free = min(FREE_SENTENCES, config.data.free_sentences)
    config = replace(config, data=replace(config.data, source="scenes", scenes=SCENES, free_sentences=free))
    data = prepare_data(config, lambda message: print(message, flush=True))
    batches = [next(data.batches) for _ in range(STEPS)]
    _, params, constants = split_model(config.model, config.train.seed)
    text, mask = data.texts.for_request(["the red mug, including what is hidden"])
    rows = np.arange(8) % config.train.batch_size
    kept = {
        "config": to_json(config),
        "weights": arrays(nnx.merge_state(params, constants)),
        "batch": jax.tree.map(np.asarray, batches[0]),
        "names": data.names,
        "images": (batches[0]["image"][rows], batches[0]["valid"][rows]),
        "query": (text[None], mask[None]),
    }
    (folder / "kept.pkl").write_bytes(pickle.dumps(kept))
    table = Table("largest relative difference, float32", "found", "allowed", "")
    differences: list[Difference] = []
    for row in compare(config, batches, data.names):
        differences.append(row)
        table.add_row(
            row.what, f"{row.found:.1e}", f"{row.allowed:.0e}", "" if row.found <= row.allowed else "TOO LARGE"
        )
    Console().print(table)
    (folder / "differences.json").write_text(json.dumps([row._asdict() for row in differences]), "utf-8")
    if not all(row.found <= row.allowed for row in differences):
        sys.exit(1)


def our_calls(kept: dict[str, Any], products: Any) -> dict[str, Callable[[], Any]]:
    """What is timed of r2sm_jax, all with these products, as `train --train.products` and `predict --products` do."""
    import jax
    import numpy as np
    from flax import nnx

    from r2sm_jax.config import Config
    from r2sm_jax.flags import from_json
    from r2sm_jax.models.r2sm import R2SM
    from r2sm_jax.predictor import compiled
    from r2sm_jax.training.optimizer import make_optimizer
    from r2sm_jax.training.step import init_state, jit_train_step, split_model

    config = from_json(Config, kept["config"], "the benchmark")
    config = replace(config, train=replace(config.train, products=products))
    graphdef, params, constants = split_model(config.model, config.train.seed)
    leaves, structure = jax.tree.flatten(nnx.merge_state(params, constants))
    leaves = jax.device_put([np.array(x) for x in leaves])  # training reuses the memory of the others
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    state = init_state(params, optimizer)
    batch, names, constants = jax.device_put((kept["batch"], kept["names"], constants))
    train_step = jit_train_step(graphdef, optimizer, config)

    def step() -> None:
        nonlocal state
        state, logs = train_step(state, constants, batch, names)
        jax.block_until_ready(logs)

    def blocking(function: Callable[..., Any]) -> Callable[..., Any]:
        jitted = compiled(function, graphdef, structure, config.train.products)
        return lambda *inputs: jax.block_until_ready(jitted(leaves, *inputs))

    encode, answer = blocking(R2SM.encode_image), blocking(R2SM.answer)
    images, valid = kept["images"]
    known: list[Any] = []

    def query() -> None:
        known[:] = known or encode(images[:1], valid[:1])
        answer(*known, *kept["query"])

    return {
        "step": step, "encode 1": lambda: encode(images[:1], valid[:1]), "encode 8": lambda: encode(images, valid),
        "query": query,
    }  # fmt: skip


def their_calls(kept: dict[str, Any], precision: str, compiled: bool) -> dict[str, Callable[[], Any]]:
    """The same in torch."""
    import torch
    from torch_peer import Peer, load_weights
    from torch_training import Trainer

    config = json.loads(json.dumps(kept["config"]), object_hook=lambda values: SimpleNamespace(**values))
    dtype = getattr(torch, precision)
    model = Peer(config.model)
    load_weights(model, kept["weights"])
    trainer = Trainer(model, config, dtype=dtype, compiled=compiled)
    batch, names = tensors(kept["batch"]), tensors(kept["names"])
    images, valid = (torch.from_numpy(x) for x in kept["images"])
    asked = [torch.from_numpy(x) for x in kept["query"]]
    encode, answer = model.encode_image, model.answer
    if compiled:
        encode, answer = (torch.compile(x, dynamic=False) for x in (encode, answer))

    def infer(function: Callable[..., Any], *inputs: Any) -> Any:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            return function(*inputs)

    known: list[Any] = []

    def query() -> None:
        known[:] = known or infer(encode, images[:1], valid[:1])
        infer(answer, *known, *asked)

    return {
        "step": lambda: trainer.step(batch, names),
        "encode 1": lambda: infer(encode, images[:1], valid[:1]),
        "encode 8": lambda: infer(encode, images, valid),
        "query": query,
    }


def work(variant: str, file: Path, started: float, pipe: Any) -> None:
    """A variant's process: sends the seconds to its first step and its memory, then times what it is asked to."""
    kept = pickle.loads(file.read_bytes())
    calls = our_calls(kept, OURS[variant]) if variant in OURS else their_calls(kept, *THEIRS[variant])
    calls["step"]()
    first = time.monotonic() - started
    if variant in OURS:
        from r2sm_jax.cpu import give_back_memory  # as train.py does

        give_back_memory()
    for _ in range(3):
        calls["step"]()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    statm = Path("/proc/self/statm")  # Linux: pages in all, pages in memory, ...
    resident = int(statm.read_text("utf-8").split()[1]) * resource.getpagesize() if statm.exists() else peak
    for call in calls.values():
        call()
    pipe.send({"calls": list(calls), "first": first, "memory": peak / 1e6, "resident": resident / 1e6})
    while (name := pipe.recv()) is not None:
        times = []
        for _ in range(CALLS[name]):
            start = time.perf_counter()
            calls[name]()
            times.append(1000 * (time.perf_counter() - start))
        pipe.send(times[CALLS[name] // 3 :])


def measure(variants: list[str], file: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Variant -> figures by the keys of `NAMES`. Variants start one after the other, then take turns."""
    spawn = multiprocessing.get_context("spawn")
    pipes: dict[str, Any] = {}
    figures: dict[str, dict[str, Any]] = {}
    for variant in variants:
        pipe, other = spawn.Pipe()
        worker = spawn.Process(target=work, args=(variant, file, time.monotonic(), other), daemon=True)
        worker.start()
        other.close()
        try:
            figures[variant] = pipe.recv()
        except EOFError:
            print(f"{variant} does not run here; see the error above", flush=True)
            continue
        pipes[variant] = pipe
        print(f"{variant}: first step after {figures[variant]['first']:.1f} s", flush=True)
    for name in CALLS:
        times: dict[str, list[float]] = {v: [] for v in pipes if name in figures[v]["calls"]}
        for _ in range(rounds):
            for variant, found in times.items():
                pipes[variant].send(name)
                found += pipes[variant].recv()
        for variant, found in times.items():
            figures[variant][name] = median(found)
            print(f"{variant}: {NAMES[name]} {median(found):.4g}", flush=True)
    for pipe in pipes.values():
        pipe.send(None)
    return {variant: {name: found[name] for name in NAMES if name in found} for variant, found in figures.items()}


# The report


def processor() -> dict[str, Any]:
    """The processor's name, its number of cores that this process may use, and which of `FEATURES` it has."""
    file = Path("/proc/cpuinfo")
    about = file.read_text("utf-8").partition("\n\n")[0] if file.exists() else ""
    lines = dict([part.strip() for part in line.split(":", 1)] for line in about.splitlines() if ":" in line)
    flags = set(lines.get("flags", lines.get("Features", "")).split())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = lines.get("model name") or platform.processor() or platform.machine()
    return {"processor": name, "cores": cores, **{feature: feature in flags for feature in FEATURES}}


def make_table(figures: dict[str, dict[str, float]]) -> Table:
    """A row for each variant; behind each figure its ratio to torch's best."""
    table = Table("variant", *NAMES.values(), title="in brackets: times torch's best", title_justify="left")
    best = {n: min((f.get(n, math.inf) for v, f in figures.items() if v in THEIRS), default=math.inf) for n in NAMES}
    for variant, found in figures.items():
        cells = [f"{found[n]:.3g} ({found[n] / best[n]:.2f})" if n in found else "" for n in NAMES]
        table.add_row(variant, *cells, end_section=variant == list(OURS)[-1])
    return table


def main() -> None:
    from r2sm_jax.cpu import tune_malloc

    tune_malloc()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path)
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "JAX_ENABLE_COMPILATION_CACHE": "0"}  # all compile anew
        preparing = multiprocessing.get_context("spawn").Process(target=prepare, args=(arguments, Path(folder)))
        preparing.start()
        preparing.join()
        if preparing.exitcode:
            sys.exit(preparing.exitcode)
        differences = json.loads((Path(folder) / "differences.json").read_text("utf-8"))
        variants = [*OURS, *(name for name, (_, compiled) in THEIRS.items() if not (compiled and options.no_compile))]
        figures = measure(variants, Path(folder) / "kept.pkl", options.rounds)
    Console(width=None if sys.stdout.isatty() else 160).print(make_table(figures))
    print(about := processor())
    if options.json:
        options.json.write_text(
            json.dumps({**about, "differences": differences, "figures": figures}, indent=1) + "\n", "utf-8"
        )


if __name__ == "__main__":
    from r2sm_jax.errors import exit_cleanly

    exit_cleanly(main)
