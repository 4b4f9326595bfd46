"""What detection puts into mm's registries: the backbones, their pyramid, the data, and what runs of ours have."""

import hf_sparseprior.mm  # noqa: F401
from hf_sparseprior.mm.loading import refuse_pickles
from tasks.common.mm import hooks, reading  # noqa: F401
from tasks.detection import data  # noqa: F401

refuse_pickles()
