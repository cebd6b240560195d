"""TIPS: the same tokens as its published code computes, sizes from the file, and bad files."""

import io
import json
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from published_tips import (
    DEPTH,
    PATCH,
    PIECES,
    SIDE,
    TEXT_DIM,
    text_arrays,
    text_states,
    vision_arrays,
    vision_tokens,
    write_sentence_pieces,
    write_text,
    write_vision,
)
from tiny_models import TINY, WIDTH

import r2sm_jax
from r2sm_jax.cli import load_config_file
from r2sm_jax.config import MINILM, ModelConfig, TextConfig, VisionConfig
from r2sm_jax.data.text_states import TextStates
from r2sm_jax.data.tokenizer import QueryTokenizer
from r2sm_jax.errors import InputError
from r2sm_jax.models import hub
from r2sm_jax.models.encoder_sizes import KNOWN_SIZES
from r2sm_jax.models.image_encoder import VisionEncoder
from r2sm_jax.models.keys_tips import tips_vit_sizes
from r2sm_jax.models.plain_vit import IMAGENET
from r2sm_jax.models.pretrained import load_pretrained, read_encoder_sizes
from r2sm_jax.models.r2sm import build_model
from r2sm_jax.models.text_encoder import load_tips_text
from r2sm_jax.models.tips import CHECKPOINTS, find_tips

VIT_FLAG = "--model.vision.vit"
BLOCK = "encoder/transformer/encoderblock_1"


@nnx.jit
def run(module, x):
    return module(x)


def load(source: Path | str, grid: int = SIDE) -> VisionEncoder:
    """The image encoder of a segmenter with a vision tower alone."""
    vision = VisionConfig(
        encoder="vit", vit=str(source), image_size=8 * grid, patch_size=8, out_dim=16
    )
    config = ModelConfig(vision)
    sizes = read_encoder_sizes(config)
    model = build_model(config, sizes, rngs=nnx.Rngs(0))
    graphdef, params, frozen = nnx.split(model, nnx.Param, ...)
    params, frozen, reports = load_pretrained(config, sizes, params, frozen)
    (report,) = reports.values()
    assert report.initialised == ["vision.join.kernel"] and not report.unused
    return nnx.merge(graphdef, params, frozen).vision


def refused(source: Path | str) -> str:
    """The sentence with which a vision tower is refused."""
    with pytest.raises(InputError) as raised:
        load(source)
    message = str(raised.value)
    assert "\n" not in message
    return message


def spoiled(folder: Path, name: str, value: np.ndarray | None) -> Path:
    """A vision tower with another array of this name; None = without it."""
    arrays = vision_arrays()
    arrays.pop(name, None)
    if value is not None:
        arrays[name] = value
    file = folder / "spoiled_vision.npz"
    np.savez(file, **arrays)
    return file


# Image tower


@pytest.mark.parametrize("grid", [SIDE, 3, 7])
def test_tokens_are_those_of_the_published_code(grid, tmp_path):
    """The published grid; at 3 and 7 positions are interpolated."""
    file = write_vision(tmp_path)
    ours = load(file, grid).vit
    assert ours is not None
    size = grid * PATCH
    pixels = np.random.default_rng(grid).uniform(size=(2, size, size, 3))
    image = ((pixels - IMAGENET[0]) / IMAGENET[1]).astype(np.float32)
    tokens = np.asarray(run(ours, image))
    expected = vision_tokens(vision_arrays(), pixels)
    print(f"largest difference {np.abs(tokens - expected).max():.1e}, {expected.std():.2f}")
    assert 0.1 < expected.std() < 10
    np.testing.assert_allclose(tokens, expected, atol=1e-4)

    # The last block makes a difference, and so do both class tokens.
    attended = vision_tokens(vision_arrays(), pixels, values_alone=False)
    assert np.abs(attended - expected).max() > 0.01
    arrays = vision_arrays()
    arrays["encoder/ToTokenSequence_0/cls"][0, 1] *= -1
    assert np.abs(vision_tokens(arrays, pixels) - expected).max() > 0.01


@pytest.mark.parametrize(
    ("name", "dim", "heads", "side"), [("tips-s14", 384, 6, 16), ("tipsv2-b14", 768, 12, 32)]
)
def test_sizes_are_read_from_the_shapes(name, dim, heads, side, monkeypatch):
    """Those of S/14 and of the second version's B/14."""

    def zeros(rng, shape):
        return np.broadcast_to(np.float32(0), shape)

    monkeypatch.setattr("published_tips.random_array", zeros)
    arrays = vision_arrays(dim=dim, heads=heads, mlp_dim=4 * dim, depth=12, patch=14, side=side)
    assert tips_vit_sizes(arrays, Path("x.npz")) == KNOWN_SIZES[name].vit


