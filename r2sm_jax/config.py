"""The configuration of an experiment: one tree of frozen dataclasses, which loads no model. cli.py
parses it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from operator import attrgetter
from typing import Any, Literal, get_args

from r2sm_jax.errors import InputError

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
FORMAT_VERSION = 2
"""Of the `config.json` of a run or an export; 2: compact exports may store differences from
published weights (inference/load.py)."""
MaskRecipe = Literal["mask2former", "lisa", "sam"]
MatmulPrecision = Literal["auto", "float32", "tensorfloat32", "bfloat16"]
"""How training multiplies matrices (models/matmul.py)."""

Crowds = Literal["ignore", "objects"]
Part = Literal["segmenter", "completer", "outliner"]
"""What can be trained."""

LearnedHead = Literal["linear", "mlp", "layers", "attention"]
LEARNED_HEADS: tuple[LearnedHead, ...] = get_args(LearnedHead)
"""Mask-type heads that decide from the words alone (models/mask_type_heads.py)."""
DECODER_HEAD = "decoder"
"""The head that reads a token of the mask decoder, which also sees the image."""
ReferenceHead = Literal["keyword", "always_modal", "always_amodal", "oracle"]
"""Rules that learn nothing."""
NO_HEAD = "none"
"""No decision: one mask for every query, as R2SM's baselines give."""
MIN_TARGET_SENTENCES = 256
"""From so few sentences without an image a target head learns something."""
UNSURE_BELOW = 0.3
"""The predicted IoU below which an answer is called unsure, where none is fitted."""
NUM_COORDINATES = 4
"""Channels that say where a pixel is (`coordinate_features` in models/mask_decoder.py)."""


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the image encoder; the defaults are `tiny`."""

    image_size: int = 96
    """Pixels of the square input."""
    patch_size: int = 8
    """Pixels a token, each way. SAM's weights and EfficientNet have 16."""
    encoder: Literal["conv", "sam", "vit", "efficientnet"] = "conv"
    """`conv`: strided convolutions and transformer blocks, best from scratch; `sam`: SAM's ViT;
    `vit`: a published plain ViT alone; `efficientnet`: a published EfficientNet-Lite and
    transformer blocks."""
    stem_depth: int = 1
    """Residual convolutions at each stride of the `conv` encoder."""
    dim: int = 192
    """Channels of the transformer blocks. The weights of SAM and of a plain ViT bring their own
    sizes: leave out this and the next eight."""
    depth: int = 3
    heads: int = 3
    mlp_dim: int = 576
    window_size: int = 0
    """Tokens a window, each way; 0 = global attention in every block."""
    global_blocks: tuple[int, ...] = ()
    """Blocks that attend globally where windows are used."""
    relative_positions: bool = False
    """SAM's decomposed relative positions."""
    out_dim: int = 128
    """Channels after the neck."""
    activation: Literal["gelu_tanh", "gelu", "quick_gelu"] = "gelu_tanh"
    """`gelu` is the exact function, which most published weights use."""
    remat: bool = False
    """Compute every block again in the backward pass: less memory, a third more time."""
    sam: str | None = None
    """Published weights of the `sam` encoder: a folder, a file or a hub name such as
    hf:facebook/sam-vit-base; None = from scratch."""
    sam_frozen: bool = False
    """The weights of `sam` are not trained."""
    vit: str | None = None
    """Published weights of the `vit` encoder (DINOv2, CLIP, SigLIP): a folder or hf:owner/name."""
    vit_frozen: bool = True
    """The weights of `vit` are not trained."""
    vit_grid: int = 0
    """Tokens each way of `vit`, resized to the grid of this encoder; 0 = do not change its number.
    """
    vit_family: Literal["", "dinov2", "clip", "siglip"] = ""
    """This and the next two are read from the weights of `vit`."""
    vit_patch_size: int = 0
    vit_registers: int = 0
    """Tokens inside the blocks that stand for no place of the image (DINOv2 with registers)."""
    efficientnet: str | None = None
    """Published weights of the `efficientnet` encoder: efficientnet-lite0, -lite1, -lite2, a folder
    or a file."""
    efficientnet_frozen_to: Literal[0, 2, 4, 8, 16, 32] = 32
    """Stride up to which `efficientnet` is not trained: 32 = all of it is frozen, 8 = four stages
    are trained, 0 = all."""
    efficientnet_dims: tuple[int, ...] = ()
    """Channels after each block of `efficientnet`, read from its weights. Equal ones in a row are a
    stage."""

    @property
    def grid(self) -> int:
        """Tokens each way."""
        return self.image_size // self.patch_size

    @property
    def pretrained(self) -> list[str]:
        """Names of the published weights that it starts from."""
        names = (self.sam, self.vit, self.efficientnet)
        return [name for name in names if name is not None]


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of the pixel and mask decoders."""

    type: Literal["shared", "sam"] = "shared"
    """`shared`: all queries of an image share its keys and pixel features; `sam`: SAM's two-way
    decoder with sizes and weights from `--model.vision.sam` if that is given."""
    dim: int = 128
    """Channels of tokens and image keys."""
    depth: int = 3
    heads: int = 2
    mlp_dim: int = 384
    slots: int = 4
    """Instance masks a query can have. At most `--data.instances`, from which training takes their
    targets."""
    fine_dim: int = 64
    """Channels of the coarse pixel features, in spite of its name, which old runs have stored; at
    half of the tokens' stride. The fine ones, at a quarter of it, have `mask_dim`."""
    mask_dim: int = 64
    """Channels of the fine pixel features. A mask is the dot product of a kernel with these."""
    refine: bool = True
    """Predict masks with the mean of two kernels (`R2SM.refine_kernels`); `shared` only, with
    `--loss.instance` above 0."""
    refine_exponent: float = 2.0
    """The probability of a pixel to this power is its weight in the second kernel. Thousands of
    pixels of .01 would weigh as much as a small object, so 2 is better where masks end sharply, as
    those of drawn scenes do; 1 where they are vague, as those of few photos are (docs/log.md). It
    changes no weights."""

    @property
    def region_dim(self) -> int:
        """Channels that an image region has: those of the pixel features and of a pixel's
        coordinates."""
        return self.mask_dim + NUM_COORDINATES


