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
from r2sm_jax.data.images import open_image
from r2sm_jax.data.samples import is_id, is_text
from r2sm_jax.errors import InputError, writing
from r2sm_jax.tools.conversion import Conversion, Files, names_of_image
from r2sm_jax.tools.entries import Entry, Note, RecordError, Size

RATE_TOLERANCE = 0.02
"""Stored and recomputed occlusion rates may differ by this much before the user is told."""


@dataclass(frozen=True)
class Preset:
    """What the fields of a format's annotations are called."""

    about: str
    amodal: Sequence[str] = ("amodal_segm", "a_segm", "segmentation")
    """Fields of the complete mask; the first that is present counts."""
    modal: Sequence[str] = ("visible_mask", "visible_segm", "inmodal_seg", "i_segmentation", "i_segm")
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


def read_coco_like(files: Files, preset: Preset, options: MaskOptions = MaskOptions()) -> Conversion:
    """Reads files, or folders of files, into records.

    Ids of images are kept. Where those of a later COCO file collide with earlier ones, all of its ids are shifted past
    them; of several COCOA annotations of one image the first is kept. Images are needed where a file does not state
    their sizes, and to pad them. Raises InputError for files that do not fit the format.
    """
    own = {"amodal": options.amodal_field, "modal": options.visible_field}
    preset = replace(preset, **{key: (name,) for key, name in own.items() if name is not None})
    padded_dir = files.out.with_name(files.out.stem + "_padded")
    reader = _Reader(Conversion(files.images, files.max_bad), preset, options.oversize, padded_dir)
    for file in reader.found.read_folders(files.sources, "annotations of this format"):
        if preset.regions:
            reader.read_cocoa(file, in_folder=file.path not in files.sources)
        else:
            reader.read_coco(file)
    reader.check_all(", ".join(map(str, files.sources)))
    return reader.found.finish()


