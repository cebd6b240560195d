import jax
import jax.numpy as jnp
import numpy as np
import pytest

from r2sm_jax.config import PLACE, LossConfig
from r2sm_jax.models.mask_decoder import Kernels, MaskTokens
from r2sm_jax.models.r2sm import DenseOutput
from r2sm_jax.training.losses import (
    Targets,
    dense_losses,
    dice_loss,
    entry_weights,
    instance_losses,
    mask_loss,
    mean_losses,
    pixel_mean,
    query_losses,
    query_targets,
    soft_iou,
    total_loss,
    type_loss,
)

LN2 = float(np.log(2))
SIDE = 4
PIXELS = jnp.eye(SIDE * SIDE).reshape(
    1, SIDE, SIDE, SIDE * SIDE
)  # so that kernels are the masks themselves


def mask(*rows: str) -> jnp.ndarray:
    """`#` is 1 and `+` is 0.5."""
    return jnp.array([[{"#": 1.0, "+": 0.5}.get(c, 0.0) for c in row] for row in rows])


FULL, EMPTY = jnp.ones((SIDE, SIDE)), jnp.zeros((SIDE, SIDE))
LEFT = mask("##..", "##..", "##..", "##..")
RIGHT = 1 - LEFT
TOP = mask("####", "####", "....", "....")


def logits(*masks, strength: float = 20.0):
    """Logits of sure predictions."""
    return jnp.stack([(2 * m - 1) * strength for m in masks])


# Single masks, by hand.


def test_dice_by_hand():
    target = mask("##", "..")
    flat = jnp.zeros((2, 2))  # probability 1/2 everywhere: overlap 1, sizes 2 + 2
    assert dice_loss(flat, target, jnp.ones((2, 2))) == pytest.approx(1 - 3 / 5)
    valid = mask("##", "#.")  # overlap 1, sizes 1.5 + 2
    assert dice_loss(flat, target, valid) == pytest.approx(1 - 3 / 4.5)
    assert dice_loss(logits(target)[0], target, jnp.ones((2, 2))) == pytest.approx(0, abs=1e-6)


def test_dice_of_an_empty_target_is_nought_and_pushes_nowhere():
    loss, gradient = jax.value_and_grad(
        lambda x: dice_loss(x, jnp.zeros((2, 2)), jnp.ones((2, 2)))
    )(jnp.ones((2, 2)))
    assert loss == 0 and not gradient.any()


def test_pixel_mean_leaves_invalid_cells_out():
    assert pixel_mean(mask("##", ".."), mask("#.", "#.")) == 0.5
    assert pixel_mean(mask("##", ".."), jnp.zeros((2, 2))) == 0


def test_the_named_pairs_by_hand():
    flat, target, valid = jnp.zeros((2, 2)), mask("##", ".."), jnp.ones((2, 2))
    assert mask_loss(flat, target, valid, "mask2former") == pytest.approx(
        5 * LN2 + 5 * 0.4, rel=1e-5
    )
    assert mask_loss(flat, target, valid, "lisa") == pytest.approx(2 * LN2 + 0.5 * 0.4, rel=1e-5)
    focal = (
        (2 * 0.25 + 2 * 0.75) / 4 * 0.5**2 * LN2
    )  # alpha .25 on the object, .75 beside it, gamma 2
    assert mask_loss(flat, target, valid, "sam") == pytest.approx(20 * focal + 0.4, rel=1e-5)


@pytest.mark.parametrize(
    "pair, wanted", [("mask2former", 5 * LN2), ("lisa", 2 * LN2), ("sam", 20 * 0.75 * 0.25 * LN2)]
)
def test_mask_loss_of_an_empty_target_is_its_pixel_part(pair, wanted):
    flat, valid = jnp.zeros((2, 2)), jnp.ones((2, 2))
    assert mask_loss(flat, jnp.zeros((2, 2)), valid, pair) == pytest.approx(wanted, rel=1e-5)


