"""Tensors of a pickle checkpoint, without running what is in it: only tensors and the dict around
them are built.

The format is the one that torch wrote before version 1.6 (`_legacy_load` in
torch/serialization.py): four pickles (magic number, version, sizes of this machine's integers, the
state), the keys of the storages, the storages.
"""

import pickle
from collections import OrderedDict
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from r2sm_jax.errors import InputError

MAGIC = 0x1950A86A20F9469CFC6C
TYPES = {"FloatStorage": "<f4", "DoubleStorage": "<f8", "HalfStorage": "<f2", "LongStorage": "<i8"}


class _TensorUnpickler(pickle.Unpickler):
    """Knows three names; a pickle can call nothing else. Tensors are views of `storages`, which are
    filled later."""

    def __init__(self, file: BufferedReader):
        super().__init__(file)
        self.storages: dict[str, np.ndarray] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _view
        if module == "torch" and name in TYPES:
            return TYPES[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no tensor")

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, dtype, key, _, count, view = pid
        if (
            kind != "storage"
            or view is not None
            or dtype not in TYPES.values()
            or type(count) is not int
        ):
            raise pickle.UnpicklingError("it has storages of an unknown kind")
        return self.storages.setdefault(key, np.empty(count, dtype))


def _view(
    storage: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> np.ndarray:
    """A tensor; its numbers are in elements. Raises ValueError if it would lie outside its storage,
    or be larger."""
    # numpy checks the bounds, but in 64 bits, and not that a tensor is larger than its storage,
    # with a stride of 0.
    reach = (
        [(n - 1) * abs(stride) for n, stride in zip(shape, strides, strict=True)]
        if prod(shape)
        else []
    )
    if max([prod(shape), *reach]) > storage.size:
        raise ValueError("a tensor is larger than its storage")
    size = storage.itemsize
    return np.ndarray(
        shape, storage.dtype, storage, offset * size, [stride * size for stride in strides]
    )


def read_pickle(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint by key. Raises InputError if the file asks for anything else, is
    damaged, or has another format."""
    try:
        with path.open("rb") as file:
            return _read(file)
    except Exception as error:  # whatever a hostile file provokes
        raise InputError(
            f"{path} is not a checkpoint of tensors alone in torch's older format ({error})"
        ) from None


def _read(file: BufferedReader) -> dict[str, np.ndarray]:
    readers = [_TensorUnpickler(file) for _ in range(5)]
    magic, version, _, state, keys = (reader.load() for reader in readers)
    if (magic, version) != (MAGIC, 1001):
        raise ValueError("the magic number is another")
    tensors = {
        key: value
        for key, value in dict.items(state)
        if type(key) is str and type(value) is np.ndarray
    }
    if len(tensors) < len(state):
        raise ValueError("not every entry is a tensor")
    storages = readers[3].storages
    if sorted(keys) != sorted(storages):
        raise ValueError("it does not have the storages of its tensors")
    for key in keys:
        if np.frombuffer(file.read(8), "<i8")[0] != storages[key].size:
            raise ValueError("a storage has another size than its tensors say")
        if file.readinto(storages[key].data) != storages[key].nbytes:
            raise ValueError("a storage is cut short")
    return {key: tensor.copy() for key, tensor in tensors.items()}
