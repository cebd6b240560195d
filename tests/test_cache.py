"""Features on disk: round trip, interruption, damage, a full disk; sentences and images of frozen
models."""

import errno
import os
import shutil
import tempfile
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image, ImageDraw

from r2sm_jax.cli import parse_config
from r2sm_jax.config import VisionConfig
from r2sm_jax.data import cache as feature_cache, prepare, text_cache
from r2sm_jax.data.cache import DTYPES, FeatureCache, digest, stamp, to_float16
from r2sm_jax.data.prepare import Prepared, PreparedSource, to_arrays
from r2sm_jax.data.text_states import TextStates
from r2sm_jax.errors import InputError
from r2sm_jax.models.image_encoder import VisionEncoder
from r2sm_jax.synthetic.procedural import ProceduralSource
from r2sm_jax.synthetic.scenes.paint import COLOURS
from r2sm_jax.synthetic.sources import open_source
from r2sm_jax.train import main, make_batches, prepare_data
from r2sm_jax.training.frozen_features import can_precompute, find_keys, store_keys

SENTENCES = [
    "the red mug",
    "the complete shape of the car",
    "only what can be seen of the dog",
    "a",
]


def arrays(seed: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(seed + 1, 3)).astype(np.float16), rng.normal(size=(2, 2)).astype(
        np.float16
    )


def test_what_is_kept_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_cache, "FILE_BYTES", 1000)  # several files
    cache = FeatureCache(tmp_path, "model")
    cache.add((str(seed), arrays(seed)) for seed in range(20))
    cache.add((str(seed), arrays(seed)) for seed in range(20, 25))
    for cached in (cache, FeatureCache(tmp_path, "model")):
        assert len(cached) == 25 and "25" not in cached
        for seed in range(25):
            for stored, before in zip(cached[str(seed)], arrays(seed), strict=True):
                assert stored.dtype == before.dtype and stored.tobytes() == before.tobytes()
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    assert not len(FeatureCache(tmp_path, "another"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no list of open files")
def test_few_files_are_open(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_cache, "FILE_BYTES", 1)  # a file for each
    cache = FeatureCache(tmp_path, "model")
    num_open = len(os.listdir("/proc/self/fd"))
    cache.add((str(seed), arrays(seed)) for seed in range(60))
    for cached in (cache, FeatureCache(tmp_path, "model")):
        with ThreadPoolExecutor(8) as threads:
            results = list(threads.map(cached.__getitem__, [str(i % 60) for i in range(600)]))
        assert all(np.array_equal(x[0], arrays(i % 60)[0]) for i, x in enumerate(results))
    assert len(os.listdir("/proc/self/fd")) <= num_open + feature_cache.MAX_OPEN_FILES + 2
    shutil.rmtree(cache.folder)
    feature_cache._open_file.cache_clear()
    with pytest.raises(InputError, match="cannot read the file any more"):
        cache["0"]


def test_kept_features_are_found_without_preparing_images(tmp_path, monkeypatch):
    source = open_source("scenes", count=5, size=48)
    cache = FeatureCache(tmp_path, "model")
    prepared = PreparedSource(source, 48, 12)
    first = find_keys(cache, prepared)
    assert first.is_new and first.name is not None and len(set(first.keys)) == 5
    store_keys(cache, first)
    assert find_keys(cache, PreparedSource(source, 64, 12)).is_new
    assert find_keys(cache, PreparedSource(source.subset([1, 0]), 48, 12)).keys == [
        first.keys[1],
        first.keys[0],
    ]

    monkeypatch.setattr(PreparedSource, "__getitem__", lambda self, index: pytest.fail("prepared"))
    again = find_keys(FeatureCache(tmp_path, "model"), prepared)
    assert again.keys == first.keys and not again.is_new
    # Other code may prepare other images, so they are looked at again.
    monkeypatch.undo()
    monkeypatch.setattr(type(source), "fingerprint", lambda self: "of other code")
    assert find_keys(cache, prepared) == replace(first, name=find_keys(cache, prepared).name)


def test_an_interrupted_run_leaves_whole_files(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_cache, "FILE_BYTES", 300)

    def items():
        yield from ((str(seed), arrays(seed)) for seed in range(10))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FeatureCache(tmp_path, "model").add(items())
    cached = FeatureCache(tmp_path, "model")
    assert 0 < len(cached) < 10 and not list(cached.folder.glob("*.part"))
    assert all(np.array_equal(cached[str(seed)][0], arrays(seed)[0]) for seed in range(len(cached)))


def test_a_damaged_cache_is_one_sentence(tmp_path):
    cache = FeatureCache(tmp_path, "model")
    cache.add((str(seed), arrays(seed)) for seed in range(5))
    (file,) = cache.folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(InputError, match=r"\.safetensors is damaged; delete it"):
        FeatureCache(tmp_path, "model")


def test_a_file_that_cannot_be_opened_is_not_called_damaged(tmp_path, monkeypatch):
    cache = FeatureCache(tmp_path, "model")
    cache.add([("0", arrays(0))])

    def refuse(path: Path, mode: str) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(
        InputError, match=rf"cannot read the file \({os.strerror(errno.EMFILE)}\); permit .*ulimit"
    ) as error:
        FeatureCache(tmp_path, "model")
    assert "damaged" not in str(error.value)


def test_threads_read_without_the_call_that_windows_does_not_have(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_cache, "pread", feature_cache.seek_and_read)
    cache = FeatureCache(tmp_path, "model")
    cache.add((str(seed), arrays(seed)) for seed in range(40))
    with ThreadPoolExecutor(8) as threads:
        cached = list(threads.map(lambda i: cache[str(i % 40)][0], range(2000)))
    assert all(np.array_equal(x, arrays(i % 40)[0]) for i, x in enumerate(cached[:400]))


def test_what_float16_cannot_hold_is_refused(tmp_path):
    cache = FeatureCache(tmp_path, "model")
    with np.errstate(over="ignore"), pytest.raises(InputError, match="beyond its range"):
        cache.add([("0", (to_float16(np.array([1e5], np.float32)),))])
    assert not len(FeatureCache(tmp_path, "model")) and not os.listdir(cache.folder)


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(5_000_000_000))
    cache = FeatureCache(tmp_path, "model")
    cache.make_room("images", 100, 4_000_000_000)
    assert "keeping 100 images, 4.0 GB" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"1,200 images take 4.9 GB and the disk has 5.0 GB left"):
        cache.make_room("images", 1200, 4_900_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0))
    cache.make_room("images", 0, 0)  # all is there already: a full disk does not matter


