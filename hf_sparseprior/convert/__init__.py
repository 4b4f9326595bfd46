"""Checkpoints in other formats: `python -m hf_sparseprior convert SOURCE OUT --prior NAME --to FORMAT`.

One file a format. Reading: `matches(keys)` recognises its parameter names, `fields(state, settings)` reads the
architecture, `rename(state)` gives the weights under our names. Writing: `check(model, target, out)` refuses what the
format cannot express, `write(model, target, out)` writes. What is missing or left over is an error, and nothing is
written.
"""

from hf_sparseprior.convert.checkpoint import convert_checkpoint, read_checkpoint, target_formats

__all__ = ["convert_checkpoint", "read_checkpoint", "target_formats"]
