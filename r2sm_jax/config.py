"""One tree of frozen dataclasses holds a whole experiment. Sizes and names live here; flags.py parses them.

This module imports nothing but errors: whoever needs a size need not load the model.
"""

import difflib
from dataclasses import dataclass, field
from typing import Literal

from r2sm_jax.errors import InputError

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
Family = Literal["none", "dinov2", "clip", "siglip"]
MaskPair = Literal["mask2former", "lisa", "sam"]
Products = Literal["float32", "tensorfloat32", "bfloat16"]
"""How training multiplies matrices (cpu.py); sums are float32."""

LEARNED_HEADS = ("linear", "mlp", "layers", "attention")
"""Mask-type heads that decide from the words alone (models/heads.py)."""
DECODER_HEAD = "decoder"
"""The head that reads a token of the mask decoder, which also sees the image."""
REFERENCE_HEADS = ("keyword", "always_modal", "always_amodal", "oracle")
"""Rules that learn nothing."""
NO_HEAD = "none"
"""One mask for whatever was asked, as the R2SM paper's baselines give."""
PLACE = 4
"""Fixed channels that say where a pixel is, see `places`."""


@dataclass(frozen=True)
class PlainViTConfig:
    """Sizes of a published plain ViT. They come from its config.json and are not meant to be given."""

    family: Family = "none"
    dim: int = 0
    depth: int = 0
    heads: int = 0
    mlp_dim: int = 0
    patch_size: int = 0
    activation: str = "gelu"
    norm_epsilon: float = 1e-6
    registers: int = 0
    """Extra tokens that only the blocks see (DINOv2 with registers)."""

    @property
    def class_token(self) -> bool:
        """SigLIP alone has none."""
        return self.family != "siglip"


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the vision encoder; the defaults are `tiny`."""

    image_size: int = 96
    """Pixels of the square input."""
    patch_size: int = 8
    """Pixels a token, each way."""
    stem: Literal["conv", "patch", "none"] = "conv"
    """`conv`: strided convolutions, better from scratch; `patch`: SAM's patch embedding; `none`: no encoder of this
    layout at all, `name` stands alone."""
    stem_depth: int = 1
    """Residual convolutions at each stride of the `conv` stem."""
    dim: int = 192
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
    remat: bool = False
    """Compute the insides of every block anew in the backward pass: less memory, a third more time."""
    activation: Literal["gelu_tanh", "gelu"] = "gelu_tanh"
    """`gelu` is the exact one, of published weights."""
    init: str | None = None
    """Published SAM weights, a folder or a Hugging Face name such as facebook/sam-vit-base; None = from scratch. All
    sizes above but `image_size` then come from its config.json; giving another one is an error."""
    frozen: bool = False
    """The weights of `init` are not trained."""
    name: str | None = None
    """A published plain ViT (DINOv2, CLIP, SigLIP) beside this encoder, or alone with stem `none`: a folder or a
    Hugging Face name such as facebook/dinov2-small."""
    name_frozen: bool = True
    """The weights of `name` are not trained."""
    name_grid: int = 0
    """Tokens each way of `name`, resized to the grid of this encoder; 0 = as many as it has."""
    lora_rank: int = 0
    """Low-rank adaptation of the attention projections of `init` and `name`, whose own weights are frozen then."""
    lora_alpha: float = 16.0
    plain: PlainViTConfig = field(default_factory=PlainViTConfig)
    """Sizes of `name`, from its config.json."""

    @property
    def grid(self) -> int:
        """Tokens each way."""
        return self.image_size // self.patch_size

    @property
    def trunk_is_frozen(self) -> bool:
        """Whether `init` is there and none of it is trained."""
        return self.init is not None and self.frozen and not self.lora_rank

    @property
    def plain_is_frozen(self) -> bool:
        """Whether `name` is there and none of it is trained."""
        return self.name is not None and self.name_frozen and not self.lora_rank


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of the pixel and mask decoders."""

    kind: Literal["shared", "sam"] = "shared"
    """`shared`: ours, where all queries of an image share its keys and pixel features; `sam`: SAM's two-way decoder
    (sam_decoder.py), which takes its sizes and weights from `--model.vision.init` if that is given."""
    dim: int = 128
    """Channels of tokens and image keys."""
    depth: int = 3
    heads: int = 2
    mlp_dim: int = 384
    slots: int = 4
    """Instance masks a query can have."""
    fine_dim: int = 64
    """Channels at stride 4."""
    mask_dim: int = 64
    """Channels of the pixel features that masks are dot products with."""
    second_look: bool = True
    """Answers are drawn with the mean of two kernels: of the words', and of one from what the words' mask is seen to
    lie on (`R2SM.look_again`). Not in training; `shared` only; needs `--loss.instance` above 0."""

    @property
    def kernel_dim(self) -> int:
        """Channels of a kernel: those of the pixel features and the `places` of a pixel."""
        return self.mask_dim + PLACE


