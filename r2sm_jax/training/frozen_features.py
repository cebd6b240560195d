"""Features of the training images by frozen encoders: computed once, and kept on disk
(`--data.cache-dir`)."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, UInt8

from r2sm_jax.cli import to_json
from r2sm_jax.config import Config
from r2sm_jax.data.cache import FeatureCache, digest, to_float16
from r2sm_jax.data.prepare import PreparedSource
from r2sm_jax.models.r2sm import R2SM
from r2sm_jax.progress import show_progress
from r2sm_jax.training.sharding import allgather, barrier, to_host

Lookup = Callable[[int], dict[str, np.ndarray]]
"""Index of a training image -> its features, as entries of a batch (`frozen_stride16`, ...)."""


def can_precompute(config: Config) -> bool:
    """Whether image features are the same at every step and there is a folder to keep them in.

    Prints the reason and the flags if there is a folder and features change.
    """
    vision, data = config.model.vision, config.data
    if data.cache_dir is None:
        return False

    stem_is_frozen = vision.sam_frozen or (
        vision.efficientnet is not None and vision.efficientnet_frozen_to > 2
    )
    vit_is_frozen = vision.vit is not None and vision.vit_frozen
    if not stem_is_frozen and not vit_is_frozen:
        reason = (
            "no image encoder is frozen "
            "(--model.vision.sam-frozen, --model.vision.vit, --model.vision.efficientnet)"
        )
    elif data.keeps_nothing:
        reason = "pictures are made at each visit (--data.no-fresh --data.workers 0)"
    elif data.mirror or data.crop < 1 or data.colour_jitter:
        reason = "images are augmented (--data.no-mirror --data.crop 1 --data.colour-jitter 0)"
    else:
        return True
    print(f"--data.cache-dir: image features are not cached, since {reason}", flush=True)
    return False


def precompute(
    graphdef: nnx.GraphDef, weights: nnx.State, prepared: PreparedSource, config: Config
) -> Lookup:
    """Computes the features that are not in the cache yet; every process computes its share.

    Raises InputError if the disk has too little space, or a feature does not fit into float16.
    """
    process, processes = jax.process_index(), jax.process_count()
    rows = config.train.batch_size // processes
    devices = np.array(jax.local_devices()[: config.train.devices // processes])
    mesh = Mesh(devices, "rows")
    replicated = NamedSharding(mesh, PartitionSpec())
    by_row = NamedSharding(mesh, PartitionSpec("rows"))
    weights = jax.device_put(jax.tree.map(to_host, weights), replicated)

    # One cache for each set of frozen weights, one entry for each image as the encoder reads it.
    cache = FeatureCache(Path(config.data.cache_dir or ""), hash_encoder(weights, config))
    index = find_keys(cache, prepared)
    missing = {key: number for number, key in enumerate(index.keys) if key not in cache}
    # The list of the first process, since one that looks later may find some that were written
    # meanwhile.
    missing = allgather(missing)[0]

    @jax.jit
    def encode(
        weights: nnx.State, image: UInt8[Array, "b H W 3"], image_mask: Bool[Array, "b H W"]
    ):
        model: R2SM = nnx.merge(graphdef, weights)
        return model.frozen_features(image, image_mask)

    def encode_missing(
        advance: Callable[[int], None],
    ) -> Iterator[tuple[str, tuple[np.ndarray, ...]]]:
        mine = list(missing)[process::processes]
        for start in range(0, len(mine), rows):
            batch_keys = mine[start : start + rows]
            # The last batch is filled up with copies, so that one program is compiled.
            filled = (batch_keys * rows)[:rows]
            samples = list(threads.map(prepared.__getitem__, (missing[key] for key in filled)))
            images = np.stack([sample["image"] for sample in samples])
            image_masks = np.stack([sample["image_mask"] for sample in samples])
            features = encode(weights, *jax.device_put((images, image_masks), by_row))
            arrays = [np.asarray(x, np.float32) for x in features if x is not None]
            for row, key in enumerate(batch_keys):
                yield key, tuple(to_float16(x[row]) for x in arrays)
            advance(len(batch_keys))

    # Only shapes, so that no image is prepared where nothing is missing.
    image_size = prepared.sizes[0]
    image = jax.ShapeDtypeStruct((1, image_size, image_size, 3), np.uint8)
    image_mask = jax.ShapeDtypeStruct((1, image_size, image_size), np.bool_)
    spec = jax.eval_shape(encode, weights, image, image_mask)
    shapes = {f"frozen_{name}": x for name, x in spec._asdict().items() if x is not None}
    if missing:
        bytes_of_image = sum(2 * x.size for x in shapes.values())
        cache.make_room("images", len(missing), len(missing) * bytes_of_image)
        own_share = -(-len(missing) // processes)
        progress = show_progress("encoding images, once", own_share)
        with ThreadPoolExecutor() as threads, progress as advance:
            cache.add(encode_missing(advance))
    if process == 0 and index.is_new:
        store_keys(cache, index)
    barrier()
    cache.refresh()
    print(f"features of {len(missing):,} images computed", flush=True)

    def lookup(number: int) -> dict[str, np.ndarray]:
        return dict(zip(shapes, cache[index.keys[number]], strict=True))

    return lookup


@dataclass(frozen=True)
class ImageKeys:
    """The keys of all training images in the cache: hashes of the images as the encoder reads them.

    So equal images share their features, and features outlive a change of the code.
    """

    keys: list[str]
    name: str | None
    """The key of the list itself; None for a source without a fingerprint."""
    is_new: bool
    """Whether the list is not in the cache yet."""


def find_keys(cache: FeatureCache, prepared: PreparedSource) -> ImageKeys:
    """Reads the keys that a run on the same images has stored, so that no image is prepared; else
    prepares all images, and every process its share."""
    num_images = len(prepared)
    fingerprint = prepared.source.fingerprint()
    name = None
    if fingerprint is not None:
        name = digest("keys of images", fingerprint, num_images, *prepared.sizes)

    stored = None
    if name is not None and name in cache:
        (stored,) = cache[name]
    # What the first process has found, since a later one may find more.
    stored = allgather(stored)[0]
    if stored is not None:
        return ImageKeys([row.tobytes().hex() for row in stored], name, is_new=False)

    def hash_image(number: int) -> str:
        sample = prepared[number]
        return digest(sample["image"], sample["image_mask"])

    own_numbers = range(jax.process_index(), num_images, jax.process_count())
    own_keys = []
    with (
        ThreadPoolExecutor() as threads,
        show_progress("looking for kept features", len(own_numbers)) as advance,
    ):
        for key in threads.map(hash_image, own_numbers):
            own_keys.append(key)
            advance(1)
    shares = allgather(own_keys)
    # Number 0 is the first of process 0, number 1 the first of process 1, and so on.
    keys = [shares[number % len(shares)][number // len(shares)] for number in range(num_images)]
    return ImageKeys(keys, name, is_new=True)


def store_keys(cache: FeatureCache, index: ImageKeys) -> None:
    """Stores the keys for later runs, if the source has a fingerprint."""
    if index.name is not None:
        hashes = np.frombuffer(bytes.fromhex("".join(index.keys)), np.uint8)
        cache.add([(index.name, (hashes.reshape(len(index.keys), -1),))])


def hash_encoder(weights: nnx.State, config: Config) -> str:
    """Hash of everything that frozen features depend on but the image: sizes, precision and frozen
    weights.

    Where published weights lie does not matter.
    """
    vision = config.model.vision
    sizes = to_json(vision)
    for name in ("sam", "vit", "efficientnet"):
        sizes[name] = getattr(vision, name) is not None
    frozen = nnx.filter_state(weights["vision"], nnx.Not(nnx.Param))
    arrays = [np.asarray(x) for x in jax.tree.leaves(frozen)]
    return digest("vision", sizes, config.model.dtype, *arrays)
