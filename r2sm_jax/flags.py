"""The flags of the commands but for those of `train` (config.py) and `data` (tools/).

They load no JAX, so that a slip in one is told at once. A command imports this first and calls
`check_flags` before it imports anything that takes seconds.
"""

import sys
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

import tyro

from r2sm_jax.cli import check_first, parse_flags
from r2sm_jax.config import LEARNED_HEADS, LearnedHead, TextConfig

T = TypeVar("T")


@dataclass(frozen=True)
class EvaluateConfig:
    """Scores a run, or the masks of any other system, on a data set."""

    run: Annotated[str | None, tyro.conf.Positional] = None
    """Run folder, export, or hf:owner/name of one on the Hugging Face hub; none with --predictions
    or --decisions."""
    predictions: str | None = None
    """File or folder of masks to score, or COCO results of a detector, see docs/metrics.md."""
    format: Literal["auto", "coco", "png"] = "auto"
    """Format of the predictions: coco or png; auto: by file or folder."""
    decisions: str | None = None
    """File of decisions about sentences alone, as `decide --json` prints them: scores those of any
    system, see docs/intent.md."""
    sentences: str | None = None
    """The labelled sentences of --decisions: a list of docs/intent.md, its table of plain wordings
    (plain), or a file like the lists; default: val_r2sm."""
    data: str | None = None
    """scenes, compose:FILE, cutouts:DIR, json:FILE or tfds:DIR; default: what the run was
    trained on."""
    split: str | None = None
    """One split, or several with commas. Default, or all: every val split of scenes, composed
    photos and cut-outs; the whole of one file; all but train and dev of a folder or of TFDS. A run
    without --data reports val of one file. With --predictions one split."""
    images: str | None = None
    """Folder of the images of a json source. --predictions are scored without images too."""
    backgrounds: str | None = None
    """Folder of photos to lay cut-outs over; default: drawn backdrops."""
    samples: int | None = None
    """Procedural or composed scenes a split; default: as in the run's report, and at most 4 of each
    composed photo."""
    compare: tuple[str, ...] = ()
    """Folders of reports (runs, or what --out wrote) to put side by side; the others are compared
    with the first."""
    out: str | None = None
    """Folder for report.json, report.md, report.html and queries.csv. Default: the run folder if
    RUN is no export and --data, --samples and --split are left out; else nothing is
    written. The report of another system is not replaced."""


@dataclass(frozen=True)
class PredictConfig:
    """Segments what a sentence means in one image, or in many."""

    run: Annotated[str, tyro.conf.Positional]
    """Run folder, such as runs/latest, export, photos-small, or hf:owner/name of an export on the
    hub."""
    image: Annotated[str, tyro.conf.Positional]
    """Image file (JPEG, PNG, WebP, BMP, GIF, TIFF), folder of images, or data set (.json) whose
    queries are asked."""
    query: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """What to segment, such as "the complete shape of the red mug", or several of these; none with
    --queries."""
    queries: str | None = None
    """File of queries: a data set (.json), or text with lines QUERY (every image) or IMAGE, a tab,
    QUERY."""
    shard: str = "1/1"
    """I/N: of many images every N-th, from the I-th on (1/N to N/N), into predictions-I-of-N.json.
    So any scheduler can run N of them."""
    mask_type: Literal["auto", "modal", "amodal"] = "auto"
    """auto: the sentence decides."""
    mask: str | None = None
    """File with the visible mask of the object that is meant: a PNG, white on black, or JSON with
    an RLE or polygons. The sentence decides whether it is completed."""
    box: tuple[float, float, float, float] | None = None
    """Box around what shows of the object that is meant: X0 Y0 X1 Y1 in pixels."""
    point: Annotated[tuple[tuple[float, float], ...], tyro.conf.UseAppendAction] = ()
    """Point X Y on the object that is meant, in pixels; may be repeated."""
    not_point: Annotated[tuple[tuple[float, float], ...], tyro.conf.UseAppendAction] = ()
    """Point X Y beside the object that is meant; may be repeated."""
    others: str | None = None
    """File with the visible masks of the other objects of the image, which say where something can
    be hidden: as that of --mask, or JSON with a list of masks."""
    finder: str | None = None
    """Zero-shot detector of transformers, or SAM 3: folder, or name on the Hugging Face hub. It
    finds what the words name, and the sentence chooses."""
    abstain: float = 0.0
    """Margin from 0 to 0.5: an answer whose probability of amodal is nearer than this to 0.5 is
    marked undecided."""
    out: str | None = None
    """Folder for what is written; default: predictions/IMAGE/SENTENCE, of several images
    predictions/FOLDER/SENTENCE, and none with --json. Where an earlier prediction of one image is,
    this one gets a folder of its own."""
    json: bool = False
    """Print one JSON object, and nothing else, on stdout."""
    overwrite: bool = False
    """Replace the files of an earlier prediction; of several images: start anew."""
    overlays: bool = False
    """Several images: also draw each answer over its image, into the folder overlays. One image
    always has its overlay.png."""
    coco: str | None = None
    """Several images: also write the objects of all answers into this file, as COCO instances. The
    queries are its categories; objects have visible and complete mask, score, and unsure."""
    matmul_precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: round what the segmenter's dense layers multiply; faster on CPUs with AMX or
    AVX512-BF16."""


@dataclass(frozen=True)
class DecideConfig:
    """Decides which mask sentences ask for, modal or amodal, without an image."""

    sentences: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Such as "the red mug" "the whole red mug, hidden parts included"."""
    file: str | None = None
    """Text file with one sentence a line, or the column `text` of a .tsv or .csv."""
    model: str = "photos-small"
    """Released model, run folder, such as runs/latest, export, or hf:owner/name of an export on the
    hub. Its head must read the words alone (docs/heads.md)."""
    abstain: float = 0.0
    """Margin from 0 to 0.5: a decision whose probability of amodal is nearer than this to 0.5 is
    marked undecided."""
    json: bool = False
    """Print one JSON object for each sentence, and nothing else, on stdout."""


