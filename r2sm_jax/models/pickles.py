"""Tensors of a pickle checkpoint, without running what is in it: only tensors and the dict around them are built.

The format is the one that torch wrote before version 1.6 (`_legacy_load` in torch/serialization.py): four pickles
(magic number, version, sizes of this machine's integers, the state), the keys of the storages, the storages.
"""

import pickle
from collections import OrderedDict
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from r2sm_jax.errors import InputError

MAGIC = 0x1950A86A20F9469CFC6C
TYPES = {"FloatStorage": "<f4", "DoubleStorage": "<f8", "HalfStorage": "<f2", "LongStorage": "<i8"}


class _Storage(NamedTuple):
    key: str
    dtype: str
    count: int


class _Tensor(NamedTuple):
    """A view of a storage that is read later. Sizes and strides are in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def read(self, storages: dict[str, np.ndarray]) -> np.ndarray:
        """A copy. Raises ValueError if it would lie outside its storage, or be larger."""
        values = storages[self.storage.key]
        numbers = (self.offset, *self.shape, *self.strides)
        if len(self.shape) != len(self.strides) or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError("a tensor has impossible sizes")
        last = self.offset + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        if prod(self.shape) > values.size or (prod(self.shape) and last >= values.size):
            raise ValueError("a tensor reaches beyond its storage")
        strides = [stride * values.itemsize for stride in self.strides]
        return np.lib.stride_tricks.as_strided(values[self.offset :], self.shape, strides).copy()


class _TensorUnpickler(pickle.Unpickler):
    """Knows three names; a pickle can call nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, shape, strides, *_: _Tensor(storage, offset, shape, strides)
        if module == "torch" and name in TYPES:
            return TYPES[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no tensor")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, count, view = pid
        if kind != "storage" or view is not None or dtype not in TYPES.values():
            raise pickle.UnpicklingError("it has storages of an unknown kind")
        return _Storage(key, dtype, count)


def read_pickle(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint by key.

    Raises:
        InputError: the file asks for anything else, is damaged, or has another format.
    """
    try:
        with path.open("rb") as file:
            return _read(file)
    except Exception as error:  # whatever a hostile file provokes
        raise InputError(f"{path} is not a checkpoint of tensors alone in torch's older format ({error})") from None


def _read(file: BinaryIO) -> dict[str, np.ndarray]:
    magic, version, _, state, keys = (_TensorUnpickler(file).load() for _ in range(5))
    if (magic, version) != (MAGIC, 1001):
        raise ValueError("the magic number is another")
    tensors = {key: value for key, value in dict.items(state) if type(key) is str and type(value) is _Tensor}
    if len(tensors) < len(state):
        raise ValueError("not every entry is a tensor")
    known = {tensor.storage.key: tensor.storage for tensor in tensors.values()}
    storages: dict[str, np.ndarray] = {}
    for key in keys:
        size = int(np.frombuffer(file.read(8), "<i8")[0])
        if size != known[key].count:
            raise ValueError("a storage has another size than its tensors say")
        data = file.read(size * np.dtype(known[key].dtype).itemsize)
        storages[key] = np.frombuffer(data, known[key].dtype, size)
    return {key: tensor.read(storages) for key, tensor in tensors.items()}
