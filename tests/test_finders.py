"""Finders of others: what of their answers a sentence chooses, and detectors of transformers with
random weights from the folder to the mask."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import BOX, MUG, SIZE, rectangle
from PIL import Image
from stub_predictor import StubCompleter, StubOutliner, StubPredictor

import r2sm_jax
from r2sm_jax import predict
from r2sm_jax.config import DataConfig
from r2sm_jax.data import masks
from r2sm_jax.data.dataset import truth_of_sample
from r2sm_jax.data.letterbox import Letterbox
from r2sm_jax.errors import InputError
from r2sm_jax.evaluation.completion import iou
from r2sm_jax.evaluation.scorer import truths_of_image
from r2sm_jax.finders import Finder, from_transformers
from r2sm_jax.inference.choose import choose, find_objects
from r2sm_jax.inference.crop_models import Outline
from r2sm_jax.inference.decision import Decision
from r2sm_jax.inference.parts import Drawn, Parts
from r2sm_jax.inference.postprocess import at_place
from r2sm_jax.inference.prompts import Request
from r2sm_jax.models.r2sm import R2SMOutput
from r2sm_jax.sources import open_split

MUG_BOX, BOX_BOX = [10.0, 10, 30, 40], [30.0, 20, 60, 50]
PHOTO = np.random.default_rng(0).integers(0, 255, (*SIZE, 3), np.uint8)


class ListedFinder:
    """Gives the same answer for every name, and remembers what it was asked."""

    def __init__(self, **answer):
        self.answer = answer
        self.asked: list[list[str]] = []

    def __call__(self, image, names):
        assert image.shape == (*SIZE, 3)
        self.asked.append(names)
        return [self.answer] * len(names)


@pytest.fixture
def predictor() -> StubPredictor:
    stub = StubPredictor()
    stub.parts = Parts(StubCompleter(), StubOutliner())
    stub.set_image(PHOTO)
    return stub


# Through the predictor.


def test_a_finder_is_asked_once_for_each_name_and_never_about_places(predictor):
    finder = ListedFinder(boxes=[MUG_BOX], scores=[0.9])
    queries = ["the mug", "the mug", "the book", "the cat"]
    found = predictor.predict(queries, boxes=[None, None, None, BOX_BOX], finder=finder)
    assert finder.asked == [["the mug", "the book"]]
    for prediction, mask in zip(found, [MUG, MUG, MUG, BOX], strict=True):
        np.testing.assert_array_equal(prediction.modal, mask)
    predictor.predict(["the cat"], boxes=[BOX_BOX], finder=finder)
    assert len(finder.asked) == 1


def test_a_name_is_the_target_where_the_model_knows_it(predictor, monkeypatch):
    monkeypatch.setattr(predictor, "targets", lambda texts: ["the mug", None])
    finder = ListedFinder(boxes=[], scores=[])
    predictor.predict(["the mug behind the jug", "what is hot"], finder=finder)
    assert finder.asked == [["the mug", "what is hot"]]


@pytest.mark.parametrize("mask_type", ["modal", "amodal"])
def test_a_box_is_outlined_and_a_mask_is_taken_as_it_is(mask_type, predictor):
    boxes = ListedFinder(boxes=np.array([MUG_BOX], np.float32), scores=np.array([0.5]))
    (outlined,) = predictor.predict(["a mug"], mask_type=mask_type, finder=boxes)
    given = ListedFinder(masks=MUG[None], scores=[0.5])
    (taken,) = predictor.predict(["a mug"], mask_type=mask_type, finder=given)
    for prediction in (outlined, taken):
        np.testing.assert_array_equal(prediction.mask, MUG)
        assert prediction.presence == 0.75 and prediction.hidden_probability == 0.25
        (instance,) = prediction.instances
        assert instance.presence == 0.75
    assert outlined.score == pytest.approx(0.625 * (0.9 if mask_type == "amodal" else 1))
    assert taken.score == (0.9 if mask_type == "amodal" else None)
    for prediction in (outlined, taken):
        assert not prediction.is_given and "presence 0.75" in prediction.summary()
    # A presence is no predicted IoU.
    fused, *_ = taken.to_coco()
    assert fused["score"] == taken.score


def test_an_answer_is_unsure_if_one_of_its_objects_is():
    right, wrong = (Drawn(Outline(MUG, iou, unsure_below=0.6), None) for iou in (0.9, 0.5))
    for drawn, is_unsure in (([right, right], False), ([right, wrong], True)):
        answer = at_place(Request("both mugs"), Decision("modal", 0.1), drawn, SIZE)
        assert answer.score > 0.6 and answer.is_unsure == is_unsure


def test_what_is_found_is_the_neighbour_of_what_is_meant(predictor):
    finder = ListedFinder(masks=[MUG, BOX], scores=[0.9, 0.3])
    (prediction,) = predictor.predict(["the left mug"], finder=finder)
    np.testing.assert_array_equal(prediction.modal, MUG)
    np.testing.assert_array_equal(predictor.parts.completer.all_visible, MUG | BOX)
    far = rectangle(70, 0, 80, 10)
    predictor.predict(["the left mug"], finder=finder, others=[far])
    np.testing.assert_array_equal(predictor.parts.completer.all_visible, MUG | BOX | far)
    # What lies beside a thing that was found alone is not known.
    predictor.predict(["the mug"], finder=ListedFinder(masks=[MUG], scores=[0.9]))
    assert predictor.parts.completer.all_visible is None


def test_nothing_found_is_absent(predictor):
    for answer in ({"boxes": []}, {"boxes": np.zeros((0, 4))}, {"masks": np.zeros((0, *SIZE))}):
        (prediction,) = predictor.predict(["a mug"], finder=ListedFinder(**answer, scores=[]))
        assert prediction.is_absent and prediction.presence == 0
        assert "absent" in prediction.summary() and not prediction.amodal.any()
        assert prediction.to_coco()[0]["score"] == 0


def test_what_is_found_outside_twice_or_empty_is_left_out():
    boxes = [BOX_BOX, [-10, -10, 0, 5], [31, 20, 60, 50], [50, 50, 90, 70], [5, 5, 5, 9]]
    finder = ListedFinder(boxes=boxes, scores=[0.4, 0.9, 0.8, 0.3, 0.7])
    found = find_objects(finder, PHOTO, ["mug"], Parts(outliner=StubOutliner()))["mug"]
    assert [outline.presence for outline in found] == [0.9, 0.65]
    np.testing.assert_array_equal(found[0].mask, rectangle(31, 20, 60, 50))
    np.testing.assert_array_equal(found[1].mask, rectangle(50, 50, 80, 60))
    with pytest.raises(InputError, match="no outliner"):
        find_objects(finder, PHOTO, ["mug"], Parts())
    empty = ListedFinder(masks=[np.zeros(SIZE), MUG], scores=[0.9, 0.4])
    (outline,) = find_objects(empty, PHOTO, ["mug"], Parts())["mug"]
    assert outline.is_given and outline.presence == 0.7


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([], "0 answers for 1 names"),
        ([{"boxes": [MUG_BOX]}], "of 'the mug' cannot be used .'scores'"),
        ([{"scores": [0.5]}], "'boxes'"),
        ([{"boxes": [MUG_BOX, BOX_BOX], "scores": [0.5]}], "of 'the mug' cannot be used"),
        ([{"boxes": [MUG_BOX[:3]], "scores": [0.5]}], "of 'the mug' cannot be used"),
        ([{"boxes": [[0.1, 0.1, 0.3, 0.4]], "scores": [0.5]}], "shares of the image's size"),
        ([{"masks": [MUG[:9]], "scores": [0.5]}], "'the mug' of the finder cannot be used"),
        ([[MUG_BOX]], "of 'the mug' cannot be used"),
    ],
)
def test_answers_of_another_kind_are_refused(answers, message, predictor):
    with pytest.raises(InputError, match=message):
        predictor.predict(["the mug"], finder=lambda image, names: answers)


# Choosing.


def decoded(modal: np.ndarray, slots: tuple[float, ...] = (3, -3)) -> R2SMOutput:
    """An answer of the decoder: its probability on a grid of cells, and the logits of its slots."""
    logits = np.broadcast_to(modal, (1 + len(slots), 2, *modal.shape))
    presence = np.array([2.0, *slots])
    return R2SMOutput(np.zeros(()), logits, presence, np.zeros((1 + len(slots), 2)))


def test_words_of_place_and_size_choose():
    near, far, small = rectangle(0, 40, 30, 60), rectangle(40, 0, 60, 20), rectangle(70, 30, 75, 35)
    found = [Outline(mask, 0.8, presence=0.9) for mask in (near, far, small)]
    blind = decoded(np.full((8, 8), -9.0))
    letterbox = Letterbox(*SIZE, 80)
    for chosen, sentences in (
        (0, ["the left mug", "the mug at the bottom", "the larger mug", "the mug right there"]),
        (1, ["the highest mug", "the topmost one"]),
        (2, ["the mug furthest to the right", "the smallest mug", "the RIGHTMOST mug, whole"]),
    ):
        for text in sentences:
            (outline,) = choose(found, text, blind, letterbox)
            assert outline is found[chosen], text


def test_the_decoders_own_mask_and_the_finders_score_choose():
    found = [Outline(MUG, 0.8, presence=0.8), Outline(BOX, 0.8, presence=0.7)]
    letterbox = Letterbox(*SIZE, 80)
    on_box = np.full((80, 80), -9.0)
    on_box[20:50, 30:60] = 2
    assert choose(found, "the mug", decoded(on_box), letterbox) == (found[1],)
    assert choose(found, "the mug", decoded(np.full((80, 80), -9.0)), letterbox) == (found[0],)
    assert choose([], "the mug", decoded(on_box), letterbox) == ()


def test_several_are_joined_where_several_are_meant(predictor, monkeypatch):
    doubtful = rectangle(70, 0, 80, 10)
    found = [
        Outline(MUG, 0.8, presence=0.9),
        Outline(BOX, 0.8, presence=0.8),
        Outline(doubtful, 0.8, presence=0.55),
    ]
    both = np.full((80, 80), -9.0)
    both[:, :60] = 2
    chosen = choose(found, "both mugs", decoded(both, (3, 1)), Letterbox(*SIZE, 80))
    assert [outline.presence for outline in chosen] == [0.9, 0.8]

    decode = predictor._decode

    def decode_several(*inputs):
        output = decode(*inputs)
        output.presence[..., 1:] = 3.0
        return output

    monkeypatch.setattr(predictor, "_decode", decode_several)
    finder = ListedFinder(masks=[BOX, MUG], scores=[0.8, 0.9])
    (prediction,) = predictor.predict(["both mugs"], finder=finder)
    np.testing.assert_array_equal(prediction.modal, MUG | BOX)
    for instance, mask in zip(prediction.instances, (MUG, BOX), strict=True):
        np.testing.assert_array_equal(instance.mask, mask)


# Detectors of transformers.


def clip_tokenizer(max_tokens: int) -> Any:
    """A tokenizer of letters."""
    import transformers

    letters = "abcdefghijklmnopqrstuvwxyz"
    ends = [f"{letter}</w>" for letter in letters]
    pieces = ["<pad>", "<|startoftext|>", "<|endoftext|>", *letters, *ends]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=max_tokens)


IDS = {"vocab_size": 55, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LAYER = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def save_owlv2(folder: Path) -> None:
    """A tiny OWLv2 with random weights."""
    import transformers
    from transformers.models.owlv2.image_processing_pil_owlv2 import Owlv2ImageProcessorPil

    images = Owlv2ImageProcessorPil(size={"height": 64, "width": 64})
    transformers.Owlv2Processor(images, clip_tokenizer(16)).save_pretrained(folder)
    tower = LAYER | {"hidden_size": 16}
    config = transformers.Owlv2Config(
        text_config=tower | IDS,
        vision_config=tower | {"image_size": 64, "patch_size": 16},
        projection_dim=16,
    )
    model = transformers.Owlv2ForObjectDetection(config)
    model.class_head.logit_shift.bias.data.fill_(1.0)  # so that it finds something
    model.save_pretrained(folder)


def save_sam3(folder: Path) -> None:
    """A tiny SAM 3 with random weights."""
    import transformers

    images = transformers.Sam3ImageProcessor(size={"height": 56, "width": 56})
    transformers.Sam3Processor(images, clip_tokenizer(32)).save_pretrained(folder)
    small = {"hidden_size": 32, "num_attention_heads": 2}
    layer = small | {"num_layers": 1, "intermediate_size": 32}
    backbone = {
        "model_type": "sam3_vit_model",
        "image_size": 56,
        "pretrain_image_size": 28,
        "window_size": 2,
        "global_attn_indexes": [0],
        "hidden_size": 32,
    }
    config = transformers.Sam3Config(
        vision_config={
            "backbone_config": backbone | LAYER,
            "fpn_hidden_size": 32,
            "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        },
        text_config=LAYER | IDS | {"hidden_size": 32, "projection_dim": 32},
        geometry_encoder_config=layer,
        detr_encoder_config=layer,
        detr_decoder_config=layer | {"num_queries": 5},
        mask_decoder_config=small,
    )
    transformers.Sam3Model(config).save_pretrained(folder)


def save_grounding_dino(folder: Path) -> None:
    """A tiny Grounding DINO with random weights."""
    import transformers
    from transformers.models.grounding_dino.image_processing_pil_grounding_dino import (
        GroundingDinoImageProcessorPil,
    )

    words = "[PAD] [UNK] [CLS] [SEP] [MASK] . the red mug".split()
    tokenizer = transformers.BertTokenizer(vocab={word: n for n, word in enumerate(words)})
    images = GroundingDinoImageProcessorPil(size={"shortest_edge": 64, "longest_edge": 96})
    transformers.GroundingDinoProcessor(images, tokenizer).save_pretrained(folder)
    backbone = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        out_features=["stage2", "stage3", "stage4"],
    )
    text = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    config = transformers.GroundingDinoConfig(
        backbone_config=backbone,
        text_config=text,
        num_queries=8,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
    )
    transformers.GroundingDinoForObjectDetection(config).save_pretrained(folder)


@pytest.fixture(scope="module", params=[save_owlv2, save_grounding_dino])
def detector(request, tmp_path_factory) -> Path:
    torch = pytest.importorskip("torch", reason="a finder needs torch: pip install '.[finder]'")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param.__name__)
    request.param(folder)
    return folder


def test_a_detector_of_transformers_finds_the_whole_way(
    detector, predictor, tmp_path, command, monkeypatch
):
    finder = r2sm_jax.__getattr__("finders").from_transformers(detector)
    assert isinstance(finder, Finder)
    names = ["the red mug", "Mr. Smith's mug, " + "or any other of that kind " * 9]
    answers = finder(PHOTO, names)
    assert len(answers) == 2
    for answer in answers:
        boxes, scores = answer["boxes"], answer["scores"]
        assert boxes.shape == (len(scores), 4) and len(scores) and 0.1 < scores.min() <= 1
        assert boxes.max() > 2  # pixels
    (alone,) = finder(PHOTO, names[1:])
    np.testing.assert_array_equal(alone["boxes"], answers[1]["boxes"])

    (prediction,) = predictor.predict(["the red mug"], finder=finder)
    assert prediction.modal.any() and prediction.instances and prediction.presence > 0.5

    monkeypatch.setattr(predict, "load_run", lambda *_, **__: SimpleNamespace(predictor=predictor))
    Image.fromarray(PHOTO).save(tmp_path / "photo.png")
    flags = "--finder", detector
    end = command(predict.main, "RUN", tmp_path / "photo.png", "the red mug", *flags, "--json")
    np.testing.assert_array_equal(masks.decode(json.loads(end.out)["modal"]), prediction.modal)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photo.png").rename(tmp_path / "photos" / "photo.png")
    out = tmp_path / "out"
    end = command(predict.main, "RUN", tmp_path / "photos", "the red mug", *flags, "--out", out)
    assert end.code == 0, end
    (fused, *_) = json.loads((out / "predictions.json").read_text())
    np.testing.assert_array_equal(masks.decode(fused["modal"]), prediction.modal)


def test_sam_3_gives_masks(tmp_path):
    pytest.importorskip("torchvision", reason="the images of SAM 3 need torchvision")
    save_sam3(tmp_path)
    answers = from_transformers(tmp_path)(PHOTO, ["the mug", "the book"])
    assert len(answers) == 2
    for answer in answers:
        assert answer["masks"].shape == (len(answer["scores"]), *SIZE)
        assert answer["masks"].dtype == bool


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be used as a finder"), ({"model_type": "bert"}, "zero-shot detector")],
)
def test_what_is_no_detector_is_refused(content, message, tmp_path):
    pytest.importorskip("torch", reason="a finder needs torch: pip install '.[finder]'")
    folder = tmp_path / "model"
    if content is not None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=message):
        from_transformers(folder)


def test_a_finder_beside_a_place_is_refused(refused, tmp_path):
    flags = "--finder", "some/model", "--box", 1, 1, 9, 9
    assert "--finder" in refused(predict.main, "RUN", tmp_path / "photo.png", "a mug", *flags)


# With a finder that is right.


@pytest.mark.slow
def test_true_boxes_of_the_class_give_most_of_the_giou():
    """gIoU of the released model on composed photos, if a finder gives the true boxes of the class
    that is meant. Run with -s, it prints the figures of docs/results.md."""
    photos = Path(os.environ.get("R2SM_REAL_DATA", "no-real-data"), "photos_coco")
    if not photos.exists():
        pytest.skip(f"there is no {photos} (set R2SM_REAL_DATA)")
    spec, images = f"compose:{photos / 'instances.json'}", photos / "images"
    data = DataConfig(source=spec, images=str(images))
    source = open_split(data, "val", count=None, size=448)
    predictor = r2sm_jax.load("photos-small")
    ious: dict[str, list[float]] = {"only": [], "one of several": [], "several": []}
    for index in range(len(source)):
        sample = source[index]
        truths = truths_of_image(truth_of_sample(sample), index)
        truths = [truth for truth in truths if truth.instances and not truth.left_out]
        texts = [truth.query.text for truth in truths]
        names = [name or text for name, text in zip(predictor.targets(texts), texts, strict=True)]
        boxes, by_name = {}, {}
        for name, truth in zip(names, truths, strict=True):
            classes = {target.category for target in truth.instances}
            objects = [i for i in sample.instances if i.category in classes and not i.ignore]
            boxes[truth.query.text] = [masks.box(i.modal) for i in objects]
            by_name[name] = boxes[truth.query.text]

        def find(image, names, boxes=by_name):
            return [{"boxes": boxes[name], "scores": np.ones(len(boxes[name]))} for name in names]

        found = predictor.predict(texts, image=sample.image, finder=find)
        for truth, prediction in zip(truths, found, strict=True):
            kind = "only" if len(boxes[truth.query.text]) == 1 else "one of several"
            if len(truth.instances) > 1:
                kind = "several"
            ious[kind].append(iou(prediction.mask, masks.decode(truth.requested)))
    figures = {kind: np.mean(values) for kind, values in ious.items()}
    giou = np.mean(np.concatenate(list(ious.values())))
    print(f"gIoU {giou:.3f}", {kind: (len(ious[kind]), round(figures[kind], 3)) for kind in ious})
    # Since 29 November half of the sentences choose one of several: .747 in place of .789.
    assert giou > 0.73 and figures["one of several"] > 0.6 and figures["several"] > 0.75
