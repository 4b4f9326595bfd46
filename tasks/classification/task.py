"""The task of this folder, which the library holds (hf_sparseprior/classification/task.py): `sparseprior train` does it
too.
"""

from hf_sparseprior.classification.task import CLASSIFICATION

__all__ = ["CLASSIFICATION"]
