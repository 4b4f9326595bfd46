"""What torch counts in a forward, for tests of FLOPs."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_sparseprior.base.families import FAMILIES


def torchs_count(config, height, width, batch=1):
    """FLOPs of a classifier with dense attention written out as matrix products."""
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = FAMILIES[config.model_type].image_classifier(config).eval()
        images = torch.empty(batch, config.num_channels, height, width)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(images)
    return counter.get_total_flops()