LITE2_BLOCK_DIMS = (16, *3 * (24,), *3 * (48,), *4 * (88,), *4 * (120,))
"""Channels after each block of EfficientNet-Lite2, up to stride 16."""


@dataclass(frozen=True)
class CompleterConfig:
    """Sizes of the completer, which adds the hidden part to a visible mask."""

    size: int = 128
    """Pixels of the square crop around a visible mask."""
    dims: tuple[int, ...] = (24, 48, 96, 160)
    """Channels at each resolution, from half of the crop's on."""
    depth: int = 4
    """Transformer blocks on the coarsest grid."""
    heads: int = 4


@dataclass(frozen=True)
class OutlinerConfig:
    """Sizes of the outliner, which draws the visible mask of what a box or clicks mean."""

    size: int = 160
    """Pixels of the square crop around a box or clicks."""
    dims: tuple[int, ...] = (48, 96, 160)
    """Channels at each resolution, from a quarter of the crop's on."""
    depth: int = 3
    """Transformer blocks on the coarsest grid."""
    heads: int = 4
    efficientnet: str = "efficientnet-lite2"
    """Published weights of the frozen backbone: a name or a file; empty = random ones."""
    block_dims: tuple[int, ...] = LITE2_BLOCK_DIMS
    """Channels after each block of the backbone, up to stride 16."""


@dataclass(frozen=True)
class TextConfig:
    """The frozen language model."""

    name: str = MINILM
    """The default, a folder or hf:owner/name on the Hugging Face hub; BERT or decoder-only
    (docs/weights.md)."""
    layers: tuple[int, ...] = (2, 4, 6)
    """Hidden layers whose states are read; 0 = embeddings."""
    max_tokens: int = 64
    """Longer queries are cut. `predict` and `decide` warn of it, since words about the mask type
    often stand last."""
    dim: int = 384
    """Width of the token states."""