@dataclass(frozen=True)
class TextConfig:
    """The frozen language model."""

    name: str = MINILM
    """A local folder or a Hugging Face name of the BERT, CLIP or decoder-only layout (docs/weights.md)."""
    layers: tuple[int, ...] = (2, 4, 6)
    """Hidden layers that are read, side by side; 0 = embeddings."""
    max_tokens: int = 64
    """Longer queries are cut, with a warning: type words often stand last."""
    dim: int = 384
    """Width of the token states."""


@dataclass(frozen=True)
class ModelConfig:
    """The segmenter."""

    vision: VisionConfig = field(default_factory=VisionConfig)
    text: TextConfig = field(default_factory=TextConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    head: str = "attention"
    """Mask-type head: linear, mlp, layers, attention; decoder, which also sees the image; the references keyword,
    always_modal, always_amodal, oracle; none."""
    mask_threshold: float = -0.6
    """Logit above which a pixel is mask. Below 0, since leaving out a pixel that is as likely in as out costs more IoU
    than taking it in; `R2SMOutput` is shifted by it, so that 0 decides there."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute precision. Parameters, softmax and losses stay float32."""

    @property
    def mask_size(self) -> int:
        """Pixels of the predicted square masks."""
        return 4 * self.vision.grid

    @property
    def looks_again(self) -> bool:
        """Whether answers have a second look: not SAM's kernels, which are for the query's own pixels, nor a single
        mask of either type."""
        return self.decoder.second_look and self.decoder.kind == "shared" and self.head != NO_HEAD


@dataclass(frozen=True)
class LossConfig:
    """Weights of the parts; each part is logged apart."""

    masks: MaskPair = "mask2former"
    """Named pair: `mask2former` = 5 BCE + 5 dice, `lisa` = 2 BCE + 0.5 dice, `sam` = 20 focal + 1 dice. The weights are
    not exchangeable, and the ones below suit the first."""
    supervise: Literal["both", "requested"] = "both"
    """Modal and amodal mask on every query, or only the one that was asked for."""
    slots: float = 0.15
    early: float = 0.5
    """Fused masks after the earlier decoder blocks, at half resolution."""
    type: float = 1.0
    type_smoothing: float = 0.03
    """Label smoothing of the mask type: keeps probabilities honest on wordings never seen."""
    presence: float = 0.25
    iou: float = 0.25
    instance: float = 1.0
    """Masks of every instance from its own mean pixel feature."""
    dense: float = 3.0


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and schedule."""

    name: Literal["muon", "adamw"] = "muon"
    """`muon` orthogonalises the update of every matrix (training/muon.py)."""
    learning_rate: float = 1e-3
    """Peak rate of AdamW, which also serves vectors and embeddings under Muon."""
    muon_learning_rate: float = 0.03
    """Peak rate of Muon's matrices."""
    weight_decay: float = 0.1
    """Of AdamW's matrices."""
    muon_weight_decay: float = 0.01
    momentum: float = 0.9
    """Of Muon."""
    warmup_steps: int = 30
    decay: Literal["linear", "cosine"] = "linear"
    """Shape of the rates' way from their peak to zero at the last step."""
    clip: float = 1.0
    """Largest global gradient norm."""


@dataclass(frozen=True)
class DataConfig:
    """Where examples come from."""

    source: str = "scenes"
    """scenes (procedural), cutouts:DIR (composed of RGBA images), json:FILE (COCO-style, with queries) or tfds:DIR."""
    images: str | None = None
    """Folder of the images of a json source; default: beside the file."""
    backgrounds: str | None = None
    """Folder of photos to lay cut-outs over; default: drawn backdrops."""
    scenes: int = 8192
    """Procedural or composed training scenes."""
    seed: int = 0
    """Of the scenes. Not the training seed: the data stays the same across runs."""
    queries: int = 8
    """Queries an image and step."""
    instances: int = 8
    """Instances an image that are supervised; those that a query means come first."""
    token_drop: float = 0.2
    """Share of a query's tokens that the mask-type head does not see, drawn anew at each visit."""
    free_sentences: int = 6000
    """Sentences about anything, without an image, that the mask-type head alone learns from beside the queries."""
    mirror: bool = True
    """Mirror half of the images; queries that say left or right are left out then."""
    crop: float = 1.0
    """Smallest share of each side that a random crop keeps; 1 = none. Queries whose instances are cut are left out."""
    colour_jitter: float = 0.0
    """Largest relative change of brightness, contrast and saturation. Hues stay, since queries name colours."""
    cache_features: str | None = None
    """Folder for what frozen models make of sentences and, without augmentation, of images: computed once, read by
    every later run."""


@dataclass(frozen=True)
class LoopConfig:
    """The training loop."""

    steps: int = 2000
    batch_size: int = 16
    """Images a step, over all devices."""
    accumulate: int = 0
    """Parts that a batch is worked off in, to need the memory of one; the step is that of the whole batch. 0: no need
    to save memory."""
    products: Literal["auto"] | Products = "auto"
    """Operands of dense layers, 3x3 convolutions and Muon in training, and in encoding its sentences unless they are
    kept (`--data.cache-features`). auto: bfloat16 on CPUs with matrix units for it (AMX), float32 on other CPUs,
    tensorfloat32 on accelerators."""
    seed: int = 0
    """Of the initial weights, the order of examples and augmentation."""
    log_every: int = 50
    """Steps."""
    evaluate_every: int = 1000
    """Steps between quick evaluations with sample sheets."""
    checkpoint_every: int = 500
    """Steps."""
    evaluate_samples: int = 64
    """Images of the validation split in a quick evaluation."""
    report_samples: int = 256
    """Images of each split in the final report; procedural and composed scenes only, files are evaluated whole."""


@dataclass(frozen=True)
class Config:
    """A training run."""

    run: str | None = None
    """Run folder; default: a new dated one in runs/, which runs/latest then points at."""
    resume: bool = False
    """Continue the run folder (default: runs/latest) from its last checkpoint."""
    init: str | None = None
    """Run whose weights are the starting point (fine-tuning)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: LoopConfig = field(default_factory=LoopConfig)


def check_head(name: str) -> None:
    """Raises InputError for an unknown head, offering the nearest name."""
    names = [*LEARNED_HEADS, DECODER_HEAD, *REFERENCE_HEADS, NO_HEAD]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(f"--model.head {name!r} is unknown; {hint}Known heads: {', '.join(names)}")


def check_config(config: Config) -> Config:
    """Refuses values that could only fail later.

    Raises:
        InputError: naming the flag and what it may be.
    """
    check_head(config.model.head)
    if config.model.vision.init is None and config.model.vision.name is None:
        check_sizes(config.model)  # published sizes are known, and checked, when training starts
    if not 0 < config.data.crop <= 1:
        raise InputError(f"--data.crop {config.data.crop} is not a share; give one above 0 and up to 1 (1 = no crops)")
    if not 0 <= config.data.colour_jitter < 1:
        raise InputError(f"--data.colour-jitter {config.data.colour_jitter} is not in [0, 1); 0 = none")
    if config.model.looks_again and config.loss.instance <= 0:
        raise InputError(
            f"--loss.instance {config.loss.instance} leaves the second look untrained; give a weight above 0, or "
            "--model.decoder.no-second-look"
        )
    if config.train.accumulate < 0:
        raise InputError(f"--train.accumulate {config.train.accumulate} is below 0; give the number of parts, or 0")
    positive = {
        "--train.steps": config.train.steps, "--train.batch-size": config.train.batch_size,
        "--train.log-every": config.train.log_every, "--train.checkpoint-every": config.train.checkpoint_every,
        "--train.evaluate-every": config.train.evaluate_every, "--data.queries": config.data.queries,
        "--data.scenes": config.data.scenes, "--data.instances": config.data.instances,
        "--model.text.max-tokens": config.model.text.max_tokens - 2,
    }  # fmt: skip
    for flag, value in positive.items():
        if value < 1:
            raise InputError(f"{flag} is too small; it must be at least {3 if 'tokens' in flag else 1}")
    return config


def check_sizes(model: ModelConfig) -> None:
    """Refuses sizes of the encoder and the decoder that do not fit together.

    Raises:
        InputError: naming the flag and what it may be.
    """
    vision, decoder = model.vision, model.decoder
    if vision.image_size % vision.patch_size:
        raise InputError(
            f"--model.vision.image-size {vision.image_size} is not a multiple of "
            f"--model.vision.patch-size {vision.patch_size}"
        )
    if vision.stem == "conv" and vision.patch_size not in (8, 16):
        raise InputError(
            f"--model.vision.patch-size {vision.patch_size}: the conv stem halves 3 or 4 times, so 8 or 16"
        )
    for name, dim, heads in (("vision", vision.dim, vision.heads), ("decoder", decoder.dim, decoder.heads)):
        if dim % heads:
            raise InputError(f"--model.{name}.dim {dim} is not a multiple of --model.{name}.heads {heads}")
    if vision.stem == "none" and vision.name is None:
        raise InputError("--model.vision.stem none leaves no image encoder; give a plain ViT as --model.vision.name")
    if vision.frozen and vision.init is None:
        raise InputError("--model.vision.frozen keeps published weights as they are; give them as --model.vision.init")
    if vision.lora_rank and vision.init is None and vision.name is None:
        raise InputError("--model.vision.lora-rank adapts published weights; give --model.vision.init or .name")
    if decoder.kind == "sam" and decoder.dim != vision.out_dim:
        raise InputError(
            f"--model.decoder.dim {decoder.dim}: SAM's decoder reads image tokens as they are, so it must be equal to "
            f"--model.vision.out-dim {vision.out_dim}"
        )
    if decoder.kind == "sam" and (decoder.dim % 8 or decoder.dim % (2 * decoder.heads)):
        raise InputError(
            f"--model.decoder.dim {decoder.dim}: SAM's decoder needs a multiple of 8 and of 2 for each of its "
            f"{decoder.heads} heads"
        )
