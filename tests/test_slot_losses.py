"""Losses of slots: which slot gets which instance, and what no loss may see."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_losses import EMPTY, FULL, LEFT, PIXELS, RIGHT, SIDE, TOP, dense, means, targets, tokens

from r2sm_jax.config import PLACE, LossConfig
from r2sm_jax.models.mask_decoder import Kernels
from r2sm_jax.training.losses import (
    Targets,
    dense_losses,
    entry_weights,
    instance_losses,
    instance_regions,
    query_losses,
    slot_losses,
)

MULTI = targets(
    query_instances=jnp.array([[[True, True], [False, True]]]),
    slot_targets=jnp.array([[[0, 1], [1, -1]]], jnp.int32),
)
ONE, TWO = (LEFT, FULL), (RIGHT, RIGHT)


def slots(
    slots_of_query,
    truth: Targets,
    presence=0.0,
    iou=0.5,
    config: LossConfig | None = None,
    head="linear",
):
    drawn = tokens([(EMPTY, EMPTY)] * 2, slots_of_query, iou=iou)._replace(
        presence=jnp.broadcast_to(presence, (1, 2, 3))
    )
    config = config or LossConfig()
    found = means(
        slot_losses(drawn, PIXELS, truth, config, head=head, threshold=0), truth, config, head
    )
    return found | {"slots": found["slots_modal"] + found["slots_amodal"]}


def test_slots_in_any_order_cost_the_same():
    for order in ([ONE, TWO], [TWO, ONE]):
        assert slots([order, [TWO, (EMPTY, EMPTY)]], MULTI)["slots"] == pytest.approx(0, abs=1e-4)
        assert slots([order, [(EMPTY, EMPTY), TWO]], MULTI, iou=1.0)["slot_iou"] == pytest.approx(
            0, abs=1e-4
        )


def test_targets_in_any_order_cost_the_same():
    turned = MULTI._replace(slot_targets=jnp.array([[[1, 0], [-1, 1]]], jnp.int32))
    answers = [[(TOP, FULL), (LEFT, LEFT)], [TWO, (TOP, TOP)]]
    one, other = slots(answers, MULTI), slots(answers, turned)
    assert (
        all(one[name] == pytest.approx(float(other[name]), rel=1e-5) for name in one)
        and one["slots"] > 0.1
    )


def test_slots_without_a_target_learn_absence():
    sure = jnp.array([[[0.0, 20.0, 20.0], [0.0, 20.0, -20.0]]])
    right, wrong = (
        slots([[ONE, TWO], [TWO, (EMPTY, EMPTY)]], MULTI, presence) for presence in (sure, -sure)
    )
    assert right["slot_presence"] == pytest.approx(0, abs=1e-5)
    assert wrong["slot_presence"] == pytest.approx(20, rel=1e-4)


def test_of_slots_that_draw_alike_the_one_that_claims_the_target_gets_it():
    single = MULTI._replace(slot_targets=jnp.array([[[0, -1], [1, -1]]], jnp.int32))
    sure = jnp.array([[[0.0, -20.0, 20.0], [0.0, 20.0, -20.0]]])
    assert slots([[ONE, ONE], [TWO, TWO]], single, sure)["slot_presence"] == pytest.approx(
        0, abs=1e-5
    )


def test_what_slots_draw_on_padding_changes_neither_matching_nor_losses():
    padded = MULTI._replace(
        pixel_weight=LEFT[None], slot_targets=jnp.array([[[0, -1], [0, -1]]], jnp.int32)
    )
    clean = [[(LEFT, LEFT), (EMPTY, EMPTY)], [(EMPTY, EMPTY), (LEFT, LEFT)]]
    spilled = [[(FULL, FULL), (RIGHT, RIGHT)], [(RIGHT, RIGHT), (FULL, FULL)]]
    one, other = slots(clean, padded), slots(spilled, padded)
    assert (
        all(one[name] == pytest.approx(float(other[name]), abs=1e-5) for name in one)
        and one["slots"] < 1e-4
    )


REQUESTED = LossConfig(supervise="requested")


def test_slots_learn_only_the_type_that_was_asked_for():
    """The first query asks for modal masks, the second for the amodal mask of instance 0."""
    truth = MULTI._replace(slot_targets=jnp.array([[[0, 1], [0, -1]]], jnp.int32))
    spilled = [[(LEFT, TOP), (RIGHT, TOP)], [(TOP, FULL), (EMPTY, EMPTY)]]
    assert slots(spilled, truth, config=REQUESTED, iou=1.0)["slots"] == pytest.approx(0, abs=1e-4)
    assert slots(spilled, truth, config=REQUESTED, iou=1.0)["slot_iou"] == pytest.approx(
        0, abs=1e-4
    )
    assert slots(spilled, truth)["slots_modal"] > 1 and slots(spilled, truth)["slots_amodal"] > 1


def test_slots_without_a_head_draw_one_mask_of_the_type_that_was_asked_for():
    truth = MULTI._replace(slot_targets=jnp.array([[[0, 1], [0, -1]]], jnp.int32))
    one_mask = [[(LEFT, TOP), (RIGHT, TOP)], [(FULL, TOP), (EMPTY, EMPTY)]]
    found = slots(one_mask, truth, head="none", iou=1.0)
    assert found["slots"] == pytest.approx(0, abs=1e-4) and found["slot_iou"] == pytest.approx(
        0, abs=1e-4
    )
    assert slots([one_mask[0], one_mask[0]], truth, head="none")["slots"] > 1


@pytest.mark.parametrize("config, head", [(REQUESTED, "linear"), (LossConfig(), "none")])
def test_no_loss_sees_a_mask_of_the_type_that_nobody_asked_for(config, head):
    """Instance 0 is asked for as modal, 1 as amodal; what is true of their other masks changes no loss and no input."""
    truth = targets()
    other = truth._replace(
        modal=truth.modal.at[:, 1].set(TOP), amodal=truth.amodal.at[:, 0].set(TOP)
    )
    assert (instance_regions(truth, config, head) == instance_regions(other, config, head)).all()
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jnp.ndarray:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    kernels, names = (
        Kernels(draw(1, 1, 2, 2, SIDE**2 + PLACE), jnp.zeros((1, 1, 2, 2))),
        {"category": jnp.eye(2)},
    )
    output, masks = (
        dense(draw(2, 2, 2), draw(2, 2, 2), draw(2, 2, 4)),
        tokens([(TOP, FULL)] * 2, [[(TOP, FULL)] * 2] * 2),
    )

    def every(truth: Targets) -> dict:
        return means(
            query_losses(masks, PIXELS, truth, config, head=head, threshold=0)
            | slot_losses(masks, PIXELS, truth, config, head=head, threshold=0)
            | instance_losses(kernels, PIXELS, truth, config)
            | dense_losses(output, names, truth),
            truth,
            config,
            head,
        )

    one, two = every(truth), every(other)
    assert {name: float(x) for name, x in one.items()} == {
        name: float(x) for name, x in two.items()
    }
    assert one["instance_modal"] > 0 and one["instance_amodal"] > 0 and one["dense_category"] > 0
    weights = entry_weights(truth, LossConfig(), "linear")
    assert (weights["instance_modal"] > 0).all() and (weights["slots_amodal"] > 0).sum() == 2


def test_slots_of_padded_queries_do_not_count():
    truth = MULTI._replace(query_mask=jnp.array([[True, False]]))
    one, other = ([[ONE, TWO], second] for second in ([TWO, TWO], [(EMPTY, FULL), (TOP, TOP)]))
    a, b = slots(one, truth), slots(other, truth)
    assert all(a[name] == pytest.approx(float(b[name]), abs=1e-6) for name in a)
