"""Reads annotations with an amodal and a modal mask for each object: COCOA, COCOA-cls, D2SA, KINS, MUVA.

All but COCOA are COCO files that differ in field names (amazon-science/c2f-seg data/dataloader_*.py,
UARK-AICV/AISFormer tools/proc_cocoa.py and the files it prepares, aistron, deocclusion datasets/reader.py). Every known
name is understood in every format, and a file without any known field of visible masks is refused. D2SA's masks can be
larger than their image, since objects reach out of it. MUVA's field names are not published, so the user gives them.

A file of original COCOA (Zhu et al., "Semantic Amodal Segmentation") holds one annotator's regions of one image:
`image_id`, `url`, `regions`. The published files list many of these under `annotations`, and their `images`.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import tyro
from PIL import Image
from tyro.conf import OmitArgPrefixes

from r2sm_jax.data import masks
from r2sm_jax.data.dataset import is_id, is_text
from r2sm_jax.data.images import open_image
from r2sm_jax.errors import InputError, writing
from r2sm_jax.tools.convert import Conversion, Files, names_of_image
from r2sm_jax.tools.entries import Entry, Note, RecordError, Size

RATE_TOLERANCE = 0.02
"""Stored and recomputed occlusion rates may differ by this much before the user is told."""


@dataclass(frozen=True)
class Preset:
    """What the fields of a format's annotations are called."""

    about: str
    amodal: Sequence[str] = ("amodal_segm", "a_segm", "segmentation")
    """Fields of the complete mask; the first that is present counts."""
    modal: Sequence[str] = (
        "visible_mask",
        "visible_segm",
        "inmodal_seg",
        "i_segmentation",
        "i_segm",
    )
    """Fields of the visible mask. An object without any is fully visible, if others of its file have one."""
    order: str = ""
    """Depth order, smaller is nearer; compared with what the masks show."""
    kept: Sequence[str] = ()
    """Fields of whole numbers that are copied."""
    categories: Mapping[str, str] = field(default_factory=dict)
    """Category names by id, for files that list none."""
    regions: bool = False
    """Whether the layout is that of original COCOA, where each region has its own name."""


_LAYOUTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PRESETS = {name: Preset(**fields) for name, fields in _LAYOUTS.items()}


@tyro.conf.configure(OmitArgPrefixes)
@dataclass(frozen=True)
class MaskOptions:
    """How to read masks."""

    oversize: Literal["refuse", "crop", "pad"] = "refuse"
    """Where masks are larger than their image: crop them to it, or pad the image (a copy beside --out)."""
    amodal_field: str | None = None
    """Field of an annotation with the complete mask, if it is not the format's own."""
    visible_field: str | None = None
    """Field of an annotation with the visible mask; fully visible where it is missing."""


def read_coco_like(
    files: Files, preset: Preset, options: MaskOptions = MaskOptions()
) -> Conversion:
    """Reads files, or folders of files, into records.

    Ids of images are kept. Where those of a later COCO file collide with earlier ones, all of its ids are shifted past
    them; of several COCOA annotations of one image the first is kept. Images are needed where a file does not state
    their sizes, and to pad them. Raises InputError for files that do not fit the format.
    """
    own = {"amodal": options.amodal_field, "modal": options.visible_field}
    preset = replace(preset, **{key: (name,) for key, name in own.items() if name is not None})
    padded_dir = files.out.with_name(files.out.stem + "_padded")
    reader = _Reader(
        files.images, files.max_bad, preset=preset, oversize=options.oversize, padded_dir=padded_dir
    )
    for file in reader.read_folders(files.sources, "annotations of this format"):
        if preset.regions:
            reader.read_cocoa(file, in_folder=file.path not in files.sources)
        else:
            reader.read_coco(file)
    sources, objects = ", ".join(map(str, files.sources)), reader.annotations
    if reader.region_fields and preset.modal != PRESETS["cocoa"].modal:
        reader.check_fields(sources, reader.region_fields)
    if objects and not any(record["occlude_rate"] for record in objects):
        what = f"no pixel of the {len(objects)} objects is hidden; check the names of the fields"
        reader.notes.append(Note(sources, what))
    return reader.finish()


