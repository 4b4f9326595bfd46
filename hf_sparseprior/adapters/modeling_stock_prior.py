"""What transformers' Auto classes find in the folder of a stock model with a prior, with `trust_remote_code=True`.

config.json names a class of this file for each Auto class that can load the model, as `auto_map`. Such a class is no
model. It loads the folder by the Auto class of its own name, once more and without code of the folder: the result is a
model of transformers' own class, with its prior, as after `import hf_sparseprior`. Two things differ:

- The code of `adapters` that lies next to this file has its own name in the registries of transformers
  (`stock_attention.REGISTERED`), which is put into the config here. So several folders, and this package, may be loaded
  in one process, whatever their versions.
- Where this package is imported, it loads the folder itself, as it does without `trust_remote_code`.

Without `trust_remote_code` and without the package, transformers uses its own class, which refuses the attention that
config.json names.
"""

from __future__ import annotations

import copy
from typing import Any

import transformers
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from hf_sparseprior.adapters.stock_attention import IMPLEMENTATION, REGISTERED
from hf_sparseprior.adapters.stock_loading import from_pretrained
from hf_sparseprior.saving.saved_config import PRIOR_LOADER


class PriorFolder:
    """Loads a folder by the Auto class that has the name of the subclass."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: the models that it loads are those of transformers' own classes, which save themselves."""

    @classmethod
    def from_pretrained(cls, source: Any, *, config: Any, **options: Any) -> Any:
        """The model, as an Auto class asks for it. Arguments and errors as in `stock_loading.from_pretrained`."""
        auto_class, options = cls._auto_class(config), {**options, "trust_remote_code": False}
        if PRIOR_LOADER in AUTO_QUANTIZER_MAPPING:  # the package is imported
            return auto_class.from_pretrained(source, config=config, **options)
        return from_pretrained(auto_class, source, config=_registered(config), **options)

    @classmethod
    def _from_config(cls, config: Any, **options: Any) -> Any:
        """A model without weights and without its prior, which refuses to run."""
        config = config if PRIOR_LOADER in AUTO_QUANTIZER_MAPPING else _registered(config)
        return cls._auto_class(config).from_config(config, **options, trust_remote_code=False)

    @classmethod
    def _auto_class(cls, config: Any) -> Any:
        """The Auto class of this name, which loads the models of this config by transformers' own class again.

        Some versions of transformers register what `auto_map` names for every model with such a config.
        """
        auto_class = getattr(transformers, cls.__name__)
        registered = getattr(auto_class._model_mapping, "_extra_content", {})
        if registered.get(type(config)) is cls:
            del registered[type(config)]
        return auto_class


def _registered(config: Any) -> Any:
    """The config with the names under which the code of this folder is registered."""
    config = copy.deepcopy(config)
    pending = [config]
    while pending:
        part = pending.pop()
        pending += [inner for name in part.sub_configs if (inner := getattr(part, name, None)) is not None]
        if part._attn_implementation == IMPLEMENTATION:
            part._attn_implementation_internal = REGISTERED
        loader = getattr(part, "quantization_config", None)
        if isinstance(loader, dict) and loader.get("quant_method") == PRIOR_LOADER:
            part.quantization_config = {**loader, "quant_method": REGISTERED}
    return config


def __getattr__(name: str) -> Any:
    if not name.startswith("Auto"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return type(name, (PriorFolder,), {"__module__": __name__})