def test_arrays_of_other_shapes_are_named(tmp_path):
    for name, shape in (
        (f"{BLOCK}/MultiHeadDotProductAttention_0/key/kernel", (32, 2, 16)),
        (f"{BLOCK}/MlpBlock_0/Dense_1/bias", (31,)),
        ("encoder/ToTokenSequence_0/posembed_input", (1, 4, 3, 32)),
        ("encoder/ToTokenSequence_0/cls", (2, 32)),
        ("encoder/encoder_norm/scale", (64,)),
        (
            "encoder/transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel",
            (32, 5, 6),
        ),
    ):
        file = spoiled(tmp_path, name, np.zeros(shape, np.float32))
        message = refused(file)
        assert str(file) in message and name in message and str(shape) in message


def test_missing_and_unknown_arrays_are_named(tmp_path):
    name = f"{BLOCK}/MlpBlock_0/Dense_1/bias"
    assert "blocks.1.mlp.layers.1.bias" in refused(spoiled(tmp_path, name, None))
    name = "encoder/ToTokenSequence_0/cls"
    assert name in refused(spoiled(tmp_path, name, None))
    name = "encoder/another"
    assert name in refused(spoiled(tmp_path, name, np.zeros(3, np.float32)))
    np.savez(tmp_path / "torch_vision.npz", cls_token=np.zeros((1, 1, 32), np.float32))
    assert "JAX" in refused(tmp_path / "torch_vision.npz")


def test_nothing_is_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path(tmp_path, "sprung").touch, ())

    name = f"{BLOCK}/MlpBlock_0/Dense_1/bias"
    trap = np.empty(1, object)
    trap[0] = Trap()
    message = refused(spoiled(tmp_path, name, trap))
    assert name in message and not (tmp_path / "sprung").exists()


def test_damaged_files_are_one_sentence(tmp_path):
    file = write_vision(tmp_path)
    content = file.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"<html>", content[:-3000] + bytes(3000)):
        file.write_bytes(damaged)
        assert str(file) in refused(file)
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").rename(file)
    assert str(file) in refused(file)
    name = f"{BLOCK}/MlpBlock_0/Dense_1/bias"
    assert name in refused(spoiled(tmp_path, name, np.zeros(32, np.int32)))


# Text tower


def test_states_are_those_of_the_published_code(tmp_path):
    """Every layer, of sentences of several lengths; id 0 is padding wherever it stands."""
    encoder = load_tips_text(write_text(tmp_path))
    rng = np.random.default_rng(0)
    ids = rng.integers(1, len(PIECES), (5, 12)).astype(np.int32)
    lengths = np.array([12, 1, 7, 9, 3])
    mask = np.arange(12) < lengths[:, None]
    ids = np.where(mask, ids, 0)
    ids[3, 4] = 0
    states = encoder.hidden_states(jnp.asarray(ids), jnp.asarray(mask))
    expected = text_states(text_arrays(), ids, (ids == 0).astype(int))
    assert len(states) == len(expected) == DEPTH + 1
    for ours, theirs in zip(states, expected, strict=True):
        assert 0.1 < theirs.std() < 10
        print(f"largest difference {np.abs(np.asarray(ours) - theirs)[ids > 0].max():.1e}")
        np.testing.assert_allclose(np.asarray(ours)[ids > 0], theirs[ids > 0], atol=1e-4)


def test_a_text_tower_of_other_shapes_is_refused(tmp_path):
    file = write_text(tmp_path)
    for name, shape in (
        ("transformer/encoderblock_1/MlpBlock_0/Dense_0/bias", (41,)),
        ("transformer/encoderblock_0/MultiHeadDotProductAttention_0/out/kernel", (4, 6, 23)),
        ("text_encoder_norm/bias", (25,)),
        ("token_emb/emb_var", (24,)),
    ):
        np.savez(file, **text_arrays() | {name: np.zeros(shape, np.float32)})
        with pytest.raises(InputError) as raised:
            load_tips_text(file)
        message = str(raised.value)
        assert str(file) in message and name in message and str(shape) in message
    np.savez(file, **vision_arrays())
    with pytest.raises(InputError, match="text tower"):
        load_tips_text(file)


