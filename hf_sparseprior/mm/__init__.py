"""Our families as backbones of mmsegmentation and mmdetection: `custom_imports = dict(imports=["hf_sparseprior.mm"])`.

Importing this puts the backbones into the registries of both, so far as they are installed, lets their layer-decay
constructors know them, and gives mmdetection `SimpleFeaturePyramid`.
"""

from contextlib import suppress

from hf_sparseprior.mm.backbone import register_backbones
from hf_sparseprior.mm.layer_decay import register_layer_decay

with suppress(ImportError):
    from mmseg import registry as _mmseg

    register_backbones(_mmseg.MODELS)
    register_layer_decay(_mmseg.OPTIM_WRAPPER_CONSTRUCTORS)

with suppress(ImportError):
    from mmdet import registry as _mmdet

    from hf_sparseprior.mm import pyramid

    register_backbones(_mmdet.MODELS)
    register_layer_decay(_mmdet.OPTIM_WRAPPER_CONSTRUCTORS)

__all__ = ["pyramid", "register_backbones", "register_layer_decay"]
