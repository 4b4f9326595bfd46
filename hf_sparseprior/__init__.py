"""Vision transformers with sparse attention and spatial priors for transformers.

Importing registers SparsePriorViT, SparsePriorSwin, SparsePriorConvit, SparsePriorIformer and SparsePriorTimesformer
with transformers' Auto classes. mmcv and its relatives, timm and torchvision are never imported from here.
"""

import importlib as _importlib
import logging as _logging
import os as _os
from typing import Any as _Any

from hf_sparseprior.cli.arguments import answer_at_once as _answer_at_once

_answer_at_once()  # before the imports that take seconds

from hf_sparseprior.adapters.peft_hook import register_with_peft as _register_with_peft
from hf_sparseprior.adapters.stock import apply_prior, remove_prior
from hf_sparseprior.adapters.stock_loading import from_pretrained, load_prior
from hf_sparseprior.attention import functional as ops
from hf_sparseprior.attention.choice import register_backend
from hf_sparseprior.base.extras import register_extra
from hf_sparseprior.base.families import Family, register_family
from hf_sparseprior.base.families import for_every_family as _for_every_family
from hf_sparseprior.base.own_files import import_files
from hf_sparseprior.kernels.program_libraries import onnx_library, onnx_session_options, openvino_extension
from hf_sparseprior.models.configuration_sparseprior_convit import SparsePriorConvitConfig
from hf_sparseprior.models.configuration_sparseprior_iformer import SparsePriorIformerConfig
from hf_sparseprior.models.configuration_sparseprior_swin import SparsePriorSwinConfig
from hf_sparseprior.models.configuration_sparseprior_timesformer import SparsePriorTimesformerConfig
from hf_sparseprior.models.configuration_sparseprior_vit import SparsePriorViTConfig
from hf_sparseprior.models.mixed_sizes import MixedSizesCollator, mixed_size_processor
from hf_sparseprior.models.modeling_sparseprior_timesformer import (
    SparsePriorTimesformerForVideoClassification,
    SparsePriorTimesformerModel,
)
from hf_sparseprior.models.modeling_sparseprior_vit import (
    SparsePriorViTBackbone,
    SparsePriorViTForImageClassification,
    SparsePriorViTModel,
)
from hf_sparseprior.models.modules import Attention, Block
from hf_sparseprior.patterns import curves, sequences, supports
from hf_sparseprior.patterns.curves import register_clip_curve, register_curve
from hf_sparseprior.patterns.decay import Decay, register_decay
from hf_sparseprior.patterns.pattern import Pattern, register_support
from hf_sparseprior.patterns.sequences import register_sequence
from hf_sparseprior.priors.layer import SparsePriorAttention
from hf_sparseprior.priors.low_rank import register_mixer
from hf_sparseprior.priors.predictor import register_predictor
from hf_sparseprior.priors.prior import resolve_prior
from hf_sparseprior.saving.saved_processor import register_image_processor as _register_image_processor

# isort: split
# Families are listed in the order of these imports, the usual one first.
from hf_sparseprior.models.modeling_sparseprior_swin import (
    SparsePriorSwinBackbone,
    SparsePriorSwinForImageClassification,
    SparsePriorSwinModel,
)

# isort: split
from hf_sparseprior.models.modeling_sparseprior_convit import (
    SparsePriorConvitBackbone,
    SparsePriorConvitForImageClassification,
    SparsePriorConvitModel,
)

# isort: split
from hf_sparseprior.base.version import __version__
from hf_sparseprior.models.modeling_sparseprior_iformer import (
    SparsePriorIformerBackbone,
    SparsePriorIformerForImageClassification,
    SparsePriorIformerModel,
)

__all__ = [
    "Attention",
    "Block",
    "Decay",
    "Family",
    "LoraViolinConfig",
    "MixedSizesCollator",
    "Pattern",
    "SparsePriorAttention",
    "SparsePriorConvitBackbone",
    "SparsePriorConvitConfig",
    "SparsePriorConvitForImageClassification",
    "SparsePriorConvitModel",
    "SparsePriorIformerBackbone",
    "SparsePriorIformerConfig",
    "SparsePriorIformerForImageClassification",
    "SparsePriorIformerModel",
    "SparsePriorSwinBackbone",
    "SparsePriorSwinConfig",
    "SparsePriorSwinForImageClassification",
    "SparsePriorSwinModel",
    "SparsePriorTimesformerConfig",
    "SparsePriorTimesformerForVideoClassification",
    "SparsePriorTimesformerModel",
    "SparsePriorViTBackbone",
    "SparsePriorViTConfig",
    "SparsePriorViTForImageClassification",
    "SparsePriorViTModel",
    "ViolinAdapterConfig",
    "__version__",
    "apply_prior",
    "curves",
    "export",
    "from_pretrained",
    "heads",
    "import_files",
    "load_prior",
    "mixed_size_processor",
    "onnx_library",
    "onnx_session_options",
    "openvino_extension",
    "ops",
    "predict",
    "register_backend",
    "register_clip_curve",
    "register_curve",
    "register_decay",
    "register_extra",
    "register_family",
    "register_mixer",
    "register_predictor",
    "register_sequence",
    "register_support",
    "remove_prior",
    "resolve_prior",
    "sequences",
    "sparsify",
    "supports",
]


def __getattr__(name: str) -> _Any:
    if name == "heads":  # of transformers, which take a second to import
        return _importlib.import_module("hf_sparseprior.models.heads")
    if name == "export":
        return _importlib.import_module("hf_sparseprior.cli.deployment").export
    if name == "sparsify":
        return _importlib.import_module("hf_sparseprior.sparsification.sparsify").sparsify
    if name == "predict":
        return _importlib.import_module("hf_sparseprior.prediction.predict").predict
    # These need peft, which is imported only when they are used.
    if name not in ("LoraViolinConfig", "ViolinAdapterConfig"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(_importlib.import_module("hf_sparseprior.adapters.violin"), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs peft: pip install peft") from error


def __dir__() -> list[str]:
    """What is public. What is imported at its first use is named, too."""
    return sorted({*__all__, "adapters"})


_register_with_peft()
_for_every_family(_register_image_processor)

if _level := _os.environ.get("SPARSEPRIOR_LOG"):
    # SPARSEPRIOR_LOG=debug says on stderr which attention backend runs and why.
    if _level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError(f"SPARSEPRIOR_LOG={_level!r} must be one of debug, info, warning, error")
    _logger = _logging.getLogger("hf_sparseprior")
    _handler = _logging.StreamHandler()
    _handler.setFormatter(_logging.Formatter("%(name)s: %(message)s"))
    _logger.addHandler(_handler)
    _logger.setLevel(_level.upper())
    _logger.propagate = False
