"""What segmentation puts into mm's registries: the backbones, the data, and what runs of ours have."""

import hf_sparseprior.mm  # noqa: F401
from hf_sparseprior.mm.loading import refuse_pickles
from tasks.common.mm import hooks, reading  # noqa: F401
from tasks.segmentation import data, metric  # noqa: F401

refuse_pickles()
