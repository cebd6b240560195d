import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from listed_source import ListedSource
from PIL import Image
from sample_records import to_records

from r2sm_jax import evaluate
from r2sm_jax.config import DataConfig
from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Instance, Sample, Source
from r2sm_jax.data.images import Letterbox
from r2sm_jax.data.sources import open_source
from r2sm_jax.evaluate import decide, main, score_source
from r2sm_jax.evaluation.predictions import score_predictions
from r2sm_jax.evaluation.report import split_figures
from r2sm_jax.evaluation.scorer import score, truths_at
from r2sm_jax.evaluation.tables import first_of_images, panels
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.inference.run import load
from r2sm_jax.query import MaskType, Query, Sentence
from r2sm_jax.synthetic.queries.sentences import intent_sentences
from r2sm_jax.synthetic.scenes.source import SceneSource
from r2sm_jax.tools.convert import write_json


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """Twelve scenes of two sizes as a dataset file with its images."""
    folder = tmp_path_factory.mktemp("dataset")
    samples = [
        replace(SceneSource("val", 12, size=40 + 24 * (i % 2))[i], image_id=i + 1)
        for i in range(12)
    ]
    for sample in samples:
        Image.fromarray(sample.image).save(folder / sample.file_name)
    write_json(folder / "scenes.json", to_records(samples))
    return folder / "scenes.json"


@pytest.fixture(scope="module")
def predictor(tiny_run):
    return load(tiny_run).predictor


def test_a_run_is_evaluated_again_to_the_same_report(tiny_run, command, tmp_path):
    end = command(main, tiny_run, "--out", tmp_path)
    assert end.code == 0 and "val_phrasing" in end.out and "val_hard" in end.out
    again, first = (json.loads((f / "report.json").read_text()) for f in (tmp_path, tiny_run))
    assert again["splits"] == first["splits"] and again["sentences"] == first["sentences"]
    figures = again["sentences"]["val_r2sm"]
    assert figures["queries"] == len(intent_sentences("val_r2sm")) and 0 <= figures["ece"] <= 1
    assert all(
        f"| {name} |" in (tmp_path / "report.md").read_text()
        for name in ("val_r2sm", "keyword rule")
    )
    assert (tmp_path / "report.md").read_text().startswith("# R2SM evaluation")


@pytest.mark.parametrize("head", ["oracle", "always_modal", "none"])
def test_sentences_are_decided_by_rules_or_not_at_all(head, predictor, monkeypatch):
    monkeypatch.setattr(predictor, "config", replace(predictor.config, head=head))
    asked: dict[str, MaskType] = {"the mug": "modal", "the whole mug": "amodal", "mug!": "amodal"}
    figures = decide(
        predictor, [Sentence(text, mask_type, "") for text, mask_type in asked.items()]
    )
    expected = {"oracle": (1, 1, 1), "always_modal": (1 / 3, 1, 0), "none": (None, None, None)}[
        head
    ]
    assert tuple(figures[name] for name in ("accuracy", "modal", "amodal")) == pytest.approx(
        expected
    )
    assert figures["ece"] is None and figures["keyword"] == (
        None if head == "none" else pytest.approx(2 / 3)
    )


def test_one_split_is_shown_and_not_written_unasked(tiny_run, command):
    before = (tiny_run / "report.json").read_bytes()
    end = command(main, tiny_run, "--split", "val_hard", "--samples", 1)
    assert end.code == 0 and "val_hard" in end.out and "wrote" not in end.out
    assert (tiny_run / "report.json").read_bytes() == before


