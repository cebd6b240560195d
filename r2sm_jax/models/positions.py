"""Published position tables, fitted to other numbers of tokens: what `transformers` does on the fly, done once."""

import jax
import numpy as np
from jaxtyping import Float


def resize_grid(
    table: Float[np.ndarray, "H W d"], size: int, *, antialias: bool = False
) -> Float[np.ndarray, "_h _w d"]:
    """An absolute table at `size` x `size`, bicubic with half-pixel centres; the same table where it has that size.

    The kernel is torch's (a = -0.75, no antialiasing, edges repeated), as DINOv2, CLIP and SigLIP are resized.
    `antialias` is the kernel of DINOv2 with registers (a = -0.5, widened where it shrinks).
    """
    if table.shape[:2] == (size, size):
        return table
    if antialias:
        return np.asarray(jax.image.resize(table, (size, size, table.shape[2]), "cubic", antialias=True))
    rows, columns = (_bicubic(side, size) for side in table.shape[:2])
    return np.einsum("hH,wW,HWd->hwd", rows, columns, table, optimize=True).astype(np.float32)


def resize_line(table: Float[np.ndarray, "n d"], size: int) -> Float[np.ndarray, "_m d"]:
    """A relative table at another length, linear with half-pixel centres, without antialiasing: as SAM does it
    (modeling/image_encoder.py, get_rel_pos)."""
    if len(table) == size:
        return table
    centres = np.clip((np.arange(size) + 0.5) * (len(table) / size) - 0.5, 0, len(table) - 1)
    left = np.minimum(centres.astype(int), max(len(table) - 2, 0))
    right, weight = np.minimum(left + 1, len(table) - 1), (centres - left)[:, None]
    return ((1 - weight) * table[left] + weight * table[right]).astype(np.float32)


def _bicubic(source: int, target: int, a: float = -0.75) -> Float[np.ndarray, "target source"]:
    centres = (np.arange(target) + 0.5) * (source / target) - 0.5
    first = np.floor(centres).astype(int)
    matrix = np.zeros((target, source))
    for tap in range(-1, 3):
        x = np.abs(centres - first - tap)
        near = (a + 2) * x**3 - (a + 3) * x**2 + 1
        far = a * (x**3 - 5 * x**2 + 8 * x - 4)
        at = np.clip(first + tap, 0, source - 1)
        np.add.at(matrix, (np.arange(target), at), np.where(x <= 1, near, far))
    return matrix
