"""Detection and instance segmentation by mmdetection; importing this registers what the configs name (mm's
`custom_imports`).
"""

from mmdet.registry import MODELS

from tasks.common.mm import hooks, pyramid, reading  # noqa: F401
from tasks.common.mm.backbone import register_backbones
from tasks.common.mm.loading import refuse_pickles
from tasks.detection import data  # noqa: F401

refuse_pickles()
register_backbones(MODELS)