@dataclass(frozen=True)
class _Reader:
    found: Conversion
    preset: Preset
    oversize: str
    padded_dir: Path
    fields: set[str] = field(default_factory=set)
    """Names of fields of COCOA's regions."""

    def read_coco(self, file: Entry) -> None:
        images = self.found.by_id(file, "images", "image")
        categories = {int(n): Entry(file.path, "", {"name": name}) for n, name in self.preset.categories.items()}
        if file.get("categories") or not categories:
            categories = self.found.by_id(file, "categories", "category")
        annotations: dict[int, list[Entry]] = {image_id: [] for image_id in images}
        listed = file.entries("annotations", "annotation") if file.get("annotations") is not None else []
        if listed:
            self._check_fields(str(file), _fields(listed))
        else:
            self.found.note(file, "it has no annotations; its images are kept")
        for entry in listed:
            try:
                name = entry.refer("category_id", categories).need("name", str)
                entry.refer("image_id", annotations).append(replace(entry, value=entry.value | {"name": name}))
            except RecordError as error:
                self.found.bad.append(error.note)
        shift = max(self.found.images) + 1 - min(images) if self.found.images.keys() & images.keys() else 0
        if shift:
            self.found.note(file, f"its image ids collide with those before; {shift} was added to each")
        for image_id, image in images.items():
            number = None
            with self.found.record():
                number = self.found.add_image(image, [image.text("file_name")], image_id + shift, self._size(image))
            if number is None:
                why = self.found.bad[-1].sentence
                self.found.bad.extend(Note(str(annotation), why) for annotation in annotations[image_id])
            else:
                self._read_image(image, number, annotations[image_id])

    def _check_fields(self, source: str, fields: set[str]) -> None:
        """Raises InputError where none of the fields of annotations holds a complete mask, or none a visible one: all
        objects would count as fully visible."""
        visible = f"--visible-field, {self.preset.amodal[-1]} if every object is fully visible"
        for keys, flag in ((self.preset.amodal, "--amodal-field"), (self.preset.modal, visible)):
            if not fields.intersection(keys):
                there = f"no annotation has {' or '.join(keys)}; there are {', '.join(sorted(fields))}"
                raise InputError(f"{source}: {there}; check the format, or name the field with {flag}")

    def read_cocoa(self, file: Entry, in_folder: bool) -> None:
        records = file.entries("annotations") if isinstance(file.get("annotations"), list) else [file]
        if not records or not all(isinstance(record.get("regions"), list) for record in records):
            if not in_folder:
                raise file.error("there is no list of 'regions'", "give an original COCOA annotation")
            self.found.note(file, "left out, it has no COCOA regions")
            return
        images = self.found.by_id(file, "images", "image") if file.get("images") is not None else {}
        for record in records:
            with self.found.record():
                image_id = record.need("image_id", int)
                if image_id in self.found.images:
                    self.found.note(record, f"left out, image {image_id} has been read before")
                    continue
                self._add_cocoa_image(record, image_id, images.get(image_id))
                regions = [_as_annotation(region, i) for i, region in enumerate(record.entries("regions"), start=1)]
                self.fields.update(_fields(regions))
                self._read_image(record, image_id, regions)

    def _add_cocoa_image(self, record: Entry, image_id: int, image: Entry | None) -> None:
        """Adds the image of an annotator's regions: the one that the file lists or the url names, or, in a file with
        one annotation, the one with the file's own name."""
        url = record.get("url")
        names = [PurePosixPath(url).name] if is_text(url) else []
        if image is not None:
            self.found.add_image(image, [image.text("file_name"), *names], image_id, self._size(image))
        else:
            self.found.add_image(record, [*([] if record.place else names_of_image(record.path)), *names], image_id)

    def check_all(self, sources: str) -> None:
        """Tells the user where no object of the `sources` has a hidden pixel. Raises InputError where no region of
        COCOA has a field that the user named."""
        if self.preset.regions and self.fields and self.preset.modal != PRESETS["cocoa"].modal:
            self._check_fields(sources, self.fields)
        records = self.found.annotations
        if records and not any(record["occlude_rate"] for record in records):
            what = f"no pixel of the {len(records)} objects is hidden; check the names of the fields"
            self.found.notes.append(Note(sources, what))

    def _size(self, image: Entry) -> Size | None:
        """The size that a file states for an image; None where it states none, and where the image file counts, since
        masks may be larger."""
        if self.oversize != "refuse" and self.found.images_dir is not None:
            return None
        return None if image.get("height") is image.get("width") is None else image.size()

    def _read_image(self, image: Entry, number: int, annotations: Sequence[Entry]) -> None:
        """Adds the annotations of an image."""
        size = self.found.size(number)
        keys = (*self.preset.amodal, *self.preset.modal)
        stated = [_own_size(annotation.get(key), size) or size for annotation in annotations for key in keys]
        height, width = (max(sides) for sides in zip(size, *stated, strict=True))
        full = replace(image, value={"height": height, "width": width}).size()
        if full != size and self.oversize == "refuse":
            what = f"its masks reach {full[0]} x {full[1]} but it is {size[0]} x {size[1]}"
            raise InputError(f"{image}: {what}; choose --oversize crop or --oversize pad")
        if full != size and self.oversize == "pad":
            self._pad_image(number, full)
        added: list[dict[str, Any]] = []
        for annotation in annotations:
            with self.found.record():
                added.append(self._add(annotation, number, size))
        self._compare_order(image, added)

    def _pad_image(self, number: int, size: Size) -> None:
        """Replaces an image by a PNG copy of this size, black below and to the right of the image."""
        record, source = self.found.images[number], self.found.image_paths.get(number)
        if source is None:
            raise InputError("--oversize pad: the images are needed; give their folder with --images DIR")
        image = open_image(source)
        padded = np.zeros((*size, 3), np.uint8)
        padded[: image.shape[0], : image.shape[1]] = image
        target = (self.padded_dir / record["file_name"]).with_suffix(".png")
        with writing(target) as part:
            Image.fromarray(padded).save(part, format="PNG")
        record["height"], record["width"] = size
        self.found.image_paths[number] = target

    def _add(self, annotation: Entry, image_id: int, unpadded: Size) -> dict[str, Any]:
        """Adds an annotation of an image that had the size `unpadded`, notes what its masks and its other fields
        disagree about, and returns the record."""
        size = self.found.size(image_id)
        fields = self.preset.amodal, self.preset.modal
        amodal, modal = (self._mask(annotation, keys, size, unpadded) for keys in fields)
        if amodal is None:
            wanted = " or ".join(self.preset.amodal)
            raise annotation.error(f"it has no {wanted}", "check the format or the field names")
        modal = amodal if modal is None else modal
        if not (amodal | modal).any():
            raise annotation.error("its mask has no pixel in the image", "correct it")
        if not modal.any():
            self.found.note(annotation, "nothing of it is visible")
        if outside := masks.area(modal & ~amodal):
            self.found.note(annotation, f"{outside} visible pixels outside the amodal mask were added to it")
        copied = {"source_id": "id"} | {key: key for key in self.preset.kept}
        extra = {key: annotation.get(source) for key, source in copied.items() if is_id(annotation.get(source))}
        extra |= {"ignore": True} if annotation.get("iscrowd") else {}
        self.found.add_annotation(image_id, annotation.get("name"), modal, amodal, **extra)
        record, stored = self.found.annotations[-1], annotation.get("occlude_rate")
        if isinstance(stored, int | float) and abs(stored - record["occlude_rate"]) > RATE_TOLERANCE:
            what = f"occlude_rate {stored:.3f} is stored, but the masks give {record['occlude_rate']:.3f} (used)"
            self.found.note(annotation, what)
        return record

    def _mask(self, annotation: Entry, keys: Sequence[str], size: Size, unpadded: Size) -> np.ndarray | None:
        """The part that lies in the image of the mask in the first of the fields that is present, `[H W]`."""
        key = next((key for key in keys if annotation.get(key) is not None), None)
        if key is None:
            return None
        if annotation.get(key) == [] and keys == self.preset.modal:
            return np.zeros(size, bool)  # KINS: nothing is visible
        own = size if self.oversize == "refuse" else _own_size(annotation.get(key), unpadded) or size
        inside = self.found.mask(annotation, key, own)[: size[0], : size[1]]
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
            self.found.note(image, f"{what} (annotations {shown}); masks are used")


def _fields(entries: Sequence[Entry]) -> set[str]:
    """The names of all fields that objects have."""
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
    return Entry(region.path, f"region {number}", fields | renamed | {"isStuff": int(fields.get("isStuff") == 1)})
