"""The evaluate command on a run, and the masks that it scores."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from listed_source import ListedSource
from PIL import Image
from sample_records import to_records

from r2sm_jax import evaluate
from r2sm_jax.config import DataConfig
from r2sm_jax.data import masks
from r2sm_jax.data.dataset import Instance, Sample, Source, write_records
from r2sm_jax.data.letterbox import Letterbox
from r2sm_jax.errors import InputError
from r2sm_jax.evaluate import main
from r2sm_jax.evaluation import evaluator
from r2sm_jax.evaluation.counts import overlap_of_both, requested
from r2sm_jax.evaluation.evaluator import evaluate_sentences, evaluate_source
from r2sm_jax.evaluation.iou import lisa_iou
from r2sm_jax.evaluation.predictions import score_predictions
from r2sm_jax.evaluation.scorer import EvalResults, query_truths
from r2sm_jax.inference import load as loading
from r2sm_jax.inference.load import load_run
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.query import Query, Sentence
from r2sm_jax.sources import open_split
from r2sm_jax.synthetic.queries.sentences import intent_sentences


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """Six scenes of two sizes as a dataset file with its images."""
    folder = tmp_path_factory.mktemp("dataset")
    samples = []
    for i in range(6):
        sample = open_split(DataConfig(), "val", count=6, size=40 + 24 * (i % 2))[i]
        samples.append(replace(sample, image_id=i + 1))
        Image.fromarray(sample.image).save(folder / sample.file_name)
    write_records(folder / "scenes.json", to_records(samples))
    return folder / "scenes.json"


@pytest.fixture(scope="module")
def run(tiny_run):
    return load_run(tiny_run)


@pytest.fixture
def opened_run(run, monkeypatch):
    """The command takes a run that is open already, since opening one takes seconds."""
    monkeypatch.setattr(loading, "load_run", lambda *_, **__: run)


def read_report(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def test_a_run_is_evaluated_again_to_the_same_report(tiny_run, command, tmp_path):
    end = command(main, tiny_run, "--out", tmp_path)
    assert end.code == 0 and "val_phrasing" in end.out and "val_hard" in end.out
    again = read_report(tmp_path)
    first = read_report(tiny_run)
    assert again["splits"] == first["splits"] and again["sentences"] == first["sentences"]
    figures = again["sentences"]["val_r2sm"]
    assert figures["queries"] == len(intent_sentences("val_r2sm")) and 0 <= figures["ece"] <= 1
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# R2SM evaluation")
    assert "| val_r2sm |" in text and "| keyword rule |" in text


@pytest.mark.parametrize(
    ("head", "accuracies"),
    [("oracle", (1, 1, 1)), ("always_modal", (1 / 3, 1, 0)), ("none", (None, None, None))],
)
def test_sentences_are_decided_by_rules_or_not_at_all(head, accuracies, predictor, monkeypatch):
    monkeypatch.setattr(predictor, "config", replace(predictor.config, head=head))
    sentences = [
        Sentence("the mug", "modal", ""),
        Sentence("the whole mug", "amodal", ""),
        Sentence("mug!", "amodal", ""),
    ]
    figures = evaluate_sentences(predictor, sentences)
    for name, expected in zip(("accuracy", "modal", "amodal"), accuracies, strict=True):
        assert figures[name] == pytest.approx(expected)
    assert figures["ece"] is None
    assert figures["keyword"] == pytest.approx(None if head == "none" else 2 / 3)


@pytest.mark.usefixtures("opened_run")
def test_one_split_is_shown_and_not_written_unasked(tiny_run, command):
    before = (tiny_run / "report.json").read_bytes()
    end = command(main, tiny_run, "--split", "val_hard", "--samples", 1)
    assert end.code == 0 and "val_hard" in end.out and "wrote" not in end.out
    assert (tiny_run / "report.json").read_bytes() == before


@pytest.mark.usefixtures("opened_run")
def test_a_dataset_file_is_evaluated_at_its_own_resolution(tiny_run, dataset, command, tmp_path):
    def evaluate_file(*flags):
        end = command(main, tiny_run, "--data", f"json:{dataset}", "--out", tmp_path, *flags)
        assert end.code == 0, end.err
        return read_report(tmp_path)

    report = evaluate_file("--split", "all")
    assert report["sentences"] == {} and report["meta"]["source"] == f"json:{dataset}"
    assert report["meta"]["images"] == {"all": 6}
    # Without --split the whole file is scored.
    assert evaluate_file()["splits"] == report["splits"]
    parts = evaluate_file("--split", "train,dev,val")["meta"]["images"]
    assert set(parts) == {"train", "dev", "val"} and sum(parts.values()) == 6


def test_crowds_of_composed_photos_are_what_they_were_in_training(run, monkeypatch, refused):
    config = replace(run.config, data=replace(run.config.data, crowds="objects"))
    monkeypatch.setattr(loading, "load_run", lambda *_, **__: replace(run, config=config))
    crowds = []

    def open_splits(data, *_, **__):
        crowds.append(data.crowds)
        raise InputError("it is seen")

    monkeypatch.setattr(evaluate, "open_splits", open_splits)
    for spec in ("compose:photos.json", "json:data.json"):
        assert "it is seen" in refused(main, "run", "--data", spec)
    assert crowds == ["objects", "ignore"]


def test_a_report_counts_no_image_twice_that_training_has_seen(run, monkeypatch):
    """More files can be in the pictures of a source than it has samples."""
    source = ListedSource([sample()])
    monkeypatch.setattr(source, "fingerprints", lambda: ["a", "b", "c"])
    monkeypatch.setattr(evaluator, "read_trained_on", lambda folder: {"a", "b"})
    report, _ = evaluator.evaluate(run, {"val": source}, "compose:photos.json", "")
    assert report["meta"]["images_seen"] == {"val": 1}


class PerfectPredictor(Predictor):
    """Predicts the true masks as exactly as logits at the model's own resolution can."""

    def __init__(self, predictor: Predictor, source: Source):
        vars(self).update(vars(predictor))
        self.truths = query_truths(source)

    def predict_logits(self, *inputs, **options):
        size = self.config.vision.image_size
        outputs = super().predict_logits(*inputs, **options)
        for of_image in outputs:
            for number, output in enumerate(of_image):
                truth = next(self.truths)
                box = Letterbox(*truth.size, size)
                pair = [box.coverage(masks.decode(rle), size) for rle in truth.masks]
                logits = np.stack(pair) / 255.0 * 18 - 9
                # The slots get the same masks; only the fused ones are looked at.
                shape = (len(output.presence), *logits.shape)
                of_image[number] = output._replace(masks=np.broadcast_to(logits, shape))
        return outputs


