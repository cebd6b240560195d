"""The readers of annotation formats, which yield an `ImageTruth` for each image.

tools/convert.py makes commands of them.
"""

from r2sm_jax.data.readers.coco import read_coco as read_coco
from r2sm_jax.data.readers.corrected import read_corrected as read_corrected
from r2sm_jax.data.readers.listing import COCOOptions as COCOOptions, Kind as Kind
from r2sm_jax.data.readers.mask_folders import read_mask_folders as read_mask_folders
from r2sm_jax.data.readers.referring import (
    R2SMFields as R2SMFields,
    json_files as json_files,
    read_lisa_plus_plus as read_lisa_plus_plus,
    read_mmr as read_mmr,
    read_r2sm as read_r2sm,
    read_reasonseg as read_reasonseg,
    read_refcoco as read_refcoco,
)
from r2sm_jax.data.readers.yolo import read_yolo as read_yolo
