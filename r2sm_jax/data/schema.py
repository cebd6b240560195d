"""The records that every data source yields: one `Sample` per image, with instances and queries.

Masks are boolean arrays `[H W]` at the image's own resolution. For every instance `modal ⊆ amodal`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

MaskType = Literal["modal", "amodal"]


@dataclass(frozen=True)
class Instance:
    """One annotated object of an image.

    `amodal` is None where only the visible mask is known. `attributes` are words that dense supervision
    and statistics may use, such as `{"colour": "red", "pattern": "striped"}`. An `ignore` instance marks a
    region left out of loss and metrics.
    """

    id: int
    category: str
    modal: np.ndarray
    amodal: np.ndarray | None
    attributes: Mapping[str, str] = field(default_factory=dict)
    ignore: bool = False


@dataclass(frozen=True)
class Query:
    """One sentence about one image, the mask type that it asks for, and the instances that it means.

    `kind` describes the sentence: `{"task": "referring"|"reasoning", "hard": bool, "multi": bool, ...}`.
    No `instance_ids` is a query without a target.
    """

    id: int
    text: str
    mask_type: MaskType
    instance_ids: tuple[int, ...]
    kind: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One image `uint8 [H W 3]` with its instances and its queries."""

    image_id: int
    file_name: str
    image: np.ndarray
    instances: tuple[Instance, ...]
    queries: tuple[Query, ...]
