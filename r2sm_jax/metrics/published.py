"""The published rows of R2SM (arXiv 2506.01795, Tables 1 to 3), to stand beside a score on the same split.

They are shown only beside a split that has the benchmark's own numbers of images and queries (Table 1), never beside
other data.
"""

import tomllib
from importlib.resources import files

_TABLES = tomllib.loads(files("r2sm_jax.metrics").joinpath("published.toml").read_text(encoding="utf-8"))

TABLE_1 = ("images", "instances", "amodal_queries", "modal_queries", "all_queries")
PUBLISHED: dict[str, dict[str, list[int]]] = _TABLES["table_1"]
"""Published counts by dataset and split, in the order of `TABLE_1`."""
TABLE_2: dict[str, dict[str, list[float]]] = _TABLES["table_2"]
"""By dataset and system: gIoU and cIoU of all queries, then of the amodal ones, in percent."""
TABLE_3: dict[str, dict[str, list[float]]] = _TABLES["table_3"]
"""By dataset and row: AP, AP50, AP75, APs, APm, APl and AR in percent."""


def benchmark_of(*, images: int, modal: int, amodal: int) -> str | None:
    """The R2SM dataset whose validation split has these numbers of images and queries (Table 1)."""
    wanted = {"images": images, "modal_queries": modal, "amodal_queries": amodal}
    for name in TABLE_2:
        if wanted.items() <= dict(zip(TABLE_1, PUBLISHED[name]["val"], strict=True)).items():
            return name
    return None