def test_a_folder_below_a_file_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--data\.cache-dir .*file/below.* can be written to"):
        FeatureCache(tmp_path / "file" / "below", "model")


def test_a_hash_tells_values_shapes_and_types_apart():
    a = np.arange(6, dtype=np.int32)
    different = [
        a,
        a + 1,
        a.reshape(2, 3),
        a.reshape(3, 2),
        a.astype(np.int64),
        a.astype(np.uint32),
    ]
    assert (
        len({digest(x) for x in different} | {digest("a", "b"), digest("ab"), digest("a", "b", "")})
        == 9
    )
    assert digest(a[::2]) == digest(a[::2].copy())


def test_sentences_are_encoded_once_for_all_runs(bert_folder, tmp_path):
    def texts(layers: tuple[int, ...] = (1, 2)) -> TextStates:
        return TextStates(str(bert_folder), layers=layers, max_tokens=16, cache_dir=str(tmp_path))

    first = texts()
    assert first.encode(SENTENCES[:3]) == 3 and first.encode(SENTENCES) == 1
    again = texts()
    assert again.encode([*SENTENCES, "a new one"]) == 1
    for sentence in SENTENCES:
        assert again.states_of(sentence).tobytes() == first.states_of(sentence).tobytes()
    assert texts((2,)).encode(SENTENCES) == len(SENTENCES)


def test_states_beyond_the_memory_that_they_may_take_are_in_files(
    bert_folder, tmp_path, monkeypatch
):
    def texts() -> TextStates:
        return TextStates(str(bert_folder), layers=(1, 2), max_tokens=16)

    in_memory = texts()
    in_memory.encode(SENTENCES)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(text_cache, "MAX_MEMORY_BYTES", in_memory.states_of(SENTENCES[0]).nbytes)
    in_files = texts()
    for part in (SENTENCES[:1], SENTENCES[1:]):
        in_files.encode(part)
    kept = [s for s in SENTENCES if isinstance(in_files.cache._states[s], np.ndarray)]
    assert len(kept) < len(SENTENCES) / 2
    assert not list(tmp_path.iterdir())  # a process that is killed leaves nothing behind
    for sentence in SENTENCES:
        assert in_files.count_tokens(sentence) == in_memory.count_tokens(sentence)
        np.testing.assert_array_equal(in_files.states_of(sentence), in_memory.states_of(sentence))
    for cached, expected in zip(in_files(SENTENCES), in_memory(SENTENCES), strict=True):
        np.testing.assert_array_equal(cached, expected)


