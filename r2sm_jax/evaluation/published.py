"""Published figures of R2SM (arXiv 2506.01795, Tables 1 to 3), from published.toml.

They are shown only beside a split that has the benchmark's own numbers of images and queries (Table
1), never beside other data.
"""

import tomllib
from importlib.resources import files

_PAPER = tomllib.loads(
    files("r2sm_jax.evaluation").joinpath("published.toml").read_text(encoding="utf-8")
)

TABLE_1 = ("images", "instances", "amodal_queries", "modal_queries", "all_queries")
PUBLISHED: dict[str, dict[str, list[int]]] = _PAPER["table_1"]
"""Dataset -> split -> published counts, in the order of `TABLE_1`."""
TABLE_2: dict[str, dict[str, list[float]]] = _PAPER["table_2"]
"""Dataset -> system -> gIoU and cIoU of all queries, then of the amodal ones, in percent."""
TABLE_3: dict[str, dict[str, list[float]]] = _PAPER["table_3"]
"""Dataset -> row -> AP, AP50, AP75, APs, APm, APl and AR in percent; NaN where a cell could not be
read."""


def find_benchmark(*, images: int, modal: int, amodal: int) -> str | None:
    """Finds the R2SM dataset whose validation split has these numbers (Table 1); None if none."""
    for name in TABLE_2:
        counts = dict(zip(TABLE_1, PUBLISHED[name]["val"], strict=True))
        same_images = counts["images"] == images
        same_queries = counts["modal_queries"] == modal and counts["amodal_queries"] == amodal
        if same_images and same_queries:
            return name
    return None
