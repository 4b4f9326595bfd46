"""What segmentation puts into mm's registries: the backbones, the data, and what runs of ours have."""

from mmseg.registry import MODELS, OPTIM_WRAPPER_CONSTRUCTORS

from tasks.common.mm import hooks, reading  # noqa: F401
from tasks.common.mm.backbone import register_backbones
from tasks.common.mm.layer_decay import register_layer_decay
from tasks.common.mm.loading import refuse_pickles
from tasks.segmentation import data, metric  # noqa: F401

refuse_pickles()
register_backbones(MODELS)
register_layer_decay(OPTIM_WRAPPER_CONSTRUCTORS)
