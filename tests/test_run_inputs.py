"""A run answers and goes on with what it was trained with, or not at all."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import write_bert

from r2sm_jax.data.text_states import TextStates
from r2sm_jax.errors import InputError
from r2sm_jax.inference.run import load
from r2sm_jax.train import main
from r2sm_jax.training.run_folder import check_language_model, check_unchanged


@pytest.fixture
def changed(tiny_run, tmp_path):
    """A copy of the tiny run after a change of its configuration, as if what that names had been
    replaced."""

    def change(group: str, **fields) -> Path:
        run = Path(shutil.copytree(tiny_run, tmp_path / "copy"))
        config = json.loads((run / "config.json").read_text())
        (config["model"]["text"] if group == "text" else config[group]).update(fields)
        (run / "config.json").write_text(json.dumps(config))
        return run

    return change


def test_replaced_weights_of_the_language_model_are_refused(changed, tmp_path, refused):
    run = changed("text", name=str(write_bert(tmp_path / "other", seed=1)))
    sentence = f"other: its weights have sha256 .*, but the run {run} needs .*; get the"
    with pytest.raises(InputError, match=sentence):
        load(run)
    assert re.search(sentence, refused(main, "--resume", "--run", run))
    (run / "inputs.json").unlink()  # a run of an earlier version
    assert load(run).step


def test_a_replaced_tokenizer_is_refused_but_not_the_same_in_another_file(
    changed, bert_folder, tmp_path
):
    folder = Path(shutil.copytree(bert_folder, tmp_path / "other"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=3))
    run = changed("text", name=str(folder))
    assert load(run).step
    tokenizer["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InputError, match="its tokenizer has sha256"):
        load(run)


def test_a_revision_of_the_hub_is_stored_and_asked_for(tiny_run, bert_folder, tmp_path):
    folder = Path(shutil.copytree(bert_folder, tmp_path / "models--a--b" / "snapshots" / "12ab"))
    texts = TextStates(str(folder), layers=(1, 2), max_tokens=24)
    stored = json.loads((tiny_run / "inputs.json").read_text())["language_model"] | {
        "revision": "12ab"
    }
    assert texts.identity | {"name": stored["name"]} == stored
    with pytest.raises(InputError, match="get the a/b that it was trained with, revision 12ab"):
        check_language_model(texts, stored | {"name": "a/b", "sha256": "0" * 64}, "this run")


def test_other_training_data_are_refused(changed, refused):
    run = changed("data", seed=1)
    message = refused(main, "--resume", "--run", run)
    assert (
        f"scenes: not the training data that the run {run} began with" in message
        and "--init" in message
    )


def test_a_resumed_run_may_find_its_data_elsewhere(tiny_config, tmp_path):
    data = tiny_config.data
    moved = replace(tiny_config, data=replace(data, source="json:new.json", images="elsewhere"))
    check_unchanged(tmp_path, tiny_config, moved)
    with pytest.raises(InputError, match=r"data\.seed"):
        other = replace(tiny_config, data=replace(data, seed=data.seed + 1))
        check_unchanged(tmp_path, tiny_config, other)
