"""Reads annotations with an amodal and a modal mask for each object: COCOA, COCOA-cls, D2SA, KINS, MUVA.

All but COCOA are COCO files that differ in field names (amazon-science/c2f-seg data/dataloader_*.py,
UARK-AICV/AISFormer tools/proc_cocoa.py, deocclusion datasets/reader.py). D2SA's masks can be larger than their image,
since objects reach out of it. MUVA's field names are not published, so the user gives them. A file of original COCOA
(Zhu et al., "Semantic Amodal Segmentation") holds one annotator's regions of one image: `image_id`, `url`, `regions`;
a file that lists several of these under `annotations` is read too.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.images import open_image
from r2sm_jax.data.records import is_id, is_text
from r2sm_jax.errors import InputError, writing
from r2sm_jax.tools.conversion import Conversion, Entry, Size, json_files, names_of_image, read_object

Oversize = Literal["refuse", "crop", "pad"]
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
    rate: str = "occlude_rate"
    order: str = ""
    """Depth order, smaller is nearer; compared with what the masks show."""
    kept: Sequence[str] = ()
    """Fields of whole numbers that are copied."""
    categories: Mapping[str, str] | None = None
    """Category names by id, for files that list none."""
    regions: bool = False
    """Whether the layout is that of original COCOA, where each region has its own name."""
    ignored: str = "iscrowd"
    """An annotation where this is set becomes an `ignore` region."""


_LAYOUTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PRESETS = {name: Preset(**fields) for name, fields in _LAYOUTS.items()}


def read_coco_like(
    sources: Sequence[Path], preset: Preset, *, images_dir: Path | None = None, oversize: Oversize = "refuse",
    padded_dir: Path | None = None,
) -> Conversion:  # fmt: skip
    """Reads files, or folders of files, into records.

    Ids of images are kept. Where those of a later COCO file collide with earlier ones, all of its ids are shifted past
    them; of several COCOA annotations of one image the first is kept. `oversize` decides what happens where masks are
    larger than their image: `crop` cuts them, `pad` enlarges the image at the right and at the bottom, in a copy in
    `padded_dir`. Images are needed for COCOA and for `pad`. Raises InputError for files that do not fit the format.
    """
    reader = _Reader(Conversion(images_dir), preset, oversize, padded_dir)
    for path in json_files(sources):
        file = read_object(path, "annotations of this format")
        if not preset.regions:
            reader.read_coco(file)
        else:
            reader.read_cocoa(file, in_folder=path not in sources)
    if not reader.found.images:
        raise InputError(f"{', '.join(map(str, sources))}: there are no annotated images; give annotation files")
    return reader.found


@dataclass(frozen=True)
class _Reader:
    found: Conversion
    preset: Preset
    oversize: Oversize
    padded_dir: Path | None

    def read_coco(self, file: Entry) -> None:
        images = {image.need("id", int): image for image in file.entries("images", "image")}
        names = {int(number): name for number, name in (self.preset.categories or {}).items()}
        if file.get("categories") or not names:
            names = {c.need("id", int): c.need("name", str) for c in file.entries("categories")}
        annotations: dict[int, list[Entry]] = {image_id: [] for image_id in images}
        for annotation in file.entries("annotations", "annotation"):
            image_id = annotation.need("image_id", int)
            if image_id not in images:
                raise annotation.error(f"image {image_id} is not in the file", "correct the id")
            annotations[image_id].append(annotation)
        shift = max(self.found.sizes) + 1 - min(images) if self.found.sizes.keys() & images.keys() else 0
        if shift:
            self.found.note(file, f"its image ids collide with those before; {shift} was added to each")
        for image_id, image in images.items():
            number = self.found.add_image(image, [image.file_name("file_name")], image_id + shift, image.size())
            self._read_image(image, number, annotations[image_id], names)

    def read_cocoa(self, file: Entry, in_folder: bool) -> None:
        records = file.entries("annotations") if isinstance(file.get("annotations"), list) else [file]
        if not records or not all(isinstance(record.get("regions"), list) for record in records):
            if not in_folder:
                raise file.error("there is no list of 'regions'", "give an original COCOA annotation")
            self.found.skip(file, "it has no COCOA regions")
            return
        for record in records:
            image_id = record.need("image_id", int)
            if image_id in self.found.sizes:
                self.found.skip(record, f"image {image_id} has been read before")
                continue
            url = record.get("url")
            names = names_of_image(file.path) + ([PurePosixPath(url).name] if is_text(url) else [])
            self.found.add_image(record, names, image_id)
            regions = [_as_annotation(region, i) for i, region in enumerate(record.entries("regions"), start=1)]
            self._read_image(record, image_id, regions, None)

    def _read_image(
        self, image: Entry, number: int, annotations: Sequence[Entry], names: Mapping[int, str] | None
    ) -> None:
        """Adds the annotations of an image. `names` None: each annotation has its own name."""
        size = self.found.sizes[number]
        full = self._size_with_masks(annotations, size)
        if full != size and self.oversize == "refuse":
            what = f"its masks reach {full[0]} x {full[1]} but it is {size[0]} x {size[1]}"
            raise image.error(what, "choose --oversize crop or --oversize pad")
        if full != size and self.oversize == "pad":
            self._pad_image(number, full)
        drawn = []
        for annotation in annotations:
            category = annotation.get("category_id")
            if names is not None and (not is_id(category) or category not in names):
                raise annotation.error(f"category_id {category!r} is not in the file", "correct the id")
            name = str(annotation.get("name") or "").lower() if names is None else names[category]
            amodal, modal = self._masks(annotation, self.found.sizes[number])
            if (amodal | modal).any():
                drawn.append((self._add(annotation, number, name, amodal, modal), amodal | modal, modal))
            else:
                self.found.skip(annotation, "its mask has no pixel in the image")
        self._compare_order(image, drawn)

    def _size_with_masks(self, annotations: Sequence[Entry], size: Size) -> Size:
        """Height and width that hold the image and all of its masks."""
        for annotation in annotations:
            for field in (*self.preset.amodal, *self.preset.modal):
                if isinstance(annotation.get(field), dict):
                    try:
                        stated = masks.rle_size(annotation.get(field))
                        size = max(size[0], stated[0]), max(size[1], stated[1])
                        masks.check_size(*size)
                    except ValueError as error:
                        raise annotation.error(f"its {field} cannot be used ({error})", "write it again") from error
        return size

    def _pad_image(self, number: int, size: Size) -> None:
        """Replaces the image added last by a PNG copy of this size, black below and to the right of the image."""
        record, source = self.found.images[-1], self.found.image_paths.get(number)
        if source is None or self.padded_dir is None:
            raise InputError("--oversize pad: the images are needed; give their folder with --images DIR")
        image = open_image(source)
        padded = np.zeros((*size, 3), np.uint8)
        padded[: image.shape[0], : image.shape[1]] = image
        target = (self.padded_dir / record["file_name"]).with_suffix(".png")
        with writing(target) as part:
            Image.fromarray(padded).save(part, format="PNG")
        record["height"], record["width"] = self.found.sizes[number] = size
        self.found.image_paths[number] = target

    def _masks(self, annotation: Entry, size: Size) -> tuple[np.ndarray, np.ndarray]:
        """The amodal and the modal mask `[H W]`."""
        amodal, modal = (
            next((field for field in fields if annotation.get(field) is not None), None)
            for fields in (self.preset.amodal, self.preset.modal)
        )
        if amodal is None:
            wanted = " or ".join(self.preset.amodal)
            raise annotation.error(f"it has no {wanted}", "check the format or the field names")
        complete = self._fitted(annotation, amodal, size)
        return complete, complete if modal is None else self._fitted(annotation, modal, size)

    def _fitted(self, annotation: Entry, field: str, size: Size) -> np.ndarray:
        """The part of a mask that lies in the image, `[H W]`."""
        segmentation = annotation.get(field)
        if self.oversize == "refuse" or not isinstance(segmentation, dict):
            return annotation.mask(field, size)
        inside = annotation.mask(field, masks.rle_size(segmentation))[: size[0], : size[1]]
        fitted = np.zeros(size, bool)
        fitted[: inside.shape[0], : inside.shape[1]] = inside
        return fitted

    def _add(self, annotation: Entry, image_id: int, name: str, amodal: np.ndarray, modal: np.ndarray) -> int:
        """Adds an annotation, returns its id, and notes what the masks and the other fields disagree about."""
        outside = masks.area(modal & ~amodal)
        if outside:
            self.found.note(annotation, f"{outside} visible pixels outside the amodal mask were added to it")
        extra: dict[str, Any] = {"ignore": True} if annotation.get(self.preset.ignored) else {}
        copied = {"source_id": "id"} | {field: field for field in self.preset.kept}
        extra |= {key: annotation.get(field) for key, field in copied.items() if is_id(annotation.get(field))}
        number = self.found.add_annotation(image_id, name, modal, amodal, **extra)
        stored, rate = annotation.get(self.preset.rate), self.found.annotations[-1]["occlude_rate"]
        if isinstance(stored, int | float) and abs(stored - rate) > RATE_TOLERANCE:
            what = f"{self.preset.rate} {stored:.3f} is stored, but the masks give {rate:.3f} (used)"
            self.found.note(annotation, what)
        return number

    def _compare_order(self, image: Entry, drawn: Sequence[tuple[int, np.ndarray, np.ndarray]]) -> None:
        """Notes overlapping objects where the one that is visible is not the one that is said to be nearer.

        `drawn` holds id, amodal and modal mask of each object.
        """
        orders: dict[int, Any] = {i: self.found.annotations[i - 1].get(self.preset.order) for i, _, _ in drawn}
        if None in orders.values():
            return
        wrong, overlapping = [], 0
        for index, (one, amodal, modal) in enumerate(drawn):
            for other, other_amodal, other_modal in drawn[:index]:
                overlap = amodal & other_amodal
                visible, other_visible = masks.area(overlap & modal), masks.area(overlap & other_modal)
                if visible != other_visible and orders[one] != orders[other]:
                    overlapping += 1
                    if (visible > other_visible) != (orders[one] < orders[other]):
                        wrong.append(f"{other}-{one}")
        if wrong:
            shown = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
            what = f"{len(wrong)} of {overlapping} overlapping pairs are seen in another order than {self.preset.order}"
            self.found.note(image, f"{what} says (annotations {shown}); masks are used")


def _as_annotation(region: Entry, number: int) -> Entry:
    """A region of COCOA as an annotation. Regions are listed from front to back: without an order its number counts."""
    fields = region.value if isinstance(region.value, dict) else {}
    order = fields.get("order") if is_id(fields.get("order")) else number
    stuff = int(fields.get("isStuff") == 1)
    return Entry(region.path, f"region {number}", fields | {"id": None, "order": order, "isStuff": stuff})
