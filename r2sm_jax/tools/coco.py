"""Reads annotations with an amodal and a modal mask for each object: COCOA, COCOA-cls, D2SA, KINS, MUVA.

All but COCOA are COCO files that differ in field names (amazon-science/c2f-seg data/dataloader_*.py,
UARK-AICV/AISFormer tools/proc_cocoa.py, deocclusion datasets/reader.py). D2SA's masks can be larger than their image,
since objects reach out of it. MUVA's field names are not published, so the user gives them. A file of original COCOA
(Zhu et al., "Semantic Amodal Segmentation") holds one annotator's regions of one image: `image_id`, `url`, `regions`;
a file that lists several of these under `annotations` is read too.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from PIL import Image
from tyro.conf import OmitArgPrefixes

from r2sm_jax.data import masks
from r2sm_jax.data.images import open_image
from r2sm_jax.data.samples import is_id
from r2sm_jax.errors import InputError, writing
from r2sm_jax.tools.conversion import Conversion, Entry, Files, Size, read_files

RATE_TOLERANCE = 0.02
"""Stored and recomputed occlusion rates may differ by this much before the user is told."""


@dataclass(frozen=True)
class Preset:
    """What the fields of a format's annotations are called."""

    about: str
    amodal: Sequence[str] = ("segmentation",)
    """Fields of the complete mask; the first that is present counts."""
    modal: Sequence[str] = ("visible_mask",)
    """Fields of the visible mask. An object without any is fully visible."""
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
    them; of several COCOA annotations of one image the first is kept. Images are needed for COCOA and to pad them.
    Raises InputError for files that do not fit the format.
    """
    own = {"amodal": options.amodal_field, "modal": options.visible_field}
    preset = replace(preset, **{key: (name,) for key, name in own.items() if name is not None})
    padded_dir = files.out.with_name(files.out.stem + "_padded")
    reader = _Reader(Conversion(files.images), preset, options.oversize, padded_dir)
    for file in read_files(files.sources, "annotations of this format"):
        if preset.regions:
            reader.read_cocoa(file, in_folder=file.path not in files.sources)
        else:
            reader.read_coco(file)
    return reader.found


@dataclass(frozen=True)
class _Reader:
    found: Conversion
    preset: Preset
    oversize: str
    padded_dir: Path

    def read_coco(self, file: Entry) -> None:
        images = file.by_id("images", "image")
        names = {int(number): name for number, name in self.preset.categories.items()}
        if file.get("categories") or not names:
            names = {number: entry.need("name", str) for number, entry in file.by_id("categories", "category").items()}
        annotations: dict[int, list[Entry]] = {image_id: [] for image_id in images}
        for entry in file.entries("annotations", "annotation"):
            named = replace(entry, value=entry.value | {"name": entry.refer("category_id", names)})
            entry.refer("image_id", annotations).append(named)
        shift = max(self.found.images) + 1 - min(images) if self.found.images.keys() & images.keys() else 0
        if shift:
            self.found.note(file, f"its image ids collide with those before; {shift} was added to each")
        for image_id, image in images.items():
            number = self.found.add_image(image, image.text("file_name"), image_id + shift, image.size())
            self._read_image(image, number, annotations[image_id])

    def read_cocoa(self, file: Entry, in_folder: bool) -> None:
        records = file.entries("annotations") if isinstance(file.get("annotations"), list) else [file]
        if not records or not all(isinstance(record.get("regions"), list) for record in records):
            if not in_folder:
                raise file.error("there is no list of 'regions'", "give an original COCOA annotation")
            self.found.note(file, "left out, it has no COCOA regions")
            return
        for record in records:
            image_id = record.need("image_id", int)
            if image_id in self.found.images:
                self.found.note(record, f"left out, image {image_id} has been read before")
                continue
            self.found.add_image(record, image_id=image_id)
            regions = [_as_annotation(region, i) for i, region in enumerate(record.entries("regions"), start=1)]
            self._read_image(record, image_id, regions)

    def _read_image(self, image: Entry, number: int, annotations: Sequence[Entry]) -> None:
        """Adds the annotations of an image."""
        size = self.found.size(number)
        keys = (*self.preset.amodal, *self.preset.modal)
        stated = [size, *(_own_size(annotation.get(key), size) for annotation in annotations for key in keys)]
        height, width = (max(sides) for sides in zip(*stated, strict=True))
        full = replace(image, value={"height": height, "width": width}).size()
        if full != size and self.oversize == "refuse":
            what = f"its masks reach {full[0]} x {full[1]} but it is {size[0]} x {size[1]}"
            raise image.error(what, "choose --oversize crop or --oversize pad")
        if full != size and self.oversize == "pad":
            self._pad_image(number, full)
        added = [self._add(annotation, number) for annotation in annotations]
        self._compare_order(image, [record for record in added if record is not None])

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

    def _add(self, annotation: Entry, image_id: int) -> dict[str, Any] | None:
        """Adds an annotation, notes what its masks and its other fields disagree about, and returns the record; None
        where the mask has no pixel in the image."""
        size = self.found.size(image_id)
        amodal, modal = (self._mask(annotation, keys, size) for keys in (self.preset.amodal, self.preset.modal))
        if amodal is None:
            wanted = " or ".join(self.preset.amodal)
            raise annotation.error(f"it has no {wanted}", "check the format or the field names")
        modal = amodal if modal is None else modal
        if not (amodal | modal).any():
            self.found.note(annotation, "left out, its mask has no pixel in the image")
            return None
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

    def _mask(self, annotation: Entry, keys: Sequence[str], size: Size) -> np.ndarray | None:
        """The part that lies in the image of the mask in the first of the fields that is present, `[H W]`."""
        key = next((key for key in keys if annotation.get(key) is not None), None)
        if key is None:
            return None
        own = size if self.oversize == "refuse" else _own_size(annotation.get(key), size)
        inside = annotation.mask(key, own)[: size[0], : size[1]]
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


def _visible_area(record: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """How many pixels of an annotation are visible where another one's complete mask lies."""
    modal = record.get("visible_mask", record["segmentation"])
    return masks.areas([masks.intersect(modal, other["segmentation"])])[0]


def _own_size(segmentation: Any, size: Size) -> Size:
    """The size that an RLE states; `size` for polygons and for damaged RLEs, which fail when they are decoded."""
    try:
        return masks.rle_size(segmentation)
    except ValueError:
        return size


def _as_annotation(region: Entry, number: int) -> Entry:
    """A region of COCOA as an annotation. Regions are listed from front to back: without an order its number counts."""
    fields = region.value if isinstance(region.value, dict) else {}
    order = fields.get("order") if is_id(fields.get("order")) else number
    renamed = {"id": None, "name": str(fields.get("name") or "").lower(), "order": order}
    return Entry(region.path, f"region {number}", fields | renamed | {"isStuff": int(fields.get("isStuff") == 1)})
