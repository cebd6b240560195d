"""Batches that wait on the devices: they are few, and a resumed run loses none of them."""

import grain
import numpy as np

from r2sm_jax.training.device_batches import DEVICE_BATCHES, DeviceBatches


def make_batches(put=lambda batch: batch | {"is_put": True}) -> DeviceBatches:
    """Batches of one image each, whose number is their position."""
    examples = grain.MapDataset.range(100).map(lambda i: {"index": np.int32(i)}).batch(1)
    return DeviceBatches(iter(examples.to_iter_dataset()), put)


def test_batches_come_in_order_and_on_the_devices():
    batches = make_batches()
    for number in range(5):
        index, batch = next(batches)
        batches.fill()
        assert index.tolist() == [number] and batch["is_put"]


def test_so_many_wait_and_no_more():
    put = []
    batches = make_batches(lambda batch: put.append(int(batch["index"][0])) or batch)
    assert put == []
    for _ in range(2):
        batches.fill()
    assert put == list(range(DEVICE_BATCHES))
    next(batches)
    batches.fill()
    assert put == list(range(DEVICE_BATCHES + 1))


def test_a_resumed_run_goes_on_with_the_batch_after_the_last_that_was_taken():
    batches = make_batches()
    start = batches.get_state()
    for _ in range(3):
        next(batches)
        batches.fill()
    state = batches.get_state()

    resumed = make_batches()
    resumed.fill()  # what waits belongs to the old place
    resumed.set_state(state)
    assert next(resumed)[0].tolist() == next(batches)[0].tolist() == [3]
    resumed.set_state(start)
    assert next(resumed)[0].tolist() == [0]
