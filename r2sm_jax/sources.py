"""Opens data: a split of a SPEC such as `compose:photos.json` -> a source of samples.

Each kind is imported when it is opened, so that a dataset file loads no synthetic source.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from r2sm_jax.config import Config, Crowds, DataConfig
from r2sm_jax.data.contradictions import find_pictures_in_both
from r2sm_jax.data.dataset import Dataset, Source, read_json
from r2sm_jax.data.split_summary import check_teaches
from r2sm_jax.data.splits import WHOLE_TRAIN, resolve_split, split_ids
from r2sm_jax.errors import InputError

REPORTED = "reported"
"""A name for all splits that a run on the data reports."""
ALL = "all"
"""A name for all splits that `evaluate` scores unless it is told otherwise."""
PROCEDURAL = ("scenes", "compose", "cutouts")
WITH_PATH = ("compose", "cutouts", "json", "tfds")
PARTS = ("images", "backgrounds", "cutouts", "crowds")
READ = {
    "json": ["images"],
    "compose": ["images", "cutouts", "crowds"],
    "cutouts": ["backgrounds"],
}
"""Which `PARTS` of `DataConfig` a kind of source reads."""
SCORED_PICTURES_A_PHOTO = 4
"""Of few photos no more pictures than that are scored: they would show the same things again."""


@dataclass(frozen=True)
class SourceSpec:
    """A data source by kind and paths: `scenes`, `compose:FILE`, `cutouts:DIR`, `json:PATH` or the
    path of a .json file alone, `tfds:DIR`."""

    kind: str
    paths: tuple[Path, ...] = ()
    """Its file or folder. Composed photographs may be of several files, with commas between."""

    @classmethod
    def parse(cls, text: str) -> "SourceSpec":
        """Raises InputError for a text that is none of these."""
        kind, _, path = text.partition(":")
        if text == "scenes":
            return cls(text)
        if kind in WITH_PATH and path:
            # A file may have a comma in its own name.
            is_list = kind == "compose" and not Path(path).exists()
            names = path.split(",") if is_list else [path]
            return cls(kind, tuple(Path(name) for name in names if name))
        is_path = ":" not in text or Path(text).is_file()
        if is_path and text.lower().endswith(".json"):
            return cls("json", (Path(text),))
        raise InputError(
            f"data source {text!r} is unknown; use scenes, compose:FILE or "
            "compose:FILE,FILE, cutouts:DIR, json:FILE or tfds:DIR"
        )

    @property
    def path(self) -> Path | None:
        """The first file or folder; None for drawn scenes, which have none."""
        return self.paths[0] if self.paths else None

    @property
    def is_procedural(self) -> bool:
        """Whether samples are made on request, as many as are asked for."""
        return self.kind in PROCEDURAL

    def is_same_data(self, other: "SourceSpec") -> bool:
        """Whether both name the same data, perhaps by different paths."""
        paths = [path.resolve() for path in self.paths]
        return self.kind == other.kind and paths == [path.resolve() for path in other.paths]


def open_split(
    data: DataConfig,
    split: str = "train",
    *,
    size: int = 96,
    count: int | None = 256,
    queries: int = 8,
    max_pictures_a_photo: int | None = None,
    need_images: bool = True,
) -> Source:
    """Opens one split of a data source.

    Args:
        data: The source, and where its parts are.
        split: Name of the split.
        size: Pixels of a side of made pictures.
        count: Number of made pictures; None = one for each photo that is composed.
        queries: Number of queries for each made picture.
        max_pictures_a_photo: Limits `count` where the split has few photos to compose.
        need_images: False if a dataset file may be alone; its samples then have no image.

    Raises:
        InputError: The source or the split is unknown, or the data cannot be read.
    """
    spec = SourceSpec.parse(data.source)
    for name in PARTS:
        if getattr(data, name) != getattr(DataConfig, name) and name not in READ.get(spec.kind, ()):
            flags = f"--{name} (of train --data.{name})"
            raise InputError(f"{flags}: {data.source} does not read it; leave it out")
    options = {"seed": data.seed, "size": size, "queries": queries}
    match spec.kind:
        case "json":
            return load_json_split(spec.paths[0], split, data.images, need_images=need_images)

        case "tfds":
            from r2sm_jax.data.tfds import TfdsSource

            return TfdsSource(spec.paths[0], split)

        case "compose":
            from r2sm_jax.synthetic.compose import ComposeSource

            return ComposeSource(
                spec.paths,
                split,
                count,
                images=data.images,
                cutouts=data.cutouts,
                crowds=data.crowds,
                mirror=data.mirror,
                max_pictures_a_photo=max_pictures_a_photo,
                **options,
            )

        case "cutouts":
            from r2sm_jax.synthetic.cutouts import CutoutSource

            assert count is not None
            folder = spec.paths[0]
            return CutoutSource(folder, split, count, backgrounds=data.backgrounds, **options)

        case _:
            from r2sm_jax.synthetic.scenes.source import SceneSource

            assert count is not None
            return SceneSource(split, count, **options)


def open_splits(
    data: DataConfig, split: str, *, size: int, count: int, is_exact: bool = False
) -> dict[str, Source]:
    """Opens the splits that `split` names (`split_names`), to be scored: of made pictures `count`,
    and fewer of few photos unless the count `is_exact`.

    Leaves out made pictures about which no query can be written, and says so.
    """
    limit = None if is_exact else SCORED_PICTURES_A_PHOTO
    sources: dict[str, Source] = {}
    for name in split_names(data.source, split, data.images, data.crowds):
        source = open_split(data, name, size=size, count=count, max_pictures_a_photo=limit)
        if source.is_procedural and not has_queries(source):
            what = f"{name} is left out, since no query fits any of its pictures"
            print(f"{data.source}: {what}", file=sys.stderr)
        else:
            sources[name] = source
    return sources


def has_queries(source: Source) -> bool:
    """Whether any sample has a query."""
    return any(source.queries_at(index) for index in range(len(source)))


def open_training(config: Config) -> Source:
    """Opens the training split of a run.

    For a segmenter, procedural sources write as many queries for each picture as a step asks about
    it; of a file, `dev` is part of training unless it selects the weights. Raises InputError if it
    cannot be read, or teaches nothing.
    """
    data = config.data
    size = config.model.vision.image_size
    if config.train.part != "segmenter":
        return open_split(data, "train", size=size, count=data.scenes)
    spec = SourceSpec.parse(data.source)
    if data.fresh and not spec.is_procedural:
        raise InputError(
            f"--data.fresh: the images of {data.source} do not change; leave the flag out, or give "
            "scenes, compose or cutouts"
        )
    is_whole = config.train.select_on != "dev" and not spec.is_procedural
    all_photos = data.fresh and spec.kind == "compose"
    source = open_split(
        data,
        WHOLE_TRAIN if is_whole else "train",
        size=size,
        count=None if all_photos else data.scenes,
        queries=data.queries,
    )
    if not len(source):
        raise InputError(f"{data.source}: the training split is empty")
    if not spec.is_procedural:
        for warning in check_teaches(source, data.source):
            print(f"warning: {data.source}: {warning}", flush=True)
    return source


def open_selecting(config: Config) -> Source:
    """Opens the split that selects weights: at most `evaluate_samples` images, evenly spread."""
    count = config.train.evaluate_samples
    source = open_split(
        config.data,
        config.train.select_on,
        size=config.model.vision.image_size,
        count=count,
        max_pictures_a_photo=SCORED_PICTURES_A_PHOTO,
    )
    if len(source) <= count:
        return source
    return source.subset(number * len(source) // count for number in range(count))


def open_reported(config: Config) -> dict[str, Source]:
    """Opens the splits of the final report, before training, so that a fault in one of them does
    not end a run at its report. Raises InputError for stored data without queries."""
    size = config.model.vision.image_size
    count = config.train.report_samples
    sources = open_splits(config.data, REPORTED, size=size, count=count)
    for name, source in sources.items():
        if not has_queries(source):
            raise InputError(
                f"{config.data.source}: the split {name}, which the run would report, has no "
                "queries; write some with python -m r2sm_jax.data queries, or take its file away"
            )
    if not sources:
        raise InputError(
            f"{config.data.source}: no query fits any picture of val; add photos with masks"
        )
    return sources


def warn_of_shared_pictures(training: Source, others: Mapping[str, Source]) -> None:
    """Says which splits hold pictures that a run trains on, by name."""
    if not isinstance(training, Dataset):
        return
    names = [image.file_name for image in training.images]
    for split, source in others.items():
        if isinstance(source, Dataset):
            other_names = [image.file_name for image in source.images]
            if shared := find_pictures_in_both(other_names, names):
                print(f"warning: {source.path}: {shared} (train and {split})", flush=True)


def load_json_split(
    path: str | PathLike[str],
    split: str,
    images_dir: str | PathLike[str] | None = None,
    *,
    need_images: bool = True,
) -> Dataset:
    """The `split` of a folder (its `<split>.json`; `dev` is held out of `train.json` where there is
    no `dev.json`) or of a single file (see `split_ids`).

    Raises InputError for a split that does not exist, for images that are missing if they are
    needed, and as `read_json`.
    """
    file = Path(path)
    held_out: Sequence[str] = ("val", "dev")  # of a single file
    if file.is_dir():
        stored = stored_splits(file)
        name, held_out = resolve_split(split, stored)
        if name not in stored:
            raise InputError(
                f"{path}: there is no {name}.json; the folder has {', '.join(stored)}; choose one"
            )
        file = file / f"{name}.json"

    dataset = read_json(file, images_dir, need_images=False)
    if held_out:  # else the file is the split
        names = {image.id: image.file_name for image in dataset.images}
        ids = split_ids(file, names, split, *held_out)
        indices = [index for index, image_id in enumerate(dataset.image_ids) if image_id in ids]
        dataset = dataset.subset(indices)
    if need_images:
        dataset.check_whole()
    return dataset


def stored_splits(folder: Path) -> list[str]:
    """The splits of a folder: the names of its JSON files. Raises InputError if there is none."""
    names = sorted(file.stem for file in folder.glob("*.json"))
    if not names:
        raise InputError(
            f"{folder}: there is no .json file in this folder; give one with train.json, val.json, "
            "..."
        )
    return names


def split_names(
    spec: str,
    split: str,
    images: str | PathLike[str] | None = None,
    crowds: Crowds = "ignore",
) -> list[str]:
    """The names of the requested splits: several with commas between them, `REPORTED` or `ALL`.

    `REPORTED` are those that a run on these data reports: every val split of procedural data, val
    of a single file, and what a folder or a TFDS data set has besides train and dev. `ALL` is the
    same, except that a single file is scored whole. `images` is the folder of composed photos, and
    `crowds` what their crowds are.

    Raises InputError where nothing is stored except train and dev, and for a file of photos that
    cannot be read.
    """
    if split not in (REPORTED, ALL):
        return split.split(",")

    where = SourceSpec.parse(spec)
    if where.is_procedural:
        from r2sm_jax.synthetic.photos import NOTHING_ABSENT, Photos
        from r2sm_jax.synthetic.queries.write import ABSENT_SPLIT, SPLITS

        names = [name for name in SPLITS if name.startswith("val")]
        if where.kind != "compose":
            names.remove(ABSENT_SPLIT)
        elif not Photos(where.paths, images, crowds).photos_without_a_class("val"):
            names.remove(ABSENT_SPLIT)
            line = f"{spec}: {ABSENT_SPLIT} is left out, since {NOTHING_ABSENT}"
            print(line, file=sys.stderr)
        return names

    (path,) = where.paths
    if where.kind == "json" and path.is_dir():
        stored = stored_splits(path)
    elif where.kind == "tfds":
        from r2sm_jax.data.tfds import open_builder  # imports slowly

        stored = list(open_builder(path).info.splits)
    else:
        return ["val" if split == REPORTED else ALL]

    names = sorted({*stored} - {"train", "dev"})
    if not names:
        raise InputError(
            f"{path}: no split other than train and dev; add one such as val, or give --split train"
        )
    return names