def test_soft_iou_thresholds_both():
    assert soft_iou(logits(LEFT)[0], TOP, FULL, 0) == pytest.approx(4 / 12)
    assert soft_iou(logits(EMPTY)[0], 0.4 * LEFT, FULL, 0) == 1
    assert soft_iou(logits(LEFT)[0], EMPTY, FULL, 0) == 0
    assert soft_iou(logits(LEFT)[0], FULL, FULL, -100) == 1


def test_soft_iou_does_not_look_at_padding():
    assert soft_iou(logits(FULL)[0], LEFT, LEFT, 0) == 1
    assert soft_iou(logits(FULL)[0], EMPTY, EMPTY, 0) == 1


# Queries: two of them about one image with two instances.


def wherever(weights: jnp.ndarray) -> jnp.ndarray:
    """Kernels to which the place of a pixel does not matter."""
    return jnp.pad(weights, ((0, 0),) * (weights.ndim - 1) + ((0, PLACE),))


def tokens(fused, slots=(), *, iou=0.5, presence=0.0) -> MaskTokens:
    """Kernels that draw the given (modal, amodal) masks: one fused pair a query, and for each its slots."""
    rows = [[pair, *(slots[k] if slots else [])] for k, pair in enumerate(fused)]
    kernels = jnp.stack(
        [jnp.stack([logits(*pair).reshape(2, -1) for pair in row]) for row in rows]
    )[None]
    shape = kernels.shape[:3]
    drawn = Kernels(wherever(kernels), jnp.zeros((*shape, 2)))
    return MaskTokens(drawn, (drawn,), jnp.full(shape, presence), jnp.full((*shape, 2), iou))


def targets(**changes) -> Targets:
    """Instance 0 is LEFT, and FULL when completed; instance 1 is RIGHT, unoccluded. Query k means instance k."""
    known = {
        "modal": jnp.stack([LEFT, RIGHT])[None],
        "amodal": jnp.stack([FULL, RIGHT])[None],
        "has_amodal": jnp.ones((1, 2), bool),
        "query_instances": jnp.eye(2, dtype=bool)[None],
        "slot_targets": jnp.array([[[0, -1], [1, -1]]], jnp.int32),
        "is_amodal": jnp.array([[False, True]]),
        "query_mask": jnp.ones((1, 2), bool),
        "pixel_weight": jnp.ones((1, SIDE, SIDE)),
        "labels": {"category": jnp.array([[0, 1]], jnp.int32)},
        "boxes": jnp.array([[[0, 0, 1, 1], [0.5, 0, 1, 1]]], jnp.float32),
        "type_is_amodal": jnp.array([[False, True]]),
        "type_valid": jnp.ones((1, 2), bool),
    }
    return Targets(**known | changes)


def means(
    values: dict, truth: Targets, config: LossConfig | None = None, head="linear"
) -> dict[str, jnp.ndarray]:
    """The mean of each loss over the entries that count."""
    weights = entry_weights(truth, config or LossConfig(), head)
    return {name: (x * weights[name]).sum() for name, x in values.items()}


def losses(masks: MaskTokens, truth: Targets, config: LossConfig | None = None, head="linear"):
    """Losses of the fused masks."""
    values = query_losses(masks, PIXELS, truth, config or LossConfig(), head=head, threshold=0)
    return means(values, truth, config, head)


RIGHT_ANSWER = [(LEFT, FULL), (RIGHT, RIGHT)]


def test_right_answers_cost_nothing():
    parts = losses(tokens(RIGHT_ANSWER, iou=1.0, presence=20.0), targets())
    assert all(value == pytest.approx(0, abs=1e-5) for value in parts.values()), parts


def test_the_union_of_all_instances_that_a_query_means_is_its_target():
    modal, amodal = query_targets(
        targets(query_instances=jnp.array([[[True, True], [False, False]]]))
    )
    assert (modal[0, 0] == 1).all() and (amodal[0, 0] == 1).all() and not modal[0, 1].any()


