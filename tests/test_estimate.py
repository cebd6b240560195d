"""`scripts/estimate.py`: its batch is that of training, and its figures follow the
configuration."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from estimate import batch_shapes, estimate, main, take_devices, vocabulary

from r2sm_jax.data.batches import ExampleBuilder, training_batches
from r2sm_jax.data.prepare import PreparedSource
from r2sm_jax.data.text_states import TextStates
from r2sm_jax.errors import InputError
from r2sm_jax.synthetic.queries.sentences import write_text_only_queries
from r2sm_jax.train import open_data
from r2sm_jax.training.step import abstract_state

ALL = "in all a device, without the language model"
TEMPORARIES = "activations and other temporaries a device"


def figure(text: str) -> float:
    return float(text.split()[0].replace(",", ""))


def test_the_batch_is_that_of_training(tiny_config):
    """Shapes and types, so that the estimate cannot drift from the data path."""
    source = open_data(tiny_config, "train", 8)
    model, data = tiny_config.model, tiny_config.data
    texts = TextStates(model.text.name, layers=model.text.layers, max_tokens=model.text.max_tokens)
    assemble = ExampleBuilder(
        text_states=texts,
        tokens=model.text.max_tokens,
        queries=data.queries,
        instances=data.instances,
        slots=model.decoder.slots,
        mirror=False,
        has_text_head=True,
        text_only=write_text_only_queries(data.text_only_queries, seed=0),
    )
    prepared = PreparedSource(source, model.vision.image_size, model.mask_size)
    batch = next(
        training_batches(prepared, assemble, batch_size=tiny_config.train.batch_size, seed=0)
    )
    actual = jax.tree.map(lambda x: (np.shape(x), np.asarray(x).dtype), batch)
    shapes = jax.tree.map(lambda x: (x.shape, np.dtype(x.dtype)), batch_shapes(tiny_config))
    assert shapes == actual
    assert vocabulary(tiny_config) == {
        group: len(names) for group, names in source.vocabulary.items()
    }


@pytest.mark.slow
def test_figures_follow_the_configuration(tiny_config, monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("the model was run")

    monkeypatch.setattr(jax, "device_put", refuse)
    plain = dict(estimate(tiny_config))
    _, state, _ = abstract_state(tiny_config)
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    assert figure(plain["trainable parameters"]) == parameters
    assert figure(plain[f"frozen: {tiny_config.model.text.name}"]) > 10_000
    # AdamW: weights and two moments in float32, and the batch.
    arguments = figure(plain["arguments a device (weights, optimizer, batch)"])
    assert 12 * parameters / 1e9 - 0.005 <= arguments <= 12 * parameters / 1e9 + 0.01
    parts = dict(estimate(replace(tiny_config, train=replace(tiny_config.train, accumulate=4))))
    assert parts["FLOPs a step, all devices"] == plain["FLOPs a step, all devices"]
    assert figure(parts[TEMPORARIES]) < figure(plain[TEMPORARIES])
    twice = replace(tiny_config, train=replace(tiny_config.train, batch_size=16))
    flops = "FLOPs a step, all devices"  # known before the step is compiled
    more = next(value for name, value in estimate(twice) if name == flops)
    assert 1.7 < figure(more) / figure(plain[flops]) < 2.05


@pytest.mark.slow
def test_remat_trades_memory_for_flops(tiny_config):
    deep = replace(tiny_config.model.vision, depth=4, dim=64, image_size=64)
    model = replace(tiny_config.model, vision=deep)
    plain, remat = (
        dict(estimate(replace(tiny_config, model=replace(model, vision=replace(deep, remat=on)))))
        for on in (False, True)
    )
    assert figure(remat[TEMPORARIES]) < figure(plain[TEMPORARIES])
    assert figure(remat["FLOPs a step, all devices"]) > figure(plain["FLOPs a step, all devices"])


def test_a_language_model_that_cannot_be_had_is_said_and_the_rest_counted(tiny_config):
    text = replace(tiny_config.model.text, name="./nowhere")
    lines = estimate(replace(tiny_config, model=replace(tiny_config.model, text=text)))
    next(lines)
    name, text = next(lines)
    assert "nowhere" in name and text.startswith("not counted: ")


def test_devices_are_taken_from_the_arguments():
    flags = ["--train.steps", "3"]
    assert take_devices(["--devices", "4", *flags]) == (flags, 4)
    assert take_devices(["--devices=2"]) == ([], 2)
    assert take_devices(flags) == (flags, None)
    for bad in (["--devices"], ["--devices", "0"], ["--devices=many"]):
        with pytest.raises(InputError, match=r"--devices .*give a number of devices"):
            take_devices(bad)


def test_bad_flags_are_one_sentence(refused):
    assert "unknown flag --train.stepz" in refused(main, "--train.stepz", 3)
