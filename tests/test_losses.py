"""Losses by hand: masks of a few cells, whose kernels are the masks themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from r2sm_jax.config import NUM_COORDINATES, LossConfig
from r2sm_jax.data.batches import Batch
from r2sm_jax.models.mask_decoder import DecoderOutput, MaskKernels
from r2sm_jax.models.r2sm import DenseOutput
from r2sm_jax.training.losses import (
    aux_loss,
    dense_losses,
    dice_loss,
    instance_loss,
    loss_weights,
    mask_iou,
    mask_loss,
    pixel_mean,
    query_losses,
    type_loss,
    weighted_sum,
)
from r2sm_jax.training.step import total_loss
from r2sm_jax.training.supervision import Targets, make_targets

LN2 = float(np.log(2))
SIDE = 4
PIXELS = jnp.eye(SIDE * SIDE).reshape(1, SIDE, SIDE, SIDE * SIDE)
"""Every pixel has a channel of its own, so a kernel is the mask that it predicts."""


def mask(*rows: str) -> jnp.ndarray:
    """`#` is 1 and `+` is 0.5."""
    values = {"#": 1.0, "+": 0.5, ".": 0.0}
    return jnp.array([[values[c] for c in row] for row in rows])


FULL = jnp.ones((SIDE, SIDE))
EMPTY = jnp.zeros((SIDE, SIDE))
LEFT = mask("##..", "##..", "##..", "##..")
RIGHT = 1 - LEFT
TOP = mask("####", "####", "....", "....")


def logits(*masks, strength: float = 20.0):
    """Logits of sure predictions."""
    return jnp.stack([(2 * m - 1) * strength for m in masks])


def kernels_of(rows) -> MaskKernels:
    """MaskKernels [1 k q] that predict the (modal, amodal) masks of k rows of q pairs."""
    flat = jnp.stack([jnp.stack([logits(*pair).reshape(2, -1) for pair in row]) for row in rows])
    weights = jnp.concatenate([flat, jnp.zeros((*flat.shape[:-1], NUM_COORDINATES))], axis=-1)[None]
    return MaskKernels(weights, jnp.zeros(weights.shape[:-1]))


def tokens(fused, slots=None, *, iou=0.5, presence=0.0) -> DecoderOutput:
    """Decoder output that predicts one fused pair of masks a query, and for each its slots."""
    slots = slots or [[]] * len(fused)
    kernels = kernels_of([[pair, *others] for pair, others in zip(fused, slots, strict=True)])
    shape = kernels.weights.shape[:3]
    return DecoderOutput(
        kernels=kernels,
        aux_kernels=(kernels,),
        refined_kernels=kernels,
        presence=jnp.full(shape, presence),
        iou=jnp.full((*shape, 2), iou),
        pixel_features=PIXELS,
    )


def pairs(*instances) -> jnp.ndarray:
    """Masks [1 m 2 h w] of one image."""
    return jnp.stack([jnp.stack(pair) for pair in instances])[None]


HALF_KNOWN = jnp.array([[[True, False], [True, True]]])
"""The complete shape of instance 0 is not annotated."""


def make_batch(**changes) -> Batch:
    """Instance 0 is LEFT, and FULL when completed; instance 1 is RIGHT, unoccluded. Query k asks
    for instance k."""
    batch = {
        "masks": pairs((LEFT, FULL), (RIGHT, RIGHT)),
        "pixel_weight": FULL[None],
        "is_known": jnp.ones((1, 2, 2), bool),
        "query_instances": jnp.eye(2, dtype=bool)[None],
        "slot_targets": jnp.array([[[0, -1], [1, -1]]], jnp.int32),
        "is_amodal": jnp.array([[False, True]]),
        "query_mask": jnp.ones((1, 2), bool),
        "labels": {"category": jnp.array([[0, 1]], jnp.int32)},
        "boxes": jnp.array([[[0, 0, 1, 1], [0.5, 0, 1, 1]]], jnp.float32),
    } | changes
    for name in ("masks", "pixel_weight"):
        batch[name] = batch[name] * 255
    return Batch._make([None] * len(Batch._fields))._replace(**batch)


REQUESTED = LossConfig(supervise="requested")


def targets(config: LossConfig | None = None, head: str = "linear", **changes) -> Targets:
    """The targets of `make_batch`."""
    return make_targets(make_batch(**changes), config or LossConfig(), head=head)


def losses(decoder: DecoderOutput, truth: Targets):
    """Losses of the fused masks."""
    return query_losses(decoder, PIXELS, truth, LossConfig(), threshold=0)


RIGHT_ANSWER = [(LEFT, FULL), (RIGHT, RIGHT)]


def softplus(x: float) -> float:
    return np.log1p(np.exp(x))


# Single masks.


def test_dice_by_hand():
    target = mask("##", "..")
    flat = jnp.zeros((2, 2))  # probability 1/2 everywhere: overlap 1, sizes 2 + 2
    assert dice_loss(flat, target, jnp.ones((2, 2))) == pytest.approx(1 - 3 / 5)
    weight = mask("##", "#.")  # overlap 1, sizes 1.5 + 2
    assert dice_loss(flat, target, weight) == pytest.approx(1 - 3 / 4.5)
    assert dice_loss(logits(target)[0], target, jnp.ones((2, 2))) == pytest.approx(0, abs=1e-6)


def test_dice_of_an_empty_target_is_zero_and_has_no_gradient():
    def loss(x):
        return dice_loss(x, jnp.zeros((2, 2)), jnp.ones((2, 2)))

    value, gradient = jax.value_and_grad(loss)(jnp.ones((2, 2)))
    assert value == 0 and not gradient.any()


def test_pixel_mean_leaves_out_cells_without_weight():
    assert pixel_mean(mask("##", ".."), mask("#.", "#.")) == 0.5
    assert pixel_mean(mask("##", ".."), jnp.zeros((2, 2))) == 0


def test_named_pairs_by_hand():
    flat, target, weight = jnp.zeros((2, 2)), mask("##", ".."), jnp.ones((2, 2))
    mask2former = mask_loss(flat, target, weight, "mask2former")
    assert mask2former == pytest.approx(5 * LN2 + 5 * 0.4, rel=1e-5)
    lisa = mask_loss(flat, target, weight, "lisa")
    assert lisa == pytest.approx(2 * LN2 + 0.5 * 0.4, rel=1e-5)
    # alpha 0.25 on the object, 0.75 beside it, gamma 2
    focal = (2 * 0.25 + 2 * 0.75) / 4 * 0.5**2 * LN2
    sam = mask_loss(flat, target, weight, "sam")
    assert sam == pytest.approx(20 * focal + 0.4, rel=1e-5)


def test_mask_iou_thresholds_both():
    assert mask_iou(logits(LEFT)[0], TOP, FULL, 0) == pytest.approx(4 / 12)
    assert mask_iou(logits(EMPTY)[0], 0.4 * LEFT, FULL, 0) == 1
    assert mask_iou(logits(LEFT)[0], EMPTY, FULL, 0) == 0
    assert mask_iou(logits(LEFT)[0], FULL, FULL, -100) == 1
    # Padding does not count.
    assert mask_iou(logits(FULL)[0], LEFT, LEFT, 0) == 1
    assert mask_iou(logits(FULL)[0], EMPTY, EMPTY, 0) == 1


# Queries: two of them about one image with two instances.


def test_right_answers_cost_nothing():
    decoder = tokens(RIGHT_ANSWER, iou=1.0, presence=20.0)
    parts = losses(decoder, targets())
    parts["aux"] = aux_loss(decoder, PIXELS, targets(), LossConfig())
    assert all(value == pytest.approx(0, abs=1e-4) for value in parts.values()), parts


def test_the_target_of_a_query_is_the_union_of_its_instances():
    truth = targets(query_instances=jnp.array([[[True, True], [False, False]]])).queries
    assert (truth.masks[0, 0] == 1).all() and not truth.masks[0, 1].any()


def test_masks_of_all_sizes_weigh_alike():
    tiny = EMPTY.at[0, 0].set(1.0)
    truth = targets(masks=pairs((tiny, tiny), (RIGHT, RIGHT)))
    both = losses(tokens([(EMPTY, EMPTY)] * 2), truth)["modal"]
    single = [mask_loss(logits(EMPTY)[0], m, FULL, "mask2former") for m in (tiny, RIGHT)]
    assert both == pytest.approx(float(single[0] + single[1]) / 2, rel=1e-5)


def test_padded_queries_and_cells_do_not_count():
    truth = targets(query_mask=jnp.array([[True, False]]))
    one = tokens([RIGHT_ANSWER[0], (EMPTY, FULL)])
    other = tokens([RIGHT_ANSWER[0], (TOP, TOP)])
    assert losses(one, truth) == losses(other, truth)

    left_half = targets(pixel_weight=LEFT[None])
    modal = losses(tokens([(FULL, FULL), (EMPTY, EMPTY)]), left_half)["modal"]
    assert modal == pytest.approx(0, abs=1e-5)

    nothing = losses(one, targets(query_mask=jnp.zeros((1, 2), bool)))
    assert all(value == 0 for value in nothing.values())


def taught_masks(truth: Targets):
    """Which masks [query, type] the mask losses push at. Logits are moderate, so that nothing
    saturates."""
    rng = np.random.default_rng(0)
    decoder = tokens([(EMPTY, EMPTY)] * 2)
    weights = jnp.asarray(rng.normal(size=decoder.kernels.weights.shape), jnp.float32)
    weights = weights.at[:, :, :, 1].add(1.0)

    def loss(weights):
        kernels = decoder.kernels._replace(weights=weights)
        parts = losses(decoder._replace(kernels=kernels), truth)
        return parts["modal"] + parts["amodal"]

    return (np.abs(jax.grad(loss)(weights))[0, :, 0].max(-1) > 1e-6).tolist()


def test_both_masks_are_supervised_on_every_query():
    assert taught_masks(targets()) == [[True, True], [True, True]]


def test_requested_supervises_only_the_mask_that_the_query_asks_for():
    # The second query asks for the amodal mask, which is the larger of modal and completing logits.
    truth = targets(REQUESTED, query_mask=jnp.array([[True, False]]))
    assert taught_masks(truth) == [[True, False], [False, False]]
    parts = losses(tokens([(LEFT, EMPTY), (EMPTY, RIGHT)]), targets(REQUESTED))
    assert parts["modal"] == pytest.approx(0, abs=1e-5)
    assert parts["amodal"] == pytest.approx(0, abs=1e-5)


def test_an_unknown_amodal_mask_is_skipped():
    truth = targets(is_known=HALF_KNOWN)
    assert taught_masks(truth) == [[True, False], [True, True]]
    parts = losses(tokens([(LEFT, LEFT), (RIGHT, RIGHT)], iou=1.0), truth)
    assert parts["amodal"] == pytest.approx(0, abs=1e-5)
    assert parts["iou"] == pytest.approx(0, abs=1e-5)


def test_without_a_head_the_modal_mask_learns_the_requested_one():
    modal = losses(tokens([(LEFT, EMPTY), (RIGHT, EMPTY)]), targets(head="none"))["modal"]
    assert modal == pytest.approx(0, abs=1e-5)
    truth = targets(head="none", is_amodal=jnp.array([[True, True]]))
    modal = losses(tokens([(FULL, EMPTY), (RIGHT, EMPTY)]), truth)["modal"]
    assert modal == pytest.approx(0, abs=1e-5)
    assert taught_masks(targets(head="none")) == [[True, False], [True, False]]


def test_every_member_of_the_type_head_learns_alone():
    member_logits = jnp.array([[[1.0, 3.0, 50.0]], [[-2.0, 4.0, 50.0]]])
    truth = targets(
        type_is_amodal=jnp.array([[False, True, False]]),
        type_valid=jnp.array([[True, True, False]]),
    )
    values = type_loss(member_logits, truth.type_is_amodal, LossConfig(type_smoothing=0))
    alone = [softplus(1.0) + softplus(-3.0), softplus(-2.0) + softplus(-4.0)]
    assert weighted_sum(values, truth.type_weight) == pytest.approx(sum(alone) / 4, rel=1e-5)


def test_presence_is_a_cross_entropy():
    truth = targets(query_instances=jnp.array([[[True, False], [False, False]]]))
    presence = losses(tokens(RIGHT_ANSWER, presence=1.0), truth)["presence"]
    assert presence == pytest.approx((softplus(-1.0) + softplus(1.0)) / 2, rel=1e-5)


def test_the_iou_loss_teaches_the_prediction_and_not_the_masks():
    decoder = tokens([(TOP, FULL), (RIGHT, RIGHT)], iou=0.5)  # IoUs 1/3, 1, 1, 1

    def loss(kernels):
        return losses(decoder._replace(kernels=kernels), targets())["iou"]

    expected = ((0.5 - 1 / 3) ** 2 + 3 * 0.5**2) / 4
    assert loss(decoder.kernels) == pytest.approx(expected, rel=1e-4)
    gradient = jax.grad(loss)(decoder.kernels)
    assert not gradient.weights.any() and not gradient.biases.any()


def test_the_iou_loss_compares_with_refined_masks():
    first = tokens([(TOP, FULL), (RIGHT, RIGHT)], iou=1.0)
    assert losses(first, targets())["iou"] == pytest.approx((2 / 3) ** 2 / 4, rel=1e-4)
    refined = first._replace(refined_kernels=tokens(RIGHT_ANSWER).kernels)
    assert losses(refined, targets())["iou"] == pytest.approx(0, abs=1e-6)


# Pixels and instances.


def test_dense_losses_vanish_for_right_answers():
    # Four cells of 2 x 2; categories 0 (left) and 1 (right) have the embeddings of a unit basis.
    names = {"category": 20.0 * jnp.eye(2)}
    left = jnp.array([[1.0, 0.0], [1.0, 0.0]])
    visible = 20.0 * jnp.stack([left, 1 - left], -1)
    hidden = jnp.stack([1 - left, jnp.zeros((2, 2))], -1) * 2 - 1  # instance 0, behind instance 1
    centre = jnp.array([0.25, 0.75])
    x, y = jnp.meshgrid(centre, centre, indexing="xy")
    x0 = jnp.where(left > 0, 0.0, 0.5)
    box = jnp.stack([x0 - x, -y, 1 - x, 1 - y], -1)

    output = DenseOutput(visible[None], 20.0 * hidden[None], box[None])
    parts = dense_losses(output, names, targets().pixels)
    assert all(value == pytest.approx(0, abs=1e-3) for value in parts.values()), parts

    output = DenseOutput(visible[None, :, ::-1], 20.0 * hidden[None, :, ::-1], box[None] + 0.5)
    parts = dense_losses(output, names, targets().pixels)
    assert all(value > 0.5 for value in parts.values()), parts
    assert parts["dense_box"] == pytest.approx(4 * 0.5)


def test_dense_losses_ignore_padding():
    rng = np.random.default_rng(0)
    output = [jnp.asarray(rng.normal(size=(1, 2, 2, c)), jnp.float32) for c in (2, 2, 4)]
    changed_on_padding = [x.at[:, :, 1].add(3) for x in output]
    truth, names = targets(pixel_weight=LEFT[None]).pixels, {"category": jnp.eye(2)}
    one = dense_losses(DenseOutput(*output), names, truth)
    other = dense_losses(DenseOutput(*changed_on_padding), names, truth)
    assert all(one[name] == pytest.approx(float(other[name])) for name in one)


def test_unknown_labels_are_left_out():
    truth = targets(labels={"category": jnp.array([[-1, -1]], jnp.int32)}).pixels
    output = DenseOutput(jnp.ones((1, 2, 2, 2)), jnp.ones((1, 2, 2, 2)), jnp.zeros((1, 2, 2, 4)))
    assert dense_losses(output, {"category": jnp.eye(2)}, truth)["dense_category"] == 0


def test_that_nothing_is_hidden_is_not_taught_where_a_complete_shape_is_unknown():
    """Instance 0 has category 0, instance 1 category 1."""
    truth = targets(is_known=HALF_KNOWN).pixels
    names, plain = {"category": jnp.eye(2)}, jnp.zeros((1, 2, 2, 2))

    def loss(hidden):
        output = DenseOutput(plain, hidden, jnp.zeros((1, 2, 2, 4)))
        return dense_losses(output, names, truth)["dense_hidden"]

    gradient = jax.grad(loss)(plain)
    assert not gradient[..., 0].any() and gradient[..., 1].all()


def test_instance_loss_asks_for_each_instance_by_itself():
    kernels = kernels_of([RIGHT_ANSWER])

    def loss(weights, truth=None):
        changed = kernels._replace(weights=weights)
        return instance_loss(changed, PIXELS, truth or targets(), LossConfig())

    weights = kernels.weights
    assert loss(weights) == pytest.approx(0, abs=1e-5)
    assert loss(weights[:, :, ::-1]) > 5

    # An instance that is not there, or whose complete shape is unknown, asks for nothing.
    absent = targets(masks=pairs((LEFT, FULL), (EMPTY, EMPTY)))
    assert loss(weights.at[:, :, 1].multiply(-1), absent) == pytest.approx(0, abs=1e-5)
    unknown = targets(is_known=HALF_KNOWN)
    assert loss(weights.at[:, :, 0, 1].multiply(-1), unknown) == pytest.approx(0, abs=1e-5)


# Sums.


def test_the_total_is_the_weighted_sum():
    names = (
        "modal amodal type presence slot_presence slots iou slot_iou dense_a dense_b aux instance"
    )
    parts = {name: jnp.array(float(10**i)) for i, name in enumerate(names.split())}
    config = LossConfig(type=2, presence=3, slots=4, iou=5, dense=6, aux=7, instance=8)
    expected = 1 + 10 + 200 + 3 * 11000 + 4e5 + 5 * 11e6 + 6 * 11e8 + 7e10 + 8e11
    weights = loss_weights(config, ["a", "b"])
    assert total_loss(parts, weights) == pytest.approx(expected)
    with pytest.raises(KeyError, match="new"):  # it would be logged and never trained
        total_loss(parts | {"new": jnp.ones(())}, weights)


def test_losses_of_parts_add_up_to_the_mean_of_the_batch():
    two_images = jax.tree.map(lambda x: jnp.concatenate([x, x]), make_batch())
    query_mask = jnp.array([[True, False], [True, True]])
    truth = make_targets(two_images._replace(query_mask=query_mask), LossConfig(), head="linear")
    decoder = tokens([(TOP, FULL), (TOP, TOP)], iou=0.7)

    def loss_of(image: int):
        return losses(decoder, jax.tree.map(lambda x: x[image : image + 1], truth))

    whole = [
        mask_loss(logits(TOP)[0], target, FULL, "mask2former") for target in (LEFT, LEFT, RIGHT)
    ]
    total = loss_of(0)["modal"] + loss_of(1)["modal"]
    assert total == pytest.approx(float(sum(whole)) / 3, rel=1e-5)
