"""A predictor that needs no model: its masks follow from the image's brightness, its decisions from
keywords."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from flax import nnx

from r2sm_jax.config import ModelConfig
from r2sm_jax.data.masks import Mask
from r2sm_jax.inference.crop_models import Completion, MaskCompleter, MaskOutliner, Outline
from r2sm_jax.inference.parts import Parts
from r2sm_jax.inference.predictor import Predictor
from r2sm_jax.models.calibration import Calibration
from r2sm_jax.models.r2sm import ImageFeatures, R2SMOutput
from r2sm_jax.query import MODAL, Prompt, keyword_mask_type

IMAGE_SIZE, MASK_SIZE, NUM_SLOTS = 32, 8, 2


class StubTextEncoder:
    """One number for each sentence: the logit that it asks for the complete shape."""

    sha256 = "0" * 64
    max_tokens = 24

    def __call__(self, sentences: Sequence[str], length: int | None = None):
        logits = [2.0 if keyword_mask_type(text) == "amodal" else -2.0 for text in sentences]
        states = np.array(logits, np.float16).reshape(-1, 1, 1, 1)
        return states, np.ones(states.shape[:2], bool)

    def cut_off(self, sentence: str) -> str:
        return " ".join(sentence.split()[self.max_tokens :])

    def warm_up(self) -> None:
        pass


class StubOutliner(MaskOutliner):
    """Outlines the box of a prompt, or a square around its last click on the object."""

    half_side = 20
    predicted_iou = 0.625

    def __init__(self):
        pass

    def __call__(self, image: np.ndarray, prompts: Sequence[Prompt]) -> list[Outline]:
        outlines = []
        for prompt in prompts:
            box = prompt.box
            if box is None:
                click = [click for click in prompt.clicks if click.is_positive][-1]
                half = self.half_side
                box = click.x - half, click.y - half, click.x + half, click.y + half
            x0, y0, x1, y1 = (max(0, round(number)) for number in box)
            mask = np.zeros(image.shape[:2], bool)
            mask[y0:y1, x0:x1] = True
            outlines.append(Outline(mask, self.predicted_iou))
        return outlines


class StubCompleter(MaskCompleter):
    """Keeps each mask as it is, and remembers the union of all objects."""

    iou, hidden_probability, unsure_below = 0.9, 0.25, 0.7

    def __init__(self):
        pass

    def complete(
        self, image: np.ndarray, visible_masks: Iterable[Mask], all_visible: Mask | None = None
    ) -> Iterator[Completion]:
        self.all_visible = all_visible
        for mask in visible_masks:
            yield Completion(mask, self.iou, self.hidden_probability, self.unsure_below)


def masks_of(
    completer: MaskCompleter,
    image: np.ndarray,
    visible_masks: Iterable[Mask],
    all_visible: Mask | None = None,
) -> list[Mask]:
    """The complete masks alone."""
    return [one.mask for one in completer.complete(image, visible_masks, all_visible)]


class StubPredictor(Predictor):
    """Everything of a `Predictor` but the model."""

    weights_sha256 = "1" * 64
    predicted_iou = 0.75
    """Of the fused mask."""

    def __init__(self):
        config = ModelConfig(head="attention")
        self.config = replace(config, vision=replace(config.vision, image_size=IMAGE_SIZE))
        self.text_encoder = StubTextEncoder()
        self.calibration = Calibration()
        self.matmul_precision = "float32"
        self.parts = Parts()
        self.weights = nnx.State({})
        self._image = None
        self._process_id = os.getpid()
        self.num_images = 0

    def _encode_image(self, weights, images, image_mask):
        self.num_images += len(images)
        brightness = images.astype(np.float32).mean((1, 2, 3)) / 255
        tokens = jnp.asarray(brightness).reshape(-1, 1, 1, 1)
        return ImageFeatures(tokens, coarse=tokens, fine=tokens)

    def _decode(self, weights, image_features, states, text_mask, calibration) -> R2SMOutput:
        """A square whose lower half is hidden; bright images have larger ones."""
        b, k = text_mask.shape[:2]
        cells = np.arange(MASK_SIZE)
        masks = np.full((b, 2, MASK_SIZE, MASK_SIZE), -4.0, np.float32)
        for pair, brightness in zip(masks, np.asarray(image_features.tokens).ravel(), strict=True):
            inside = cells < 2 + 6 * brightness
            pair[:, np.outer(inside, inside)] = 4.0
        masks[:, MODAL, MASK_SIZE // 2 :] = -4.0

        num_masks = 1 + NUM_SLOTS
        shape = (b, k, num_masks, 2, MASK_SIZE, MASK_SIZE)

        # The fused mask and the first slot are present.
        presence = np.full((b, k, num_masks), -3.0, np.float32)
        presence[..., 0] = 2.0
        presence[..., 1] = 3.0
        iou = np.full((b, k, num_masks, 2), 0.5, np.float32)
        iou[..., 0, :] = self.predicted_iou
        return R2SMOutput(
            amodal_logit=states[..., 0, 0, 0].astype(np.float32),
            masks=np.broadcast_to(masks[:, None, None], shape),
            presence=presence,
            iou=iou,
        )

    def _amodal_logit(self, weights, states, mask, calibration):
        return states[:, 0, 0, 0].astype(np.float32)
