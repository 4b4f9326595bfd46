"""Detection and instance segmentation by mmdetection; importing this registers what the configs name (mm's
`custom_imports`).
"""

from mmdet.registry import MODELS

from tasks.dense import hooks, pyramid, reading  # noqa: F401
from tasks.dense.backbone import SparsePriorViT
from tasks.dense.loading import refuse_pickles
from tasks.detection import data  # noqa: F401

refuse_pickles()
MODELS.register_module(module=SparsePriorViT, force=True)