@dataclass(kw_only=True)
class _Reader(Conversion):
    preset: Preset
    oversize: str
    padded_dir: Path
    region_fields: set[str] = field(default_factory=set)

    def read_coco(self, file: Entry) -> None:
        images = self.by_id(file, "images", "image")
        categories = {
            int(n): Entry(file.path, "", {"name": name})
            for n, name in self.preset.categories.items()
        }
        if file.get("categories") or not categories:
            categories = self.by_id(file, "categories", "category")
        annotations: dict[int, list[Entry]] = {image_id: [] for image_id in images}
        listed = (
            file.entries("annotations", "annotation") if file.get("annotations") is not None else []
        )
        if listed:
            self.check_fields(str(file), _fields(listed))
        else:
            self.note(file, "it has no annotations; its images are kept")
        for entry in listed:
            try:
                name = entry.refer("category_id", categories).need("name", str)
                entry.refer("image_id", annotations).append(
                    replace(entry, value=entry.value | {"name": name})
                )
            except RecordError as error:
                self.bad.append(error.note)
        shift = max(self.images) + 1 - min(images) if self.images.keys() & images.keys() else 0
        if shift:
            self.note(file, f"its image ids collide with those before; {shift} was added to each")
        for image_id, image in images.items():
            number = None
            with self.record():
                number = self.add_image(
                    image, [image.text("file_name")], image_id + shift, self._stated_size(image)
                )
            if number is None:
                why = self.bad[-1].sentence
                self.bad.extend(Note(str(annotation), why) for annotation in annotations[image_id])
            else:
                self._read_image(image, number, annotations[image_id])

    def check_fields(self, source: str, fields: set[str]) -> None:
        """Raises InputError where no field holds a complete mask, or none a visible one: all would be fully visible."""
        visible = f"--visible-field, {self.preset.amodal[-1]} if every object is fully visible"
        for keys, flag in ((self.preset.amodal, "--amodal-field"), (self.preset.modal, visible)):
            if not fields.intersection(keys):
                there = (
                    f"no annotation has {' or '.join(keys)}; there are {', '.join(sorted(fields))}"
                )
                raise InputError(
                    f"{source}: {there}; check the format, or name the field with {flag}"
                )

    def read_cocoa(self, file: Entry, in_folder: bool) -> None:
        records = (
            file.entries("annotations") if isinstance(file.get("annotations"), list) else [file]
        )
        if not records or not all(isinstance(record.get("regions"), list) for record in records):
            if not in_folder:
                raise file.error(
                    "there is no list of 'regions'", "give an original COCOA annotation"
                )
            self.note(file, "left out, it has no COCOA regions")
            return
        images = self.by_id(file, "images", "image") if file.get("images") is not None else {}
        for record in records:
            with self.record():
                image_id, url = record.need("image_id", int), record.get("url")
                if image_id in self.images:
                    self.note(record, f"left out, image {image_id} has been read before")
                    continue
                names = [PurePosixPath(url).name] if is_text(url) else []
                if (image := images.get(image_id)) is not None:
                    self.add_image(
                        image, [image.text("file_name"), *names], image_id, self._stated_size(image)
                    )
                else:  # a file with one annotation has the name of its image
                    self.add_image(
                        record,
                        [*([] if record.place else names_of_image(record.path)), *names],
                        image_id,
                    )
                regions = [
                    _as_annotation(region, i)
                    for i, region in enumerate(record.entries("regions"), start=1)
                ]
                self.region_fields.update(_fields(regions))
                self._read_image(record, image_id, regions)

    def _stated_size(self, image: Entry) -> Size | None:
        """The size that a file states for an image; None where the image file counts, since masks may be larger."""
        from_image = self.oversize != "refuse" and self.images_dir is not None
        return (
            None
            if from_image or image.get("height") is image.get("width") is None
            else image.size()
        )

    def _read_image(self, image: Entry, number: int, annotations: Sequence[Entry]) -> None:
        size, keys = self.size(number), (*self.preset.amodal, *self.preset.modal)
        stated = [
            _own_size(annotation.get(key), size) or size
            for annotation in annotations
            for key in keys
        ]
        height, width = (max(sides) for sides in zip(size, *stated, strict=True))
        full = replace(image, value={"height": height, "width": width}).size()
        if full != size and self.oversize == "refuse":
            what = f"its masks reach {full[0]} x {full[1]} but it is {size[0]} x {size[1]}"
            raise InputError(f"{image}: {what}; choose --oversize crop or --oversize pad")
        if full != size and self.oversize == "pad":
            self._pad_image(number, full)
        added: list[dict[str, Any]] = []
        for annotation in annotations:
            with self.record():
                added.append(self._add(annotation, number, size))
        self._compare_order(image, added)

    def _pad_image(self, number: int, size: Size) -> None:
        """Replaces an image by a PNG copy of this size, black below and to the right of the image."""
        record, source = self.images[number], self.image_paths.get(number)
        if source is None:
            raise InputError(
                "--oversize pad: the images are needed; give their folder with --images DIR"
            )
        padded = Image.new("RGB", (size[1], size[0]))
        padded.paste(Image.fromarray(open_image(source)))
        target = self.padded_dir / f"{record['file_name']}.png"
        with writing(target) as part:
            padded.save(part, format="PNG")
        record["height"], record["width"] = size
        self.image_paths[number] = target

    def _add(self, annotation: Entry, image_id: int, unpadded: Size) -> dict[str, Any]:
        """Adds an annotation of an image that had the size `unpadded`, and returns the record."""
        size, preset = self.size(image_id), self.preset
        amodal, modal = (
            self._first_mask(annotation, keys, size, unpadded)
            for keys in (preset.amodal, preset.modal)
        )
        if amodal is None:
            raise annotation.error(
                f"it has no {' or '.join(preset.amodal)}", "check the format or the field names"
            )
        modal = amodal if modal is None else modal
        if not (amodal | modal).any():
            raise annotation.error("its mask has no pixel in the image", "correct it")
        if not modal.any():
            self.note(annotation, "nothing of it is visible")
        if outside := masks.area(modal & ~amodal):
            self.note(
                annotation, f"{outside} visible pixels outside the amodal mask were added to it"
            )
        copied = {"source_id": "id"} | {key: key for key in self.preset.kept}
        extra = {
            key: annotation.get(source)
            for key, source in copied.items()
            if is_id(annotation.get(source))
        }
        extra |= {"ignore": True} if annotation.get("iscrowd") else {}
        self.add_annotation(image_id, annotation.get("name"), modal, amodal, **extra)
        record, stored = self.annotations[-1], annotation.get("occlude_rate")
        if (
            isinstance(stored, int | float)
            and abs(stored - record["occlude_rate"]) > RATE_TOLERANCE
        ):
            what = f"occlude_rate {stored:.3f} is stored, but the masks give {record['occlude_rate']:.3f} (used)"
            self.note(annotation, what)
        return record

    def _first_mask(
        self, annotation: Entry, keys: Sequence[str], size: Size, unpadded: Size
    ) -> np.ndarray | None:
        """The part that lies in the image of the mask in the first of the fields that is present, `[H W]`."""
        key = next((key for key in keys if annotation.get(key) is not None), None)
        if key is None:
            return None
        if annotation.get(key) == [] and keys == self.preset.modal:
            return np.zeros(size, bool)  # KINS: nothing is visible
        inside = self.mask(annotation, key, _own_size(annotation.get(key), unpadded) or size)[
            : size[0], : size[1]
        ]
        return np.pad(inside, [(0, size[0] - inside.shape[0]), (0, size[1] - inside.shape[1])])

    def _compare_order(self, image: Entry, records: Sequence[Mapping[str, Any]]) -> None:
        """Notes overlapping objects where the one that is visible is not the one that is said to be nearer."""
        order, wrong, overlapping = self.preset.order, [], 0
        if not all(order in record for record in records):
            return
        for one, other in combinations(records, 2):
            visible, other_visible = _visible_area(one, other), _visible_area(other, one)
            if visible != other_visible and one[order] != other[order]:
                overlapping += 1
                if (visible > other_visible) != (one[order] < other[order]):
                    wrong.append(f"{one['id']}-{other['id']}")
        if wrong:
            shown = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
            what = f"{len(wrong)} of {overlapping} overlapping pairs are seen in another order than {order} says"
            self.note(image, f"{what} (annotations {shown}); masks are used")


def _fields(entries: Sequence[Entry]) -> set[str]:
    return {key for entry in entries if isinstance(entry.value, Mapping) for key in entry.value}


def _visible_area(record: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """How many pixels of an annotation are visible where another one's complete mask lies."""
    modal = record.get("visible_mask", record["segmentation"])
    return masks.areas([masks.intersect(modal, other["segmentation"])])[0]


def _own_size(segmentation: Any, image: Size) -> Size | None:
    """The size that an RLE states, if an image of this size has room in it; otherwise None."""
    try:
        height, width = masks.rle_size(segmentation)
    except ValueError:  # polygons, or an RLE that fails when it is decoded
        return None
    return (height, width) if height >= image[0] and width >= image[1] else None


def _as_annotation(region: Entry, number: int) -> Entry:
    """A region of COCOA as an annotation. Regions are listed from front to back: without an order its number counts."""
    fields = region.value if isinstance(region.value, dict) else {}
    order = fields.get("order") if is_id(fields.get("order")) else number
    renamed = {"id": None, "name": str(fields.get("name") or "").lower(), "order": order}
    return Entry(
        region.path,
        f"region {number}",
        fields | renamed | {"isStuff": int(fields.get("isStuff") == 1)},
    )