@dataclass(frozen=True)
class ModelConfig:
    """The segmenter."""

    vision: VisionConfig = field(default_factory=VisionConfig)
    text: TextConfig = field(default_factory=TextConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    head: Literal[LearnedHead, "decoder", ReferenceHead, "none"] = "attention"
    """What decides between the two masks: a head that reads the words alone; `decoder`, which also
    sees the image; a rule that learns nothing; `none`."""
    mask_threshold: float = -0.6
    """Logit above which a pixel is mask while the segmenter is trained. Below 0, since IoU loses
    more by a missing pixel than by one too many. Calibration shifts it: each checkpoint has the
    threshold that is best on the split that selects checkpoints."""
    presence_threshold: float = -1.0
    """Logit of presence below which the answer is an empty mask: the image has nothing of the kind.
    """
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute precision. Parameters, softmax and losses stay float32."""
    classifier: bool = False
    """Let the published classifier of EfficientNet, which knows 1,000 classes, have a say in
    whether what a sentence names is there (models/classifier.py). With `--init` as in the run that
    is started from."""
    target: bool = False
    """Have a head that marks the words that name what a sentence means (`Decision.target`). It is
    trained on sentences alone when a run starts. With `--init` as in the run that is started
    from."""
    completer: CompleterConfig = field(default_factory=CompleterConfig)
    outliner: OutlinerConfig = field(default_factory=OutlinerConfig)

    @property
    def mask_size(self) -> int:
        """Pixels of the predicted square masks."""
        return 4 * self.vision.grid

    @property
    def refines(self) -> bool:
        """Whether kernels are refined: not with SAM's decoder, whose kernels fit only the query's
        own pixels, nor without a mask type."""
        return self.decoder.refine and self.decoder.type == "shared" and self.head != NO_HEAD


@dataclass(frozen=True)
class LossConfig:
    """The losses and their weights, which suit `--loss.masks mask2former`; each loss is logged."""

    masks: MaskRecipe = "mask2former"
    """The losses of a mask: `mask2former` = 5 BCE + 5 dice, `lisa` = 2 BCE + 0.5 dice, `sam` = 20
    focal + 1 dice."""
    supervise: Literal["both", "requested"] = "both"
    """Train both masks on every query, or only the one that it asks for, in every loss
    (docs/heads.md)."""
    slots: float = 0.15
    """Masks of the single instances of a query, one slot each, at half resolution."""
    aux: float = 0.5
    """Fused masks after the earlier blocks of a `shared` decoder, at half resolution."""
    type: float = 1.0
    """The decision which of the two masks a sentence asks for."""
    type_smoothing: float = 0.03
    """Label smoothing of the mask type, so that probabilities stay calibrated on new wordings."""
    presence: float = 0.25
    """Whether a query, and each of its slots, has a target."""
    iou: float = 0.25
    """Predicted IoU of the masks of queries and slots."""
    instance: float = 1.0
    """Masks of every instance, predicted from its own mean pixel feature."""
    dense: float = 3.0
    """What every pixel predicts about its object, each: category, every attribute, what is hidden
    behind it, box."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and schedule."""

    name: Literal["muon", "adamw"] = "muon"
    """`muon` makes the update of every matrix orthogonal."""
    learning_rate: float = 1e-3
    """Peak rate of AdamW, which under Muon trains vectors and embeddings."""
    pretrained_rate: float = 0.1
    """Rate at which AdamW trains a published backbone, as a share of `learning_rate`; nothing of it
    decays."""
    muon_learning_rate: float = 0.03
    """Peak rate of Muon's matrices."""
    weight_decay: float = 0.1
    """Weight decay of the matrices that AdamW trains."""
    vector_weight_decay: float = 0.0
    """Weight decay of vectors and tables."""
    b2: float = 0.98
    """Decay of AdamW's mean of squared gradients."""
    muon_weight_decay: float = 0.01
    momentum: float = 0.9
    """Nesterov momentum of Muon."""
    warmup_steps: int = 30
    """Steps to the peak of the rates, at most a fifth of the run."""
    decay: Literal["linear", "cosine"] = "linear"
    """How the rates fall from their peak to zero at the last step."""
    clip: float = 1.0
    """Largest global gradient norm; 0 = any."""


@dataclass(frozen=True)
class DataConfig:
    """Where examples come from."""

    source: str = "scenes"
    """scenes (drawn), compose:FILE (photos with masks;
    several: compose:FILE,FILE), cutouts:DIR (RGBA images), json:FILE or tfds:DIR."""
    images: str | None = None
    """Folder of the images of a json source or of one compose file; default: beside the file."""
    backgrounds: str | None = None
    """Folder of photos to lay cut-outs over; default: drawn backdrops."""
    cutouts: str | None = None
    """Folder of RGBA images whose objects are laid over composed photos as well, in training."""
    crowds: Crowds = "ignore"
    """Of compose: whether `iscrowd` 1 marks a region to ignore, or an object, as in files of CVAT
    and supervision."""
    scenes: int = 3072
    """Number of procedural or composed training scenes."""
    fresh: bool = False
    """A new picture at every visit, of scenes, compose and cutouts. compose then uses every photo,
    whatever the number of `scenes`."""
    workers: int = 0
    """Processes that make training batches; 0 = threads of this process."""
    seed: int = 0
    """Seed of the scenes. It differs from the training seed, so that runs with other seeds have the
    same data."""
    queries: int = 8
    """Queries per image and step."""
    instances: int = 8
    """Instances per image that are supervised; those that a query means come first."""
    token_drop: float = 0.2
    """Share of tokens that are hidden from a mask-type head that reads words alone, drawn anew each
    time."""
    text_only_queries: int = 12000
    """Sentences without an image, about anything, from which the mask-type head also learns."""
    mirror: bool = True
    """Mirror half of the images. Their queries that say left or right are left out; those of
    composed photos are written about the mirrored image."""
    crop: float = 1.0
    """Smallest share of each side that a random crop keeps; 1 = none. Queries whose instances are
    cut are left out, and positions among objects of which one is."""
    colour_jitter: float = 0.0
    """Largest relative change of brightness, contrast and saturation. Hues do not change: queries
    name colours."""


@dataclass(frozen=True)
class LoopConfig:
    """The training loop. `resolve_auto` (training/run_folder.py) replaces `auto` and 0 by what is
    used, before the run folder is written."""

    part: Part = "segmenter"
    """segmenter: what decides and finds; completer: what completes a visible mask, anyone's;
    outliner: what draws the visible mask of a box or clicks (docs/complete.md)."""
    steps: int = 800
    batch_size: int = 16
    """Images per step, over all devices."""
    devices: int = 0
    """Devices that share a batch; 0 = all of this machine, or of all processes."""
    accumulate: int = 1
    """Compute a batch in so many parts, to need the memory of one. The step is the same."""
    matmul_precision: MatmulPrecision = "auto"
    """Operands of matrix products in training, and in encoding its sentences. bfloat16 is for dense
    layers. auto = tensorfloat32 on accelerators, float32 on CPUs; for a segmenter bfloat16 on CPUs
    with AMX or AVX512-BF16."""
    deterministic: bool = False
    """On a GPU, only operations whose results are the same bits each time; slower."""
    ema: float = 0.0
    """Decay of a running average of the weights, which evaluation, selection and export then use;
    0 = none. In the first steps it is smaller, so that the random start is forgotten."""
    seed: int = 0
    """Seed of the initial weights, the order of examples and augmentation."""
    log_every: int = 25
    """Steps between lines in the log."""
    evaluate_every: int = 400
    """Steps between quick evaluations with sample sheets."""
    checkpoint_every: int = 400
    """Steps between checkpoints."""
    select_on: str = "dev"
    """Split of the quick evaluations, whose highest gIoU makes weights the run's best; dev is held
    out of train. val = the paper's protocol: the split is reported too, which the report says;
    a segmenter trains on dev of files then."""
    evaluate_samples: int = 64
    """Images in a quick evaluation, evenly spread over a file; composed pictures at most 4 of each
    photo."""
    report_samples: int = 100
    """Images of each split in the final report; procedural and composed scenes only, at most 4 of
    each photo. Files are evaluated whole."""


@dataclass(frozen=True)
class ProcessConfig:
    """The processes that run this command together; none of these flags where there is one
    process."""

    coordinator: str | None = None
    """HOST:PORT of the first process, which opens that port; or JAX_COORDINATOR_ADDRESS in the
    environment."""
    processes: int | None = None
    """Number of processes; or JAX_NUM_PROCESSES in the environment."""
    process: int | None = None
    """Number of this process, from 0; or JAX_PROCESS_ID in the environment."""
    detect: bool = False
    """Take these three from SLURM, Open MPI 4, Kubernetes or Cloud TPU, as JAX finds them."""
    local_devices: int = 0
    """Devices of each process, counted from the first that it can see; 0 = all, but under SLURM and
    Open MPI with `detect` one GPU."""


@dataclass(frozen=True)
class DistributedConfig(ProcessConfig):
    """The processes that train together, and how weights are divided among their devices."""

    fsdp: int = 1
    """Devices that share one copy of every large weight and of its optimizer state; 1 = a copy on
    each device."""


@dataclass(frozen=True)
class Config:
    """A training run."""

    run: str | None = None
    """Run folder; default: a new dated one in runs/, which runs/latest then points at."""
    resume: bool = False
    """Continue the run folder (default: runs/latest) from its last checkpoint."""
    init: str | None = None
    """Run or export, such as photos-small, whose weights are the starting point (fine-tuning)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


# The parts that can be trained

CROP_RECIPE = OptimizerConfig(
    name="adamw",
    learning_rate=1e-3,
    weight_decay=0.02,
    vector_weight_decay=0.02,
    b2=0.999,
    warmup_steps=200,
    decay="cosine",
)
"""How completer and outliner are trained."""
CROP_EMA = 0.999
"""Their weights are averaged over about the last thousand steps."""
READ_BY_CROPS = """run resume init model.vision.image_size data.source data.images data.backgrounds
    data.cutouts data.crowds data.scenes data.seed optimizer.name optimizer.learning_rate
    optimizer.weight_decay optimizer.vector_weight_decay optimizer.b2 optimizer.warmup_steps
    optimizer.decay optimizer.clip train.part train.steps train.batch_size train.devices
    train.accumulate train.matmul_precision train.deterministic train.ema train.seed
    train.log_every train.evaluate_every train.checkpoint_every train.select_on
    train.evaluate_samples distributed""".split()
"""What the trainings of completer and outliner read: fields, or groups of them."""


def default_config(part: Part) -> Config:
    """Returns what a part is trained with where nothing else is given."""
    if part == "segmenter":
        return Config()
    return Config(optimizer=CROP_RECIPE, train=LoopConfig(part=part, ema=CROP_EMA))


def is_read(name: str, part: Part) -> bool:
    """Whether the training of a part reads a field, such as "data.mirror"."""
    of_crops = {"model.completer", "model.outliner"}
    words = name.split(".")
    groups = {".".join(words[:end]) for end in range(1, len(words) + 1)}
    if part == "segmenter":
        return not groups & of_crops
    return bool(groups & {*READ_BY_CROPS, f"model.{part}"})


def refuse_unread(config: Config) -> None:
    """Raises InputError, which names flag and part, for a field that the part does not read and
    that is not the default."""
    part = config.train.part
    if part != "segmenter" and config.optimizer.name == "muon":
        raise InputError(
            f"--optimizer.name muon: --train.part {part} is trained with adamw; give that, and the "
            f"other options of the optimizer as in configs/{part}.py"
        )
    for name, value in flat_fields(config):
        if not is_read(name, part) and value != attrgetter(name)(default_config(part)):
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"{flag} {value}: --train.part {part} does not read it; leave it out")


def flat_fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted name and the value of each field of a configuration."""
    for field_ in fields(config):
        name, value = prefix + field_.name, getattr(config, field_.name)
        if is_dataclass(value):
            yield from flat_fields(value, f"{name}.")
        else:
            yield name, value


# Checks

RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(
        """train.steps train.batch_size train.log_every train.checkpoint_every train.evaluate_every
        train.accumulate train.evaluate_samples train.report_samples data.queries data.scenes
        data.instances distributed.fsdp model.vision.patch_size model.vision.heads
        model.decoder.heads model.decoder.depth optimizer.warmup_steps""".split(),
        (1, math.inf),
    ),
    **dict.fromkeys(
        """train.devices data.text_only_queries data.workers optimizer.clip model.vision.depth
        model.decoder.slots""".split(),
        (0, math.inf),
    ),
    "model.text.max_tokens": (3, math.inf),
    "model.decoder.refine_exponent": (0.01, math.inf),
    "data.crop": (0.01, 1.0),
    "data.colour_jitter": (0.0, 0.99),
    "data.token_drop": (0.0, 0.99),
    "loss.type_smoothing": (0.0, 0.49),
    **dict.fromkeys(
        """loss.slots loss.aux loss.type loss.presence loss.iou loss.instance loss.dense""".split(),
        (0, math.inf),
    ),
    "train.ema": (0.0, 0.999999),
}
"""Fields of a `Config` -> their smallest and largest value."""