def test_each_mask_counts_the_same_whatever_its_size():
    tiny = EMPTY.at[0, 0].set(1.0)
    truth = targets(modal=jnp.stack([tiny, RIGHT])[None], amodal=jnp.stack([tiny, RIGHT])[None])
    both = losses(tokens([(EMPTY, EMPTY), (EMPTY, EMPTY)]), truth)["modal"]
    single = [mask_loss(logits(EMPTY)[0], m, FULL, LossConfig().masks) for m in (tiny, RIGHT)]
    assert both == pytest.approx(float(single[0] + single[1]) / 2, rel=1e-5)


def test_padded_queries_and_cells_do_not_count():
    truth = targets(query_mask=jnp.array([[True, False]]))
    one, other = tokens([RIGHT_ANSWER[0], (EMPTY, FULL)]), tokens([RIGHT_ANSWER[0], (TOP, TOP)])
    assert losses(one, truth) == losses(other, truth)
    half = targets(pixel_weight=LEFT[None])
    assert losses(tokens([(FULL, FULL), (EMPTY, EMPTY)]), half)["modal"] == pytest.approx(
        0, abs=1e-5
    )
    nothing = losses(one, targets(query_mask=jnp.zeros((1, 2), bool)))
    assert all(value == 0 for value in nothing.values())


def gradient_of_kernels(truth: Targets, config: LossConfig, head: str = "linear"):
    """Which masks [query, type] the mask losses push at; logits are moderate, so that nothing saturates."""
    rng = np.random.default_rng(0)
    masks = tokens([(EMPTY, EMPTY), (EMPTY, EMPTY)])
    kernels = (
        jnp.asarray(rng.normal(size=masks.kernels.weights.shape), jnp.float32)
        .at[:, :, :, 1]
        .add(1.0)
    )

    def loss(kernels):
        drawn = masks.kernels._replace(weights=kernels)
        parts = losses(masks._replace(kernels=drawn), truth, config, head)
        return parts["modal"] + parts["amodal"]

    return (np.abs(jax.grad(loss)(kernels))[0, :, 0].max(-1) > 1e-6).tolist()


def test_both_masks_are_supervised_on_every_query():
    assert gradient_of_kernels(targets(), LossConfig(supervise="both")) == [
        [True, True],
        [True, True],
    ]


def test_requested_supervises_only_the_mask_that_was_asked_for():
    # The second query asks for the amodal mask, which is the larger of modal and completing logits.
    truth = targets(query_mask=jnp.array([[True, False]]))
    assert gradient_of_kernels(truth, LossConfig(supervise="requested")) == [
        [True, False],
        [False, False],
    ]
    parts = losses(
        tokens([(LEFT, EMPTY), (EMPTY, RIGHT)]), targets(), LossConfig(supervise="requested")
    )
    assert parts["modal"] == pytest.approx(0, abs=1e-5) and parts["amodal"] == pytest.approx(
        0, abs=1e-5
    )


def test_an_unknown_amodal_mask_is_skipped():
    truth = targets(has_amodal=jnp.array([[False, True]]))
    assert gradient_of_kernels(truth, LossConfig()) == [[True, False], [True, True]]
    wrong = losses(tokens([(LEFT, LEFT), (RIGHT, RIGHT)], iou=1.0), truth)
    assert wrong["amodal"] == pytest.approx(0, abs=1e-5) and wrong["iou"] == pytest.approx(
        0, abs=1e-5
    )


def test_without_a_head_one_mask_learns_whatever_is_asked_for():
    assert losses(tokens([(LEFT, EMPTY), (RIGHT, EMPTY)]), targets(), head="none")[
        "modal"
    ] == pytest.approx(0, abs=1e-5)
    truth = targets(is_amodal=jnp.array([[True, True]]))
    assert losses(tokens([(FULL, EMPTY), (RIGHT, EMPTY)]), truth, head="none")[
        "modal"
    ] == pytest.approx(0, abs=1e-5)
    assert gradient_of_kernels(targets(), LossConfig(), "none") == [[True, False], [True, False]]