def test_sentence_pieces_by_hand(tmp_path):
    """The best split by the sum of scores: "mugs" is mug + s (-8.5), not one piece (-9)."""
    file = tmp_path / "tokenizer.model"
    write_sentence_pieces(file)
    tokenizer = QueryTokenizer(file, vocab_size=len(PIECES), max_tokens=8)
    index = {text: number for number, (text, _, _) in enumerate(PIECES)}
    (ids,) = tokenizer(["The  red MUGS"])
    assert ids == [index["\u2581the"], index["\u2581red"], index["\u2581mug"], index["s"]]
    (ids,) = tokenizer(["the \u6771\u4eac mug"])
    assert ids == [index["\u2581the"], index["\u2581"], 1, index["\u2581mug"]]
    tokenizer(["the red mug the red mug the red mug"])
    assert tokenizer.truncated and tokenizer.cut_off("the red mug the red mug the red mug") == "mug"


def test_bad_sentence_pieces_are_one_sentence(tmp_path):
    file = tmp_path / "tokenizer.model"
    cases = {
        "cannot be read": lambda: None,
        "not a SentencePiece": lambda: file.write_bytes(b"\xff\xffno"),
        "unigram": lambda: write_sentence_pieces(file, kind=2),
        "embeddings": lambda: write_sentence_pieces(file),
    }
    for word, write in cases.items():
        write()
        with pytest.raises(InputError, match=word) as raised:
            QueryTokenizer(file, vocab_size=3, max_tokens=8)
        assert str(file) in str(raised.value)


# Two language models


@pytest.fixture
def pair(tmp_path, bert_folder) -> TextConfig:
    """A tiny BERT that decides, and a tiny text tower that says what to look for."""
    return TextConfig(
        name=str(write_text(tmp_path)),
        layers=(DEPTH,),
        dim=TEXT_DIM,
        max_tokens=48,
        decision_name=str(bert_folder),
        decision_layers=(1, 2),
        decision_dim=WIDTH,
    )


def open_states(text: TextConfig, **options) -> TextStates:
    return TextStates(
        text.name,
        layers=text.layers,
        max_tokens=text.max_tokens,
        decision=text.of_decision,
        **options,
    )


def test_each_part_reads_its_own_model(pair):
    """The head gets the states of the BERT alone, the mask decoder those of the tower alone."""
    sentences = ["the red mug", "all of the mugs, hidden parts included?"]
    states, mask = open_states(pair)(sentences)
    assert states.shape[2:] == (pair.num_layers, pair.state_dim) == (3, WIDTH)
    alone = pair.of_decision
    bert = TextStates(alone.name, layers=alone.layers, max_tokens=alone.max_tokens)
    config = replace(TINY, text=pair)
    model = build_model(config, rngs=nnx.Rngs(0))
    theirs, their_mask = bert(sentences)
    ours, our_mask = model.states_of_decision(jnp.asarray(states)[None], jnp.asarray(mask)[None])
    tower = load_tips_text(Path(pair.name))
    tokenizer = QueryTokenizer(
        Path(pair.name).with_name("tokenizer.model"), vocab_size=99, max_tokens=24
    )
    targets, target_mask = model.states_of_target(
        jnp.asarray(states)[None], jnp.asarray(mask)[None]
    )
    assert not (our_mask & target_mask).any() and (our_mask | target_mask == mask).all()
    for row, ids in enumerate(tokenizer(sentences)):
        np.testing.assert_allclose(
            np.asarray(ours)[0, row][np.asarray(our_mask)[0, row]],
            theirs[row][their_mask[row]],
            atol=2e-3,
        )
        expected = tower.float16_states(
            jnp.asarray([ids]), jnp.ones((1, len(ids)), bool), pair.layers
        )
        np.testing.assert_allclose(
            np.asarray(targets)[0, row][np.asarray(target_mask)[0, row]], expected[0], atol=4e-3
        )

    # Names are compared with what the tower says of them.
    embeddings = open_states(pair).embeddings(("mug", "red", "the mugs"))
    assert embeddings.shape == (3, TEXT_DIM) and np.isfinite(embeddings).all()


def test_the_decision_does_not_depend_on_the_tower(pair, tmp_path):
    sentences = ["the red mug", "the whole mug, hidden parts included"]
    model = build_model(replace(TINY, text=pair), rngs=nnx.Rngs(0))
    logits = []
    for seed in range(2):
        np.savez(pair.name, **{k: v * (1 + seed) for k, v in text_arrays().items()})
        states, mask = open_states(pair)(sentences)
        logit = model.amodal_logit(jnp.asarray(states)[None], jnp.asarray(mask)[None])
        logits.append(np.asarray(logit))
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-3)