def score_nothing(folder: Path, source: Source) -> EvalResults:
    """Scores an empty mask for the first query, and nothing for the others."""
    truth = source.truth_at(0)
    mask = masks.encode(np.zeros(truth.size, bool))
    entry = {"query_id": truth.queries[0].id, "segmentation": mask}
    (folder / "none.json").write_text(json.dumps([entry]))
    return score_predictions(folder / "none.json", source)


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
    """The padding is cut off before masks are enlarged; the other way round costs about half of the
    IoU."""
    source = ListedSource(oblong(size, 3))
    rows = evaluate_source(PerfectPredictor(predictor, source), source).rows
    assert (lisa_iou(overlap_of_both(rows, requested(rows))) > 0.93).all()


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


def test_queries_that_cannot_be_scored_are_left_out_and_counted(tmp_path):
    one = sample()
    of_region = Query(5, "the crowd", "modal", (3,))
    with_region = Query(6, "the book and the crowd", "modal", (2, 3))
    source = ListedSource([replace(one, queries=(*one.queries, of_region, with_region))])
    truths = list(query_truths(source))
    # The complete shape that 2 asks for is not annotated.
    assert [truth.query.id for truth in truths if not truth.left_out] == [1, 3, 4, 6]
    # The truth is the union of the instances, without regions to ignore.
    both = masks.decode(truths[2].masks.modal)
    assert both[:4].all() and not both[4:].any()
    assert truths[3].masks.amodal == truths[2].masks.modal == truths[2].masks.amodal
    assert masks.area(masks.decode(truths[5].masks.modal)) == 24

    results = score_nothing(tmp_path, source)
    reason = "mean only regions to ignore"
    assert results.left_out == {reason: 1, "ask for a complete shape that is not annotated": 1}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--split", "valid"], "'valid'"),
        (["--data", "pigeons"], "pigeons"),
        (["--data", "json:nowhere.json"], "nowhere.json"),
        (["--samples", "0"], "--samples 0"),
        (["--out", f"{__file__}/out", "--split", "val", "--samples", "1"], "cannot write"),
    ],
)
def test_wrong_flags_are_refused(arguments, word, tiny_run, refused):
    assert word in refused(main, tiny_run, *arguments)
