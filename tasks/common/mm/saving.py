"""The model folder of a run of mmengine: config.py and model.safetensors of the whole model, and backbone/."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.base.files import sync
from hf_sparseprior.mm.backbone import save_backbone
from hf_sparseprior.mm.loading import DATASET_META
from tasks.common.mm.config import as_json, for_frameworks

BACKBONE, CONFIG, WEIGHTS = "backbone", "config.py", "model.safetensors"


def save_model(folder: Path, config: Config, model: Any, metainfo: Mapping[str, Any] | None = None) -> None:
    """Write the whole model, with a config that needs no other folder, and its backbone alone.

    Config and weights are also what `init_model`, `init_detector` and the inferencers of mm take. `metainfo` is the
    data set's, of which these show the names and colours of the classes.
    """
    own = for_frameworks(config)
    own_keys, named = ("type", "with_cp", "output_cls_token"), config.model.backbone
    given = {key: named[key] for key in own_keys if key in named}
    # transformers' own bookkeeping, which says nothing about the architecture, is not among them.
    built = model.backbone.config
    names, default = FAMILIES[built.model_type].config_fields, type(built)()
    changed = {name: getattr(built, name) for name in names if getattr(built, name) != getattr(default, name)}
    own.model["backbone"] = {**given, **changed, "out_indices": list(built.out_indices)}
    for key in ("load_from", "resume"):
        own.pop(key, None)
    folder.mkdir(parents=True, exist_ok=True)
    own.dump(str(folder / CONFIG))
    save_backbone(model.backbone, str(folder / BACKBONE))
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    shown = {key: metainfo[key] for key in ("classes", "palette") if key in metainfo} if metainfo else {}
    # One entry alone: the order of several differs from file to file, and equal runs would not be equal bytes.
    save_file(weights, str(folder / WEIGHTS), metadata={DATASET_META: json.dumps(as_json(shown))})
    sync(folder)


def fill_model(model: torch.nn.Module, folder: Path) -> None:
    """Load the weights that `save_model` wrote: all of them, and no others.

    Raises:
        OSError: for a missing or damaged file.
        ValueError: for weights that do not fit, with their names.
    """
    file = folder / WEIGHTS
    if not file.is_file():
        raise OSError(f"{file} does not exist")
    try:
        state = load_file(file)
    except SafetensorError as error:
        raise OSError(f"{file} cannot be read, it is damaged or cut off ({error})") from None
    own = model.state_dict()
    fitting = {name for name in {*own} & {*state} if own[name].shape == state[name].shape}
    if wrong := sorted({*own, *state} - fitting):
        raise ValueError(f"{file} does not fit its {CONFIG}: {', '.join(wrong[:5])} ({len(wrong)} in all)")
    model.load_state_dict(state)
