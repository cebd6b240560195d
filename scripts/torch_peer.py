"""The default model of r2sm_jax in PyTorch, for scripts/benchmark_torch.py.

Modules and parameters have the names of r2sm_jax/models, so that `load_weights` finds them by path. Neither this file
nor torch_layers.py and torch_training.py import jax, so that the memory of torch alone can be measured.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch_layers import MLP, PLACE, Attention, PixelDecoder, PixelFeatures, VisionEncoder, add_places, attend, pool

if TYPE_CHECKING:
    from r2sm_jax.config import DecoderConfig, ModelConfig
else:
    DecoderConfig = ModelConfig = SimpleNamespace

PIXEL_MEAN = (123.675, 116.28, 103.53)
PIXEL_STD = (58.395, 57.12, 57.375)
NOT_THERE, PRIOR, FOCUS = -10.0, -3.0, 3.0
"""As in r2sm_jax/models/r2sm.py and decoder.py."""
READERS, READER_DIM, READER_HEADS = 4, 128, 4
"""As in r2sm_jax/models/heads.py."""


def unsupported(model: ModelConfig) -> str | None:
    """What of a configuration this file does not have; None where it has everything."""
    vision, decoder = model.vision, model.decoder
    missing = {
        "--model.vision.stem": vision.stem != "conv",
        "--model.vision.init, name or backbone": any((vision.init, vision.name, vision.backbone)),
        "--model.vision.window-size": vision.window_size > 0,
        "--model.vision.relative-positions": vision.relative_positions,
        "--model.vision.remat": vision.remat,
        "--model.vision.activation": vision.activation != "gelu_tanh",
        "--model.vision.patch-size below 8": vision.patch_size < 8,
        "--model.decoder.kind": decoder.kind != "shared",
        "--model.decoder.no-second-look": not decoder.second_look,
        "--model.head": model.head != "attention",
        "--model.dtype": model.dtype != "float32",
    }
    return next((flag for flag, found in missing.items() if found), None)


def load_weights(model: nn.Module, weights: Mapping[str, np.ndarray]) -> None:
    """Copies all weights and constants of the JAX model, by dotted path. Raises RuntimeError if one is left over,
    missing or of another shape."""

    def convert(path: str, array: np.ndarray) -> tuple[str, Tensor]:
        module, _, name = path.rpartition(".")
        if name == "kernel":
            array = array.T if array.ndim == 2 else array.transpose(3, 2, 0, 1)
        name = "weight" if name in ("kernel", "scale") else name
        return f"{module}.{name}".lstrip("."), torch.tensor(np.array(array))

    model.load_state_dict(dict(convert(path, array) for path, array in weights.items()))


# Queries


class Kernels(NamedTuple):
    """Masks before they are drawn: weights [b k q 2 c] and biases [b k q 2]."""

    weights: Tensor
    biases: Tensor

    def of(self, tokens: slice) -> "Kernels":
        return Kernels(self.weights[:, :, tokens], self.biases[:, :, tokens])


class MaskTokens(NamedTuple):
    """What the mask decoder gives for each query; token 0 is the fused one."""

    kernels: Kernels
    early: tuple[Kernels, ...]
    presence: Tensor
    iou: Tensor


class Answer(NamedTuple):
    """`R2SMOutput` of r2sm_jax."""

    type_logit: Tensor
    modal: Tensor
    amodal: Tensor
    presence: Tensor
    iou: Tensor
    slot_modal: Tensor
    slot_amodal: Tensor
    slot_presence: Tensor
    slot_iou: Tensor


def make_kernels(out: Tensor) -> Kernels:
    """From the outputs [b k q 2 (c + 1)] of a hypernetwork."""
    out = out.float().unflatten(-1, (2, -1))
    weights = out[..., :-1]
    return Kernels(weights * weights.shape[-1] ** -0.5, out[..., -1] + PRIOR)


def draw_masks(kernels: Kernels, canvas: Tensor) -> Tensor:
    """Logits [b k q 2 h w] of every kernel on the pixels of its image, which have places."""
    weights, biases = kernels.weights.flatten(1, 3).to(canvas.dtype), kernels.biases.flatten(1).to(canvas.dtype)
    drawn = torch.baddbmm(biases[..., None], weights, canvas.flatten(1, 2).mT)
    return drawn.view(*kernels.biases.shape, *canvas.shape[1:3])


def draw_pair(kernels: Kernels, canvas: Tensor) -> tuple[Tensor, Tensor]:
    """Modal and amodal logits [b k q h w]."""
    logits = draw_masks(kernels, canvas)
    return logits[:, :, :, 0], logits.amax(3)


class DecoderBlock(nn.Module):
    """Tokens attend to one another and the text, then to the image, then an MLP (pre-norm)."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.prompt = Attention(config.dim, config.heads)
        self.image = Attention(config.dim, config.heads)
        self.mlp = MLP(config.dim, config.mlp_dim, config.dim)
        self.norms = nn.ModuleList(nn.LayerNorm(config.dim, eps=1e-5) for _ in range(3))

    def forward(
        self, tokens: Tensor, text: Tensor, seen: Tensor, image: Tensor, positions: Tensor, focus: Tensor | None
    ) -> Tensor:
        """Tokens [b k q d], text [b k t d], `seen` [b k (q + t)], image [b n d], `focus` [b (k q) n]."""
        b, k, q, _ = tokens.shape
        normed = self.norms[0](tokens)
        prompt = torch.cat([normed, text], dim=2).flatten(0, 1)
        attended = self.prompt(normed.flatten(0, 1), prompt, prompt, seen.flatten(0, 1))
        tokens = tokens + attended.view(b, k, q, -1)
        attended = self.image(self.norms[1](tokens).flatten(1, 2), image + positions, image, focus)
        tokens = tokens + attended.view(b, k, q, -1)
        return tokens + self.mlp(self.norms[2](tokens))