@dataclass(frozen=True)
class ExportConfig:
    """Writes a run as a folder in Hugging Face's layout: safetensors, tokenizer, model card,
    StableHLO."""

    run: Annotated[str, tyro.conf.Positional]
    """Run folder, such as runs/latest. With --completer or --outliner also an export, such
    as photos-small."""
    out: str
    """Folder to write. Its name is the model's name on the card."""
    lm: Literal["embed", "reference"] = "embed"
    """embed: copy the frozen language model into the folder; reference: write its name and
    checksum, and download it at the first use."""
    compact: bool = False
    """Write the trained weights alone, in float16. Published weights and the language model are
    found by name when the export is loaded, and there is no StableHLO."""
    completer: str | None = None
    """Model whose completer is put into the export, so that it completes given masks: the run of
    one, or a model that has one, such as photos-small."""
    outliner: str | None = None
    """Model whose outliner is put into the export, so that it reads boxes and clicks: as
    --completer."""
    push: str | None = None
    """Also upload the folder to owner/name on the Hugging Face hub, with the token of `hf auth
    login` or HF_TOKEN."""
    overwrite: bool = False
    """Replace an earlier export in the folder, with its model card."""
    verify: bool = False
    """Check that the run, the export, and the StableHLO without this package give the same
    answers."""


@dataclass(frozen=True)
class AblateConfig:
    """Compares mask-type heads."""

    quick: bool = False
    """Fewer sentences and steps, and two seeds: minutes instead of half an hour."""
    heads: tuple[LearnedHead, ...] = LEARNED_HEADS
    """Heads that decide from the words alone."""
    seeds: int | None = None
    """Trainings of each head; default: 3, or 2 with --quick."""
    steps: int | None = None
    """Training steps of 128 sentences; default: 2,000, or 60 with --quick."""
    out: str = "ablation"
    """Folder for heads.md, heads.png and heads.json; earlier ones are replaced."""
    text: TextConfig = field(default_factory=TextConfig)
    """The language model, as --model.text of training."""


@dataclass(frozen=True)
class DemoConfig:
    """A page where people try a trained segmenter."""

    run: Annotated[str, tyro.conf.Positional] = "photos-small"
    """Run folder, such as runs/latest, export, released model, or hf:owner/name of an export on the
    hub."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 lets other machines in."""
    port: int = 7860
    """0 = any that is free."""
    max_upload_mb: int = 10
    """Largest file that may be uploaded."""


COMMANDS = {
    EvaluateConfig: "evaluate",
    PredictConfig: "predict",
    DecideConfig: "decide",
    ExportConfig: "export",
    AblateConfig: "ablate",
    DemoConfig: "demo",
}
"""The commands by the dataclasses of their flags."""


def read_flags(cls: type[T]) -> T:
    """Parses the flags of the command line into one of `COMMANDS`. Raises InputError as
    `parse_flags`."""
    return parse_flags(cls, sys.argv[1:], prog=f"python -m r2sm_jax.{COMMANDS[cls]}")


def check_flags(cls: type) -> None:
    """Parses the flags once and ends the process where there is no more to do, as `check_first`."""
    check_first(lambda: read_flags(cls))