def test_a_pair_that_does_not_fit_is_refused(pair, bert_folder):
    with pytest.raises(InputError, match="decision-name"):
        TextStates(pair.name, layers=(1,), max_tokens=24)
    with pytest.raises(InputError, match="is for a text tower"):
        open_states(replace(pair, name=str(bert_folder)))
    with pytest.raises(InputError, match=r"text\.layers .*0 to 3"):
        open_states(replace(pair, layers=(4,)))
    with pytest.raises(InputError, match=r"decision-layers .*0 to 2"):
        open_states(replace(pair, decision_layers=(3,)))
    with pytest.raises(InputError, match="max-tokens 200"):
        open_states(replace(pair, max_tokens=200))
    with pytest.raises(InputError, match="decision-dim"):
        open_states(replace(pair, decision_dim=384))


def test_what_either_model_cuts_is_told(pair):
    texts = open_states(replace(pair, max_tokens=16))
    sentence = "the red mug the red mug the red mug"
    texts.for_request(["the mug", sentence])
    assert texts.truncated == {sentence}
    assert texts.cut_off(sentence).endswith("mug")


# Finding


def test_a_folder_or_a_file(tmp_path):
    file = write_vision(tmp_path)
    assert find_tips(str(file), "vision", VIT_FLAG) == file
    assert find_tips(str(tmp_path), "vision", VIT_FLAG) == file
    assert find_tips(str(tmp_path), "text", VIT_FLAG) is None
    assert find_tips("hf:facebook/dinov2-small", "vision", VIT_FLAG) is None
    (tmp_path / "second_vision.npz").touch()
    assert "second_vision.npz" in refused(tmp_path)
    assert "tips-s14" in refused(tmp_path / "none.npz")


def test_a_published_file_is_downloaded_once(tmp_path, monkeypatch):
    addresses = []

    def answer(address, timeout):
        addresses.append(address)
        if len(addresses) == 1:
            raise URLError("no network")
        return io.BytesIO(b"content")

    monkeypatch.setattr(hub, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr("urllib.request.urlopen", answer)
    name = "tipsv2-b14"
    with pytest.raises(InputError, match="no network") as raised:
        find_tips(name, "vision", VIT_FLAG)
    assert addresses[0] in str(raised.value)
    assert not list(tmp_path.rglob("*.npz"))
    for _ in range(2):
        file = find_tips(name, "vision", VIT_FLAG)
        assert file is not None and file.read_bytes() == b"content"
    assert addresses[0].endswith(f"{CHECKPOINTS[name]}_vision.npz") and len(addresses) == 2


@pytest.mark.slow
def test_the_configuration_of_photos_takes_ten_steps(pair, tmp_path, tiny_config):
    """At reduced size, with drawn scenes, and with random towers in the published layout."""
    from r2sm_jax.inference.decider import load_decider
    from r2sm_jax.inference.exporter import export
    from r2sm_jax.inference.run import load as load_run
    from r2sm_jax.train import train

    config = load_config_file(Path(__file__).parents[1] / "configs" / "photos_tips.py")
    tiny = tiny_config.model
    vision = replace(
        config.model.vision,
        image_size=64,
        dim=32,
        depth=1,
        heads=2,
        mlp_dim=64,
        out_dim=32,
        encoder="conv",
        efficientnet=None,
        vit=str(write_vision(tmp_path)),
        vit_grid=SIDE,
    )
    assert config.model.text.decision_name == MINILM
    decoder = replace(tiny.decoder, refine_exponent=1.0)
    model = replace(tiny, vision=vision, text=pair, decoder=decoder)
    data = replace(
        config.data, scenes=8, queries=2, text_only_queries=64, cache_dir=str(tmp_path / "cache")
    )
    loop = replace(tiny_config.train, steps=10, evaluate_every=10, checkpoint_every=10)
    folder = train(replace(config, run=str(tmp_path / "run"), model=model, data=data, train=loop))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == 10 and np.isfinite(losses).all()
    # The run has the weights of the image tower, and opens without its file.
    (tmp_path / "tips_small_vision.npz").unlink()
    predictor = r2sm_jax.load(folder)
    predictor.set_image(np.zeros((40, 60, 3), np.uint8))
    sentences = ["the red mug", "the whole mug, hidden parts included"]
    answers = predictor.predict(sentences)
    assert answers[0].mask.shape == (40, 60)

    # Without the image, and in NumPy, the BERT decides alike.
    decisions = load_decider(folder)(sentences)
    for answer, decision in zip(answers, decisions, strict=True):
        assert answer.amodal_probability == pytest.approx(decision.amodal_probability, abs=0.01)
    with pytest.raises(InputError, match="two language models"):
        export(load_run(folder), tmp_path / "export")
