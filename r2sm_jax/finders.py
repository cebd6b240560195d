"""Finders of others, which find things by name: what they take and give, and those of transformers.

A finder that is handed to `Predictor.predict` stands between the decision and the completion. It
says where the things of a name are; which of them is meant the sentence says (inference/choose.py).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8

from r2sm_jax.errors import InputError


@runtime_checkable
class Finder(Protocol):
    """Finds things by name, as transformers' post-processing gives them: for each name a dict with
    `scores` [n] from 0 to 1, and `masks` [n H W] or `boxes` [n 4], x0 y0 x1 y1 in pixels."""

    def __call__(
        self, image: UInt8[np.ndarray, "H W 3"], names: list[str]
    ) -> Sequence[Mapping[str, Any]]: ...


def from_transformers(model: str | Path) -> Finder:
    """Makes a finder of a zero-shot detector of transformers (Grounding DINO, OWLv2, OmDet-Turbo),
    which gives boxes, or of SAM 3, which gives masks. What counts as found is their own default.

    Args:
        model: its folder, or its name on the Hugging Face hub.

    Raises InputError if it cannot be had, is another kind of model, or torch or torchvision, which
    SAM 3 and OmDet-Turbo need, are missing.
    """
    try:
        import torch
        import transformers
        from transformers import AutoModelForZeroShotObjectDetection as Detector

        # Published weights of SAM 3 say that they are of its tracker of videos.
        is_sam3 = transformers.AutoConfig.from_pretrained(model).model_type.startswith("sam3")
        network: Any = (transformers.Sam3Model if is_sam3 else Detector).from_pretrained(model)
        processor: Any = (
            transformers.Sam3Processor if is_sam3 else transformers.AutoProcessor
        ).from_pretrained(model)
    except ImportError as error:
        raise InputError(
            f"{model}: a finder needs more packages ({error}); pip install 'r2sm_jax[finder]'"
        ) from None
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"{model} cannot be used as a finder ({reason}); give the folder, or the name on the "
            "Hugging Face hub, of a zero-shot detector of transformers or of SAM 3"
        ) from None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = network.to(device).eval()

    def find_one(image: UInt8[np.ndarray, "H W 3"], name: str) -> dict[str, np.ndarray]:
        size = [image.shape[:2]]
        if is_sam3:
            inputs = processor(images=image, text=name, return_tensors="pt")
            (found,) = processor.post_process_instance_segmentation(
                network(**inputs.to(device)), target_sizes=size
            )
            return {
                "masks": found["masks"].bool().cpu().numpy(),
                "scores": found["scores"].cpu().numpy(),
            }
        # A full stop separates names in the prompts of Grounding DINO.
        text = [[name.replace(".", " ")]]
        inputs = processor(images=image, text=text, truncation=True, return_tensors="pt")
        (found,) = processor.post_process_grounded_object_detection(
            network(**inputs.to(device)), target_sizes=size
        )
        return {key: found[key].cpu().numpy() for key in ("boxes", "scores")}

    def find(image: UInt8[np.ndarray, "H W 3"], names: list[str]) -> list[dict[str, np.ndarray]]:
        # One after the other: Grounding DINO confuses the names of one prompt.
        with torch.inference_mode():
            return [find_one(image, name) for name in names]

    return find