def test_arrays_of_any_size_and_type_come_back(tmp_path):
    arrays = tuple(
        np.ones(shape, dtype)
        for dtype in DTYPES.values()
        for shape in ((4,), (0, 3), (2, 0), (3, 2))
    )
    FeatureCache(tmp_path, "model").add([("all", arrays), ("none", ()), ("one", arrays[:1])])
    cached = FeatureCache(tmp_path, "model")["all"]
    assert [(x.dtype, x.shape) for x in cached] == [(x.dtype, x.shape) for x in arrays]
    assert all(map(np.array_equal, cached, arrays))


def parameters(run: Path) -> dict[str, np.ndarray]:
    from r2sm_jax.inference.run import restore_weights

    cached = nnx.to_flat_state(restore_weights(run).params)
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in cached}


@pytest.mark.slow
@pytest.mark.usefixtures("steps_alone")
@pytest.mark.parametrize("stem", ["sam", "conv"])
def test_training_from_the_cache_is_training(
    stem, published_flags, published_folders, tmp_path, command
):
    """A frozen plain ViT beside frozen SAM, after which no pixel is needed, or beside a stem that
    is trained."""
    frozen = ["--model.vision.vit", published_folders["dinov2"], "--train.steps", 2]
    frozen += (
        [
            "--model.vision.encoder",
            "sam",
            "--model.vision.sam",
            published_folders["sam"],
            "--model.vision.sam-frozen",
        ]
        if stem == "sam"
        else []
    )
    cache = ["--data.cache-dir", tmp_path / "cache"]
    runs = {}
    for name, extra in {"without": [], "filled": cache, "read": cache}.items():
        end = command(
            main, *published_flags, *frozen, "--data.no-mirror", "--run", tmp_path / name, *extra
        )
        assert end.code == 0, end
        runs[name] = parameters(tmp_path / name), end.out
    without, filled, read = (weights for weights, _ in runs.values())
    assert "features of 0 images computed" in runs["read"][1]
    assert "features of 0 images" not in runs["filled"][1] and "features of" in runs["filled"][1]
    assert all(filled[name].tobytes() == read[name].tobytes() for name in filled)
    for name, weights in without.items():
        np.testing.assert_allclose(
            filled[name], weights, atol=2e-3, err_msg=name
        )  # states are float16