def test_a_dataset_file_is_evaluated_at_its_own_resolution(tiny_run, dataset, command, tmp_path):
    end = command(main, tiny_run, "--data", f"json:{dataset}", "--split", "all", "--out", tmp_path)
    assert end.code == 0, end.err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["sentences"] == {} and report["meta"]["source"] == f"json:{dataset}"
    assert report["meta"]["images"] == {"all": 12}  # the whole file: nobody asked for a part of it
    assert (
        command(main, tiny_run, "--data", f"json:{dataset}", "--out", tmp_path / "again").code == 0
    )
    assert (
        json.loads((tmp_path / "again" / "report.json").read_text())["splits"] == report["splits"]
    )
    end = command(
        main, tiny_run, "--data", f"json:{dataset}", "--split", "train,dev,val", "--out", tmp_path
    )
    parts = json.loads((tmp_path / "report.json").read_text())
    assert (
        set(parts["splits"]) == {"train", "dev", "val"}
        and sum(parts["meta"]["images"].values()) == 12
    )


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_any_split_into_batches_gives_the_same_results(predictor, monkeypatch, rows):
    source = open_source("scenes", "val", count=5, size=48)
    whole = score_source(predictor, source)
    predict_batches = partial(predictor.predict_batches, batch_rows=rows)
    monkeypatch.setattr(predictor, "predict_batches", predict_batches)
    parts = score_source(predictor, source)
    for one, other in zip(whole.results, parts.results, strict=True):
        assert replace(one, probability=None, predicted_iou=None) == replace(
            other, probability=None, predicted_iou=None
        )
        assert one.probability == pytest.approx(other.probability, abs=1e-6)
        assert one.predicted_iou == pytest.approx(other.predicted_iou, abs=1e-6)
    assert whole.data_sha256 == parts.data_sha256
    a, b = (
        split_figures(whole.results, whole.instances),
        split_figures(parts.results, parts.instances),
    )
    assert a["all"] == b["all"] or a["all"]["ap"] == pytest.approx(b["all"]["ap"], abs=1e-6)


def programs(predictor) -> tuple[int, int]:
    return predictor._encode_image._cache_size(), predictor._decode._cache_size()


def test_nothing_is_compiled_for_other_sizes_of_images(predictor, tiny_run, command, tmp_path):
    score_source(predictor, open_source("scenes", "val", count=3, size=48))
    compiled = programs(predictor)
    for size in (31, 64, 97):
        score_source(predictor, open_source("scenes", "val", count=3, size=size))
    assert programs(predictor) == compiled
    end = command(main, tiny_run, "--split", "val", "--samples", 1, "--verbose")
    assert end.code == 0 and "programs compiled in" in end.out


class PerfectPredictor(Predictor):
    """Predicts the true masks as exactly as logits at the model's own resolution can."""

    def __init__(self, predictor: Predictor, source: Source):
        vars(self).update(vars(predictor))
        self.truths = iter([truth for i in range(len(source)) for truth in truths_at(source, i)])

    def predict_logits(self, *inputs, **options):
        size = self.config.vision.image_size
        outputs = super().predict_logits(*inputs, **options)
        for of_image in outputs:
            for number, output in enumerate(of_image):
                truth = next(self.truths)
                box = Letterbox(truth.height, truth.width, size)
                modal, amodal = (
                    box.coverage(masks.decode(rle), size) / 255.0 * 18 - 9
                    for rle in (truth.modal, truth.amodal)
                )
                of_image[number] = output._replace(modal=modal, amodal=amodal)
        return outputs