def check_config(config: Config) -> Config:
    """Returns a configuration, but raises InputError, which names flag and remedy, for values with
    which training would fail later or learn nothing of a part, and for those that it would not
    read."""
    for name, (low, high) in RANGES.items():
        value = attrgetter(name)(config)
        if not low <= value <= high:
            flag = f"--{name.replace('_', '-')}"
            limit = f"at least {low}" if value < low else f"at most {high}"
            raise InputError(f"{flag} {value}: give {limit}")
    refuse_unread(config)
    check_model(config.model)
    slots, select_on = config.model.decoder.slots, config.train.select_on
    if slots > config.data.instances:
        raise InputError(
            f"--model.decoder.slots {slots}: training supervises --data.instances "
            f"{config.data.instances} instances an image, so the last slots would learn nothing; "
            f"give --data.instances {slots} as well"
        )
    if config.model.refines and config.loss.instance <= 0:
        raise InputError(
            f"--loss.instance {config.loss.instance} leaves the refined kernels untrained; give a "
            "weight above 0, or --model.decoder.no-refine"
        )
    if config.model.target and config.data.text_only_queries < MIN_TARGET_SENTENCES:
        raise InputError(
            "--model.target: its head learns from sentences without an image; give "
            f"--data.text-only-queries {MIN_TARGET_SENTENCES} or more"
        )
    if select_on in ("train", "test"):
        raise InputError(
            f"--train.select-on {select_on}: train is learned by heart, test is for releases; give "
            "dev"
        )
    return config


