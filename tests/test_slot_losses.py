"""Losses of slots: which slot is matched with which instance, and that masks nobody asks for teach
nothing."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_losses import (
    EMPTY,
    FULL,
    LEFT,
    PIXELS,
    REQUESTED,
    RIGHT,
    SIDE,
    TOP,
    pairs,
    targets,
    tokens,
)

from r2sm_jax.config import NUM_COORDINATES, LossConfig
from r2sm_jax.models.mask_decoder import MaskKernels
from r2sm_jax.models.r2sm import DenseOutput
from r2sm_jax.training.losses import (
    aux_loss,
    dense_losses,
    instance_loss,
    query_losses,
    slot_losses,
)
from r2sm_jax.training.supervision import Targets

ONE, TWO = (LEFT, FULL), (RIGHT, RIGHT)
NOTHING = (EMPTY, EMPTY)


def multi(config: LossConfig | None = None, head="linear", **changes) -> Targets:
    """The first query asks for both instances, the second for instance 1."""
    both = {
        "query_instances": jnp.array([[[True, True], [False, True]]]),
        "slot_targets": jnp.array([[[0, 1], [1, -1]]], jnp.int32),
    }
    return targets(config, head, **both | changes)


def losses(slots, truth: Targets, *, presence=0.0, iou=0.5):
    decoder = tokens([NOTHING] * 2, slots, iou=iou)
    decoder = decoder._replace(presence=jnp.broadcast_to(presence, (1, 2, 3)))
    return slot_losses(decoder, PIXELS, truth, LossConfig(), threshold=0)


@pytest.mark.parametrize("first", [[ONE, TWO], [TWO, ONE]])
@pytest.mark.parametrize("second", [[TWO, NOTHING], [NOTHING, TWO]])
def test_slots_in_any_order_cost_the_same(first, second):
    parts = losses([first, second], multi(), iou=1.0)
    assert parts["slots"] == pytest.approx(0, abs=1e-4)
    assert parts["slot_iou"] == pytest.approx(0, abs=1e-4)


def test_slots_without_a_target_learn_absence():
    presence = jnp.array([[[0.0, 20.0, 20.0], [0.0, 20.0, -20.0]]])
    answers = [[ONE, TWO], [TWO, NOTHING]]
    right = losses(answers, multi(), presence=presence)
    wrong = losses(answers, multi(), presence=-presence)
    assert right["slot_presence"] == pytest.approx(0, abs=1e-5)
    assert wrong["slot_presence"] == pytest.approx(20, rel=1e-4)


def test_of_equal_slots_the_one_with_the_higher_presence_is_matched():
    truth = multi(slot_targets=jnp.array([[[0, -1], [1, -1]]], jnp.int32))
    presence = jnp.array([[[0.0, -20.0, 20.0], [0.0, 20.0, -20.0]]])
    parts = losses([[ONE, ONE], [TWO, TWO]], truth, presence=presence)
    assert parts["slot_presence"] == pytest.approx(0, abs=1e-5)


def test_masks_on_padding_change_neither_matching_nor_losses():
    truth = multi(pixel_weight=LEFT[None], slot_targets=jnp.array([[[0, -1], [0, -1]]], jnp.int32))
    one = losses([[(LEFT, LEFT), NOTHING], [NOTHING, (LEFT, LEFT)]], truth)
    other = losses([[(FULL, FULL), TWO], [TWO, (FULL, FULL)]], truth)
    assert all(one[name] == pytest.approx(float(other[name]), abs=1e-5) for name in one)
    assert one["slots"] < 1e-4


def test_slots_of_padded_queries_do_not_count():
    truth = multi(query_mask=jnp.array([[True, False]]))
    one = losses([[ONE, TWO], [TWO, TWO]], truth)
    other = losses([[ONE, TWO], [(EMPTY, FULL), (TOP, TOP)]], truth)
    assert all(one[name] == pytest.approx(float(other[name]), abs=1e-6) for name in one)


# One type a query: the first asks for modal masks, the second for the amodal mask of instance 0.
ONE_TYPE = {"slot_targets": jnp.array([[[0, 1], [0, -1]]], jnp.int32)}


def test_requested_supervises_only_slots_of_the_type_that_the_query_asks_for():
    answers = [[(LEFT, TOP), (RIGHT, TOP)], [(TOP, FULL), NOTHING]]
    parts = losses(answers, multi(REQUESTED, **ONE_TYPE), iou=1.0)
    assert parts["slots"] == pytest.approx(0, abs=1e-4)
    assert parts["slot_iou"] == pytest.approx(0, abs=1e-4)
    assert losses(answers, multi(**ONE_TYPE))["slots"] > 2


def test_without_a_head_slots_learn_one_mask_of_the_requested_type():
    first = [(LEFT, TOP), (RIGHT, TOP)]
    truth = multi(head="none", **ONE_TYPE)
    parts = losses([first, [(FULL, TOP), NOTHING]], truth, iou=1.0)
    assert parts["slots"] == pytest.approx(0, abs=1e-4)
    assert parts["slot_iou"] == pytest.approx(0, abs=1e-4)
    assert losses([first, first], truth)["slots"] > 1


@pytest.mark.parametrize("config, head", [(REQUESTED, "linear"), (LossConfig(), "none")])
def test_no_loss_reads_a_mask_of_a_type_that_no_query_asks_for(config, head):
    """Query 0 asks for the modal mask of instance 0, query 1 for the amodal mask of 1; their other
    masks are changed."""
    truth = targets(config, head)
    other = targets(config, head, masks=pairs((LEFT, TOP), (TOP, RIGHT)))
    assert (truth.instance_regions == other.instance_regions).all()

    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jnp.ndarray:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    kernels = MaskKernels(normal(1, 1, 2, 2, SIDE**2 + NUM_COORDINATES), jnp.zeros((1, 1, 2, 2)))
    dense = DenseOutput(normal(1, 2, 2, 2), normal(1, 2, 2, 2), normal(1, 2, 2, 4))
    decoder = tokens([(TOP, FULL)] * 2, [[(TOP, FULL)] * 2] * 2)

    def all_losses(truth: Targets) -> dict:
        return {
            **query_losses(decoder, PIXELS, truth, config, threshold=0),
            **slot_losses(decoder, PIXELS, truth, config, threshold=0),
            **dense_losses(dense, {"category": jnp.eye(2)}, truth.pixels),
            "aux": aux_loss(decoder, PIXELS, truth, config),
            "instance": instance_loss(kernels, PIXELS, truth, config),
        }

    one = {name: float(value) for name, value in all_losses(truth).items()}
    two = {name: float(value) for name, value in all_losses(other).items()}
    assert one == two
    assert one["instance"] > 0 and one["dense_category"] > 0 and one["dense_hidden"] == 0


def test_both_types_of_every_instance_and_slot_are_supervised_by_default():
    truth = targets()
    assert (truth.instances.weight > 0).all() and (truth.slots.weight > 0).sum() == 4
