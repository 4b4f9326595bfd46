"""Structured pruning: which heads and widths a model can lose, the search for them, and the smaller model."""

from hf_sparseprior.compression.callback import SearchCallback
from hf_sparseprior.compression.export import compressed_config, compressed_model
from hf_sparseprior.compression.search import STRUCTURES, MaskSearch, pruned_share
from hf_sparseprior.compression.units import Units

__all__ = [
    "STRUCTURES",
    "MaskSearch",
    "SearchCallback",
    "Units",
    "compressed_config",
    "compressed_model",
    "pruned_share",
]
