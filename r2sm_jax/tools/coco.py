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
from PIL import Image

from r2sm_jax.data import masks
from r2sm_jax.data.images import open_image
from r2sm_jax.data.records import is_id
from r2sm_jax.errors import InputError, load_json, writing
from r2sm_jax.tools.conversion import Conversion, Entry, Size, json_files

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


def read_coco_like(
    sources: Sequence[Path], preset: Preset, *, images_dir: Path | None = None, oversize: Oversize = "refuse",
    padded_dir: Path = Path("padded"),
) -> Conversion:  # fmt: skip
    """Reads files, or folders of files, into records.

    Ids of images are kept. Where those of a later COCO file collide with earlier ones, all of its ids are shifted past
    them; of several COCOA annotations of one image the first is kept. `oversize` decides what happens where masks are
    larger than their image: `crop` cuts them, `pad` enlarges the image at the right and at the bottom, in a copy in
    `padded_dir`. Images are needed for COCOA and for `pad`. Raises InputError for files that do not fit the format.
    """
    reader = _Reader(Conversion(images_dir), preset, oversize, padded_dir)
    for path in json_files(sources):
        file = Entry(path, "", load_json(path, "annotations of this format"))
        if preset.regions:
            reader.read_cocoa(file, in_folder=path not in sources)
        else:
            reader.read_coco(file)
    if not reader.found.images:
        raise InputError(f"{', '.join(map(str, sources))}: there are no annotated images; give annotation files")
    return reader.found


@dataclass(frozen=True)
class _Reader:
    found: Conversion
    preset: Preset
    oversize: Oversize
    padded_dir: Path

    def read_coco(self, file: Entry) -> None:
        images = {image.need("id", int): image for image in file.entries("images", "image")}
        names = {int(number): name for number, name in self.preset.categories.items()}
        if file.get("categories") or not names:
            names = {c.need("id", int): c.need("name", str) for c in file.entries("categories")}
        annotations: dict[int, list[Entry]] = {image_id: [] for image_id in images}
        for annotation in file.entries("annotations", "annotation"):
            image_id, category_id = annotation.need("image_id", int), annotation.need("category_id", int)
            for key, number, known in (("image_id", image_id, images), ("category_id", category_id, names)):
                if number not in known:
                    raise annotation.error(f"{key} {number} is not in the file", "correct the id")
            named = annotation.value | {"name": names[category_id]}
            annotations[image_id].append(replace(annotation, value=named))
        shift = max(self.found.sizes) + 1 - min(images) if self.found.sizes.keys() & images.keys() else 0
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
            if image_id in self.found.sizes:
                self.found.note(record, f"left out, image {image_id} has been read before")
                continue
            self.found.add_image(record, image_id=image_id)
            regions = [_as_annotation(region, i) for i, region in enumerate(record.entries("regions"), start=1)]
            self._read_image(record, image_id, regions)

    def _read_image(self, image: Entry, number: int, annotations: Sequence[Entry]) -> None:
        """Adds the annotations of an image."""
        size = self.found.sizes[number]
        keys = (*self.preset.amodal, *self.preset.modal)
        stated = [size, *(_own_size(annotation.get(key), size) for annotation in annotations for key in keys)]
        height, width = (max(sides) for sides in zip(*stated, strict=True))
        full = replace(image, value={"height": height, "width": width}).size()
        if full != size and self.oversize == "refuse":
            what = f"its masks reach {full[0]} x {full[1]} but it is {size[0]} x {size[1]}"
            raise image.error(what, "choose --oversize crop or --oversize pad")
        if full != size and self.oversize == "pad":
            self._pad_image(number, full)
            size = full
        drawn = []
        for annotation in annotations:
            amodal, modal = self._masks(annotation, size)
            if (amodal | modal).any():
                drawn.append((self._add(annotation, number, amodal, modal), amodal | modal, modal))
            else:
                self.found.note(annotation, "left out, its mask has no pixel in the image")
        self._compare_order(image, drawn)

    def _pad_image(self, number: int, size: Size) -> None:
        """Replaces the image added last by a PNG copy of this size, black below and to the right of the image."""
        record, source = self.found.images[-1], self.found.image_paths.get(number)
        if source is None:
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
            next((key for key in keys if annotation.get(key) is not None), None)
            for keys in (self.preset.amodal, self.preset.modal)
        )
        if amodal is None:
            wanted = " or ".join(self.preset.amodal)
            raise annotation.error(f"it has no {wanted}", "check the format or the field names")
        complete = self._fitted(annotation, amodal, size)
        return complete, complete if modal is None else self._fitted(annotation, modal, size)

    def _fitted(self, annotation: Entry, key: str, size: Size) -> np.ndarray:
        """The part of a mask that lies in the image, `[H W]`."""
        if self.oversize == "refuse":
            return annotation.mask(key, size)
        inside = annotation.mask(key, _own_size(annotation.get(key), size))[: size[0], : size[1]]
        return np.pad(inside, [(0, size[0] - inside.shape[0]), (0, size[1] - inside.shape[1])])

    def _add(self, annotation: Entry, image_id: int, amodal: np.ndarray, modal: np.ndarray) -> int:
        """Adds an annotation, returns its id, and notes what the masks and the other fields disagree about."""
        outside = masks.area(modal & ~amodal)
        if outside:
            self.found.note(annotation, f"{outside} visible pixels outside the amodal mask were added to it")
        extra: dict[str, Any] = {"ignore": True} if annotation.get("iscrowd") else {}
        copied = {"source_id": "id"} | {key: key for key in self.preset.kept}
        extra |= {key: annotation.get(source) for key, source in copied.items() if is_id(annotation.get(source))}
        number = self.found.add_annotation(image_id, annotation.get("name"), modal, amodal, **extra)
        stored, rate = annotation.get("occlude_rate"), self.found.annotations[-1]["occlude_rate"]
        if isinstance(stored, int | float) and abs(stored - rate) > RATE_TOLERANCE:
            what = f"occlude_rate {stored:.3f} is stored, but the masks give {rate:.3f} (used)"
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
        for (other, other_amodal, other_modal), (one, amodal, modal) in combinations(drawn, 2):
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
