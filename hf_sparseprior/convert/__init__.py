"""Foreign checkpoints as SparsePriorViT models: `python -m hf_sparseprior convert SOURCE OUT --prior NAME`.

One file a source: `matches(keys)` recognises its parameter names, `fields(state, config)` reads the architecture,
`rename(state)` gives the weights under our names. What is missing or left over is an error and nothing is written.
"""

from hf_sparseprior.convert.checkpoint import convert_checkpoint, read_checkpoint

__all__ = ["convert_checkpoint", "read_checkpoint"]