def softplus(x: float) -> float:
    return np.log1p(np.exp(x))


def test_every_reader_of_the_mask_type_is_judged_alone():
    readings = jnp.array([[[1.0, 3.0, 50.0]], [[-2.0, 4.0, 50.0]]])
    truth = targets(
        type_is_amodal=jnp.array([[False, True, False]]),
        type_valid=jnp.array([[True, True, False]]),
    )
    values = type_loss(readings, truth.type_is_amodal, LossConfig(type_smoothing=0))
    alone = [softplus(1.0) + softplus(-3.0), softplus(-2.0) + softplus(-4.0)]
    assert means({"type": values}, truth)["type"] == pytest.approx(sum(alone) / 4, rel=1e-5)


def test_presence_is_a_cross_entropy():
    truth = targets(query_instances=jnp.array([[[True, False], [False, False]]]))
    parts = losses(tokens(RIGHT_ANSWER, presence=1.0), truth)
    assert parts["presence"] == pytest.approx((softplus(-1.0) + softplus(1.0)) / 2, rel=1e-5)


def test_the_iou_head_learns_the_iou_of_the_masks_and_leaves_them_alone():
    masks = tokens([(TOP, FULL), (RIGHT, RIGHT)], iou=0.5)  # IoUs 1/3, 1, 1, 1
    wanted = ((0.5 - 1 / 3) ** 2 + 3 * 0.5**2) / 4
    assert losses(masks, targets())["iou"] == pytest.approx(wanted, rel=1e-4)
    gradient = jax.grad(lambda k: losses(masks._replace(kernels=k), targets())["iou"])(
        masks.kernels
    )
    assert not gradient.weights.any() and not gradient.biases.any()


def test_the_iou_head_learns_about_the_masks_that_are_answered():
    first, again = tokens([(TOP, FULL), (RIGHT, RIGHT)], iou=1.0), tokens(RIGHT_ANSWER)
    assert losses(first, targets())["iou"] == pytest.approx((2 / 3) ** 2 / 4, rel=1e-4)
    assert losses(first._replace(second=again.kernels), targets())["iou"] == pytest.approx(
        0, abs=1e-6
    )


# Dense supervision, and the sum.


def dense(visible, hidden, box) -> DenseOutput:
    return DenseOutput(visible[None], hidden[None], box[None])


def pixel_losses(output: DenseOutput, names, truth: Targets):
    return means(dense_losses(output, names, truth), truth)


def test_dense_losses_vanish_for_right_answers():
    # Four cells of 2 x 2; categories 0 (left) and 1 (right) have the embeddings of a unit basis.
    names = {"category": 20.0 * jnp.eye(2)}
    left = jnp.array([[1.0, 0.0], [1.0, 0.0]])
    visible = 20.0 * jnp.stack([left, 1 - left], -1)
    hidden = (
        jnp.stack([1 - left, jnp.zeros((2, 2))], -1) * 2 - 1
    )  # instance 0 goes on behind instance 1
    centre = jnp.array([0.25, 0.75])
    x, y = jnp.meshgrid(centre, centre, indexing="xy")
    x0 = jnp.where(left > 0, 0.0, 0.5)
    box = jnp.stack([x0 - x, -y, 1 - x, 1 - y], -1)
    truth = targets()
    parts = pixel_losses(dense(visible, 20.0 * hidden, box), names, truth)
    assert all(value == pytest.approx(0, abs=1e-3) for value in parts.values()), parts
    worse = pixel_losses(dense(visible[:, ::-1], 20.0 * hidden[:, ::-1], box + 0.5), names, truth)
    assert all(value > 0.5 for value in worse.values()), worse
    assert worse["dense_box"] == pytest.approx(4 * 0.5)


