"""Checkpoints in other formats: `python -m hf_sparseprior convert SOURCE OUT --prior NAME --to FORMAT`.

Each format has one file, for one FAMILY of ours; a target of the same name may be in several. To read, `matches(keys)`
recognises its parameter names, `fields(state, settings)` reads the architecture, and `rename(state)` gives the weights
under our names; `assumed(state)`, where there is one, gives fields that files of this format cannot say, and
`remarks(state)` notes for the user. To write, `check(model, target, out)` refuses what the format cannot express, and
`write(model, target, out)` writes. If weights are missing or left over, that is
an error and nothing is written.
"""

from hf_sparseprior.convert.checkpoint import convert_checkpoint, read_checkpoint, target_formats

__all__ = ["convert_checkpoint", "read_checkpoint", "target_formats"]