@pytest.mark.parametrize(
    ("frozen", "stored"),
    [
        ({}, (True, False)),
        ({"encoder": "vit", "sam": None, "sam_frozen": False, "vit": "plain"}, (False, True)),
    ],
    ids=["SAM", "plain ViT"],
)
def test_what_was_kept_gives_what_the_encoder_gives(frozen, stored):
    small = VisionConfig(
        image_size=48, patch_size=16, dim=32, depth=2, heads=2, mlp_dim=32, out_dim=8
    )
    config = replace(small, **({"encoder": "sam", "sam": "sam", "sam_frozen": True} | frozen))
    config = replace(config, vit_family="dinov2", vit_patch_size=8)
    encoder = VisionEncoder(config, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    images = jnp.asarray(np.random.default_rng(0).normal(size=(2, 48, 48, 3)), jnp.float32)
    features = encoder.frozen_features(images)
    assert (features.sam is not None, features.vit is not None) == stored
    whole = encoder(images)
    np.testing.assert_array_equal(encoder(images, features).tokens, whole.tokens)
    # It is read, and not computed anew: other features, other tokens.
    other = jax.tree.map(lambda x: x[::-1], features)
    assert not np.allclose(encoder(images, other).tokens, whole.tokens, atol=1e-2)


@pytest.fixture
def cutout_folder(tmp_path):
    """Twelve discs in as many colours."""
    folder = tmp_path / "cutouts"
    folder.mkdir()
    for k, colour in enumerate(list(COLOURS)[:12]):
        disc = Image.new("RGBA", (80, 80))
        ImageDraw.Draw(disc).ellipse((7, 7, 60 + k, 72), tuple(COLOURS[colour]))
        disc.save(folder / f"{colour}-disc.png")
    return folder


def same(a: Prepared, b: Prepared) -> bool:
    """Values and types of two prepared samples."""
    a, b = to_arrays(a), to_arrays(b)
    return [*a] == [*b] and all(a[x].dtype == b[x].dtype and np.array_equal(a[x], b[x]) for x in a)


@pytest.mark.parametrize("kind", ["scenes", "cutouts"])
def test_samples_are_prepared_once_for_all_runs(kind, tmp_path, monkeypatch, request):
    spec = "scenes" if kind == "scenes" else f"cutouts:{request.getfixturevalue('cutout_folder')}"
    drawn: list[int] = []
    draw = ProceduralSource.__getitem__
    monkeypatch.setattr(
        ProceduralSource, "__getitem__", lambda self, i: drawn.append(i) or draw(self, i)
    )

    def prepared(
        count: int, folder: Path | None = tmp_path / "cache", **options: int
    ) -> PreparedSource:
        source = PreparedSource(open_source(spec, count=count, **options), 48, 12)
        drawn.clear()
        assert source.cache(folder and str(folder))
        return source

    first = prepared(4)
    assert drawn == [0, 0, 1, 2, 3]  # the first one tells how large they are
    again = prepared(5)
    assert drawn == [0, 4]
    fresh = prepared(5, None)
    assert drawn == [0]  # the rest at its first visit
    for index in (3, 0, 4, 3, 2, 1, 0):
        assert same(fresh[index], again[index])
    assert drawn == [0, 3, 0, 4, 2, 1]
    assert same(first[3], again[3]) and not same(again[3], again[4])
    monkeypatch.setattr(prepare, "MAX_DISK_BYTES", 1)
    assert not PreparedSource(open_source(spec, count=3), 48, 12).cache(str(tmp_path / "cache"))
    monkeypatch.undo()
    monkeypatch.setattr(
        ProceduralSource, "__getitem__", lambda self, i: drawn.append(i) or draw(self, i)
    )
    for other in ({"seed": 1}, {"size": 64}, {"queries": 3}):
        prepared(2, **other)
        assert len(drawn) == 3, other


def test_each_process_prepares_its_share(tmp_path, monkeypatch):
    """Two processes in turn: each writes what the other leaves to it, then both read all."""
    source = open_source("scenes", count=5)
    first, second = PreparedSource(source, 48, 12), PreparedSource(source, 48, 12)
    shares: list[list[int]] = []
    prepare_all = PreparedSource._prepare_all

    def record(self, indices):
        shares.append(list(indices))
        return prepare_all(self, indices)

    monkeypatch.setattr(PreparedSource, "_prepare_all", record)

    def run_second():
        second.cache(str(tmp_path), process=(1, 2))

    assert first.cache(str(tmp_path), process=(0, 2), wait=run_second)
    assert shares == [[0, 2, 4], [1, 3]]
    assert len([first[index] for index in range(5)]) == 5


def test_samples_are_drawn_anew_after_a_file_or_the_code_has_changed(
    cutout_folder, tmp_path, monkeypatch
):
    source = open_source(f"cutouts:{cutout_folder}", count=1)
    before = source.fingerprint()
    assert open_source(f"cutouts:{cutout_folder}", count=2).fingerprint() == before
    assert open_source(f"cutouts:{cutout_folder}", "dev", count=1).fingerprint() != before
    for changed in (source.files[-1], Path(feature_cache.__file__)):
        monkeypatch.setattr(
            feature_cache,
            "stamp",
            lambda path, changed=changed: "new" if path == changed else stamp(path),
        )
        assert source.fingerprint() != before


def test_why_features_are_not_cached(tmp_path, capsys):
    def obstacle(*flags: str) -> str:
        config = parse_config(["--data.cache-dir", str(tmp_path), *flags])
        is_cached = can_precompute(config)
        printed = capsys.readouterr().out
        assert is_cached == (not printed)
        return printed

    frozen = [
        "--model.vision.encoder",
        "sam",
        "--model.vision.sam",
        "facebook/sam-vit-base",
        "--model.vision.sam-frozen",
        "--model.vision.patch-size",
        "16",
    ]
    still = ["--data.no-mirror"]
    assert not obstacle(*frozen, *still) and not obstacle(
        "--model.vision.vit", "facebook/dinov2-small", *still
    )
    for extra in ([], [*still, "--data.crop", "0.8"], [*still, "--data.colour-jitter", "0.1"]):
        assert "augmented" in obstacle(*frozen, *extra)
    for model in ([], frozen[:2]):
        assert "no image encoder is frozen" in obstacle(*model, *still)


def test_sentences_and_prepared_scenes_are_kept_for_other_runs(tiny_config, tmp_path, capsys):
    data = replace(tiny_config.data, cache_dir=str(tmp_path / "cache"))
    config = replace(tiny_config, data=data)
    batches = make_batches(prepare_data(config, print), config)
    next(batches)
    batches.close()
    assert len(list((tmp_path / "cache").iterdir())) == 2
    assert not can_precompute(config)
    assert "not cached, since no image encoder is frozen" in capsys.readouterr().out