def test_dense_losses_do_not_look_at_padding():
    rng = np.random.default_rng(0)
    visible, hidden, box = (jnp.asarray(rng.normal(size=(2, 2, c)), jnp.float32) for c in (2, 2, 4))
    other = dense(
        visible.at[:, 1].add(3), hidden.at[:, 1].add(3), box.at[:, 1].add(3)
    )  # the right half
    truth, names = targets(pixel_weight=LEFT[None]), {"category": jnp.eye(2)}
    a, b = (
        pixel_losses(dense(visible, hidden, box), names, truth),
        pixel_losses(other, names, truth),
    )
    assert all(a[name] == pytest.approx(float(b[name])) for name in a)


def test_unknown_labels_are_left_out():
    truth = targets(labels={"category": jnp.array([[-1, -1]], jnp.int32)})
    parts = pixel_losses(
        dense(jnp.ones((2, 2, 2)), jnp.ones((2, 2, 2)), jnp.zeros((2, 2, 4))),
        {"category": jnp.eye(2)},
        truth,
    )
    assert parts["dense_category"] == 0


def test_instance_losses_ask_for_each_instance_by_itself():
    drawn = jnp.stack([logits(LEFT, FULL), logits(RIGHT, RIGHT)]).reshape(1, 1, 2, 2, -1)
    truth = targets()

    def loss(weights, truth=truth):
        kernels = Kernels(wherever(weights), jnp.zeros((1, 1, 2, 2)))
        return sum(means(instance_losses(kernels, PIXELS, truth, LossConfig()), truth).values())

    assert loss(drawn) == pytest.approx(0, abs=1e-5)
    assert loss(drawn[:, :, ::-1]) > 5
    # An instance that is not there, or whose complete shape is unknown, asks for nothing.
    absent = targets(modal=jnp.stack([LEFT, EMPTY])[None], amodal=jnp.stack([FULL, EMPTY])[None])
    assert loss(drawn.at[:, :, 1].multiply(-1), absent) == pytest.approx(0, abs=1e-5)
    unknown = targets(has_amodal=jnp.array([[False, True]]))
    assert loss(drawn.at[:, :, 0, 1].multiply(-1), unknown) == pytest.approx(0, abs=1e-5)


def test_the_total_is_the_weighted_sum():
    names = (
        "modal amodal type presence slot_presence slots iou slot_iou dense_a dense_b early instance"
    )
    parts = {name: jnp.array(float(10**i)) for i, name in enumerate(names.split())}
    config = LossConfig(type=2, presence=3, slots=4, iou=5, dense=6, early=7, instance=8)
    wanted = 1 + 10 + 200 + 3 * 11000 + 4e5 + 5 * 11e6 + 6 * 11e8 + 7e10 + 8e11
    assert total_loss(parts, config) == pytest.approx(wanted)


def test_the_shares_of_parts_add_up_to_the_mean_over_what_counts():
    values = {
        f"{name}_{kind}": jnp.array([1.0, 2.0, 90.0])
        for name in ("early", "slots", "instance")
        for kind in ("modal", "amodal")
    } | {"modal": jnp.array([1.0, 2.0, 90.0])}
    for weight in (0.5, 0.25, 1.0):
        weights = {name: weight * jnp.array([True, True, False]) for name in values}
        found = mean_losses(values, weights)
        assert (
            found["modal"] == 3 * weight
            and found["early"] == found["slots"] == found["instance"] == 6 * weight
        )
    with pytest.raises(ValueError):
        mean_losses(values, weights | {"other": weights["modal"]})


def test_entries_that_count_weigh_alike_and_others_nothing():
    truth = targets(query_mask=jnp.array([[True, False]]))
    weights = entry_weights(truth, LossConfig(), "linear")
    assert weights["modal"].tolist() == [[1, 0]] and weights["type"].tolist() == [[0.5, 0.5]]
    nothing = entry_weights(targets(query_mask=jnp.zeros((1, 2), bool)), LossConfig(), "linear")
    assert nothing["modal"].tolist() == [[0, 0]]