def oblong(size: tuple[int, int], count: int) -> list[Sample]:
    """Samples of one shape, each with a mask in a corner."""
    height, width = size
    samples = []
    for n in range(count):
        whole = np.zeros(size, bool)
        whole[height // 2 :, : width // 3] = True
        modal = whole.copy()
        modal[: height * 3 // 4] = False
        queries = (
            Query(2 * n + 1, "the mug", "modal", (1,)),
            Query(2 * n + 2, "the whole mug", "amodal", (1,)),
        )
        samples.append(
            Sample(
                n,
                f"{n}.png",
                np.zeros((*size, 3), np.uint8),
                (Instance(1, "mug", modal, whole),),
                queries,
            )
        )
    return samples


@pytest.mark.parametrize("size", [(60, 160), (160, 60), (31, 47)])
def test_masks_come_back_to_the_images_own_resolution_without_their_padding(predictor, size):
    """The padding is cut off before masks are enlarged; the other way round costs about half of the IoU."""

    source = ListedSource(oblong(size, 3))
    scored = score_source(PerfectPredictor(predictor, source), source)
    iou = [getattr(getattr(r, r.mask_type), r.mask_type) for r in scored.results]
    assert min(o.intersection / o.union for o in iou) > 0.93
    # The wrong order, on the same masks: enlarge the padded square to the image's size.
    square = np.zeros((max(size), max(size)), bool)
    truth = source[0].instances[0].amodal
    square[: size[0], : size[1]] = truth
    wrong = np.asarray(Image.fromarray(square).resize(size[::-1]))
    assert (wrong & truth).sum() / (wrong | truth).sum() < 0.75


def test_every_query_is_answered_once(predictor, tmp_path):
    source = open_source("scenes", "val", count=5, size=48, queries=19)
    scored = score_source(predictor, source)
    results = scored.results
    assert (
        sorted(scored.instances) == sorted(scored.drawings) == sorted(r.query_id for r in results)
    )
    assert sorted((r.image_id, r.query_id) for r in results) == sorted(
        (s.image_id, q.id) for s in map(source.__getitem__, range(5)) for q in s.queries
    )
    shown = panels(source, scored, first_of_images(scored.results, 3))
    assert len(shown) == 3 and all(len(row) == 3 for row in shown)
    (tmp_path / "none.json").write_text("[]")  # the data's hash does not depend on who is evaluated
    assert score_predictions(tmp_path / "none.json", source).data_sha256 == scored.data_sha256


def sample(**changes) -> Sample:
    """One object with an unknown amodal mask, one that is known, one region to ignore."""
    left, right, below = np.zeros((3, 8, 12), bool)
    left[:4, :6], right[:4, 6:], below[4:] = True, True, True
    instances = (Instance(1, "mug", left, None), Instance(2, "book", right, right | left))
    queries = (
        Query(1, "the mug", "modal", (1,)),
        Query(2, "the whole mug", "amodal", (1,)),
        Query(3, "both", "modal", (1, 2)),
        Query(4, "the whole book", "amodal", (2,)),
    )
    ignored = Instance(3, "crowd", below, None, ignore=True)
    return Sample(1, "a.png", np.zeros((8, 12, 3), np.uint8), (*instances, ignored), queries)


def test_queries_for_an_amodal_mask_that_nobody_knows_are_left_out():
    asked = truths_at(ListedSource([sample()]), 0)
    assert [r.query_id for r in score((truth, None) for truth in asked).results] == [1, 3, 4]


def test_the_truth_is_the_union_of_what_is_meant():
    asked = truths_at(ListedSource([sample()]), 0)
    modal, amodal = masks.decode(asked[2].modal), masks.decode(asked[2].amodal)
    assert modal[:4].all() and not modal[4:].any() and np.array_equal(modal, amodal)
    modal, amodal = masks.decode(asked[3].modal), masks.decode(asked[3].amodal)
    assert modal.sum() == 24 and amodal.sum() == 48


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--split", "valid"], ["'valid'", "val_hard"]),
        (["--data", "pigeons"], ["pigeons", "json:FILE"]),
        (["--data", "json:nowhere.json"], ["nowhere.json"]),
        (["--checkpoint", "first"], ["first", "best, latest"]),
        (["--checkpoint", "77"], ["77"]),
        (["--samples", "0"], ["--samples 0", "give 1 or more"]),
        (["--samples", "-5"], ["--samples -5", "give 1 or more"]),
    ],
)
def test_bad_arguments_are_one_sentence(arguments, words, tiny_run, refused):
    message = refused(main, tiny_run, *arguments)
    assert all(word in message for word in words), message


def test_data_are_made_as_in_training(tiny_run, monkeypatch, refused):
    run, asked = load(tiny_run), {}
    data = DataConfig(source="compose:photos.json", images="photos", cutouts="things", seed=7)
    opened = replace(run, config=replace(run.config, data=data))
    monkeypatch.setattr(evaluate, "load", lambda folder, checkpoint: opened)
    monkeypatch.setattr(
        evaluate,
        "open_dataset",
        lambda data, split, **options: asked.update(options, data=data) or ListedSource([]),
    )
    assert "there are no queries" in refused(main, tiny_run, "--split", "train", "--samples", 3)
    assert asked == {"data": data, "image_size": 32, "count": 3}


def test_a_report_that_cannot_be_written_is_one_sentence(tiny_run, tmp_path, refused):
    (tmp_path / "file").write_text("")
    message = refused(
        main, tiny_run, "--split", "val", "--samples", 1, "--out", tmp_path / "file" / "out"
    )
    assert "cannot write there" in message


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path, refused):
    assert "no such run folder" in refused(main, tmp_path / "nowhere")