def check_model(model: ModelConfig) -> None:
    """Raises InputError, which names the flags, for flags of the model that do not fit together."""
    vision, decoder = model.vision, model.decoder
    has_published_grid = vision.sam or vision.efficientnet
    rules = {
        "--model.vision.image-size must be a multiple of --model.vision.patch-size": (
            vision.image_size % vision.patch_size == 0
        ),
        "--model.vision.patch-size: the conv stem halves 3 or 4 times; give 8 or 16": (
            vision.encoder != "conv" or vision.patch_size in (8, 16)
        ),
        "--model.vision.patch-size: SAM's weights and EfficientNet have tokens of 16 pixels; give "
        "16": (not has_published_grid or vision.patch_size == 16),
        "--model.vision.dim must be a multiple of --model.vision.heads": (
            vision.dim % vision.heads == 0
        ),
        "--model.decoder.dim must be even and a multiple of --model.decoder.heads": (
            decoder.dim % decoder.heads == 0 and decoder.dim % 2 == 0
        ),
        "--model.decoder.type sam: give --model.decoder.dim the value of --model.vision.out-dim": (
            decoder.type != "sam" or decoder.dim == vision.out_dim
        ),
        "--model.vision.sam is for --model.vision.encoder sam; give both": (
            vision.sam is None or vision.encoder == "sam"
        ),
        "--model.vision.sam-frozen: there are no weights of SAM; give --model.vision.sam": (
            vision.sam is not None or not vision.sam_frozen
        ),
        "--model.vision.vit and --model.vision.encoder vit go together; give both or neither": (
            (vision.vit is None) == (vision.encoder != "vit")
        ),
        "--model.vision.efficientnet and --model.vision.encoder efficientnet go together; give "
        "both or neither": (vision.efficientnet is None) == (vision.encoder != "efficientnet"),
        "--model.classifier is that of EfficientNet; give --model.vision.encoder efficientnet": (
            vision.encoder == "efficientnet" or not model.classifier
        ),
    }
    for remedy, is_kept in rules.items():
        if not is_kept:
            raise InputError(remedy)