class MaskDecoder(nn.Module):
    """Text and image -> kernels of the fused mask and of N instance slots."""

    positions: Tensor

    def __init__(self, config: ModelConfig):
        super().__init__()
        decoder, d, grid = config.decoder, config.decoder.dim, config.vision.image_size // config.vision.patch_size
        self.output_tokens = nn.Parameter(torch.zeros(1 + decoder.slots, d))
        self.register_buffer("positions", torch.zeros(grid * grid, d))
        self.text = nn.Linear(config.text.dim * len(config.text.layers), d)
        self.text_norm = nn.LayerNorm(d, eps=1e-5)
        self.image = nn.Linear(config.vision.out_dim, d)
        self.blocks = nn.ModuleList(DecoderBlock(decoder) for _ in range(decoder.depth))
        self.norm = nn.LayerNorm(d, eps=1e-5)
        out = 2 * (decoder.mask_dim + PLACE + 1)
        self.fused, self.slots = MLP(d, d, d, out), MLP(d, d, d, out)
        self.scores = MLP(d, d, 3)

    def forward(self, image: Tensor, pixels: Tensor, text: Tensor, text_mask: Tensor) -> MaskTokens:
        b, k, _, _ = text.shape
        words, keys = self.text_norm(self.text(text)), self.image(image.flatten(1, 2))
        grid = image.shape[1]
        cells = add_places(pool(pixels, pixels.shape[1] // grid))
        tokens = self.output_tokens.expand(b, k, -1, -1)
        seen = torch.cat([text_mask.new_ones(b, k, tokens.shape[2]), text_mask], dim=2)
        drawn: list[Kernels] = []
        focus = None
        for block in self.blocks:
            tokens = block(tokens, words, seen, keys, self.positions, focus)
            drawn.append(self._kernels(self.norm(tokens)))
            if len(drawn) < len(self.blocks):
                with torch.no_grad():
                    focus = draw_masks(drawn[-1], cells).amax(3).clamp(-FOCUS, FOCUS).flatten(3).flatten(1, 2)
        scores = self.scores(self.norm(tokens)).float()
        return MaskTokens(drawn[-1], tuple(drawn[:-1]), scores[..., 0], scores[..., 1:].sigmoid())

    def _kernels(self, tokens: Tensor) -> Kernels:
        return make_kernels(torch.cat([self.fused(tokens[:, :, :1]), self.slots(tokens[:, :, 1:])], dim=2))


class Reader(nn.Module):
    """One transformer layer over the tokens of a sentence, then attention pooling."""

    def __init__(self, in_dim: int, dim: int = READER_DIM):
        super().__init__()
        self.down = nn.Linear(in_dim, dim)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim, eps=1e-5) for _ in range(3))
        self.qkv = nn.Linear(dim, 3 * dim)
        self.attention_out = nn.Linear(dim, dim)
        self.mlp = MLP(dim, 2 * dim, dim)
        self.pool, self.out = nn.Linear(dim, 1), nn.Linear(dim, 1)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Logits [n] of sentences: states [n t e], mask [n t]."""
        x = self.down(states)
        query, key, value = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.attention_out(attend(query, key, value, heads=READER_HEADS, mask=mask))
        x = self.norm3(x + self.mlp(self.norm2(x)))
        focus = self.pool(x)[..., 0].masked_fill(~mask, -1e9).softmax(-1)
        return self.out((focus[:, None] @ x)[:, 0])[..., 0]


class AttentionHead(nn.Module):
    """Four readers, whose mean logit decides."""

    def __init__(self, in_dim: int):
        super().__init__()
        self.readers = nn.ModuleList(Reader(in_dim) for _ in range(READERS))

    def forward(self, text: Tensor, mask: Tensor) -> Tensor:
        """The logits [r b k] of each reader for sentences [b k t e]."""
        sentences, seen = text.flatten(0, 1), mask.flatten(0, 1)
        return torch.stack([reader(sentences, seen).view(mask.shape[:2]) for reader in self.readers])


class Outputs(NamedTuple):
    """What the losses compare with the truth, in float32."""

    masks: MaskTokens
    second: Kernels
    """The kernels of the second look, without a gradient."""
    canvas: Tensor
    type_readings: Tensor
    instances: Kernels
    dense: Tensor
    names: dict[str, Tensor]


class Peer(nn.Module):
    """R2SM: vision encoder, pixel decoder, mask decoder and the mask-type head `attention`."""

    mean: Tensor
    std: Tensor
    type_temperature: Tensor
    iou_fit: Tensor
    presence_shift: Tensor

    def __init__(self, config: ModelConfig):
        super().__init__()
        decoder, channels = config.decoder, config.decoder.mask_dim + PLACE
        self.config = config
        self.vision = VisionEncoder(config.vision)
        self.pixels = PixelDecoder(config, self.vision.stem.dims[1:-1])
        self.decoder = MaskDecoder(config)
        self.head = AttentionHead(config.text.dim * len(config.text.layers))
        self.dense = nn.Linear(decoder.fine_dim, 2 * decoder.dim + 4)
        self.dense_kernels = MLP(channels, 64, 2 * (channels + 1))
        self.dense_names = nn.Linear(config.text.dim, decoder.dim)
        self.register_buffer("type_temperature", torch.ones(()))
        self.register_buffer("iou_fit", torch.tensor([1.0, 0.0]))
        self.register_buffer("presence_shift", torch.zeros(()))
        self.register_buffer("mean", torch.tensor(PIXEL_MEAN), persistent=False)
        self.register_buffer("std", torch.tensor(PIXEL_STD), persistent=False)

    def encode_image(self, image: Tensor, valid: Tensor) -> tuple[Tensor, PixelFeatures]:
        """Tokens [b h w d] and pixel features of images uint8 [b H W 3]; `valid` is False on padding."""
        normalised = torch.where(valid[..., None], (image.float() - self.mean) / self.std, 0)
        tokens, skips = self.vision(normalised)
        return tokens, self.pixels(tokens, skips)

    def decode(self, tokens: Tensor, pixels: PixelFeatures, text: Tensor, text_mask: Tensor) -> MaskTokens:
        """All that is computed once per query [b k t l e], except its type and the masks themselves."""
        return self.decoder(tokens, pixels.fine, text.flatten(3).float(), text_mask)

    def instance_kernels(self, canvas: Tensor, visible: Tensor) -> Kernels:
        """Kernels [b 1 m] from the mean pixel of each region [b m h w]."""
        total = visible.flatten(2).to(canvas.dtype) @ canvas.flatten(1, 2)
        mean = total / (visible.sum((-2, -1))[..., None] + 1)
        return make_kernels(self.dense_kernels(mean[:, None]))

    @torch.no_grad()
    def look_again(self, masks: MaskTokens, canvas: Tensor) -> Kernels:
        """The kernels, averaged with those from the pixels of the modal masks that they draw. Nothing is trained
        through it."""
        first = masks.kernels
        b, k, q, _ = first.biases.shape
        visible = draw_masks(first, canvas)[:, :, :, 0].float().sigmoid()
        again = self.instance_kernels(canvas, visible.flatten(1, 2))
        share = torch.full((b, k, q), 0.5)
        share[..., 0] = torch.where((masks.presence[..., 1:] > 0).sum(-1) == 1, 0.5, 0.0)
        weights = torch.lerp(first.weights, again.weights.view_as(first.weights), share[..., None, None])
        return Kernels(weights, torch.lerp(first.biases, again.biases.view_as(first.biases), share[..., None]))

    def answer(self, tokens: Tensor, pixels: PixelFeatures, text: Tensor, text_mask: Tensor) -> Answer:
        """Answers k queries about each of b images."""
        config, masks = self.config, self.decode(tokens, pixels, text, text_mask)
        type_logit = self.head(text.flatten(3).float(), text_mask).mean(0).float()
        drawn = draw_pair(self.look_again(masks, pixels.canvas), pixels.canvas)
        modal, amodal = (x.float() - config.mask_threshold for x in drawn)
        presence = masks.presence[..., 0] + self.presence_shift
        limit = torch.where(presence > config.presence_threshold, float("inf"), NOT_THERE)[..., None, None]
        stable = [(x > 1).sum((-2, -1)) / (x > -1).sum((-2, -1)).clamp(min=1) for x in (modal, amodal)]
        scale, shift = self.iou_fit
        quality = torch.logit(torch.stack([masks.iou, torch.stack(stable, -1)]).clamp(0.001, 0.999)).mean(0)
        iou = torch.sigmoid(scale * quality + shift)
        return Answer(
            type_logit / self.type_temperature,
            torch.minimum(modal[:, :, 0], limit),
            torch.minimum(amodal[:, :, 0], limit),
            presence,
            iou[:, :, 0],
            modal[:, :, 1:],
            amodal[:, :, 1:],
            masks.presence[..., 1:],
            iou[:, :, 1:],
        )

    def forward(self, batch: dict[str, Tensor], names: dict[str, Tensor], regions: Tensor) -> Outputs:
        """What a training batch is compared with. An instance's kernel is made of the pixels in its region."""
        tokens, pixels = self.encode_image(batch["image"], batch["valid"])
        masks = self.decode(tokens, pixels, batch["text"], batch["text_mask"])
        return Outputs(
            masks=masks,
            second=self.look_again(masks, pixels.canvas),
            canvas=pixels.canvas.float(),
            type_readings=self.head(batch["type_text"].flatten(3).float(), batch["type_mask"]).float(),
            instances=self.instance_kernels(pixels.canvas, regions),
            dense=self.dense(pixels.coarse).float(),
            names={group: self.dense_names(embeddings).float() for group, embeddings in names.items()},
        )
