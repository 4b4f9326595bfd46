"""Numbers of the formats of saved files. Each file carries its number, and a newer one than ours is refused."""

from __future__ import annotations

from typing import Any

from hf_sparseprior.base.version import __version__

FORMAT_KEY = (
    "sparse_prior_format"  # in config.json, adapter_config.json and deployment.json; missing in older files of format 1
)
# Raised when files are written that earlier versions would read wrongly. Files with lower numbers are read for ever.
MODEL_FORMAT = 1  # of a saved model: config.json of our families, or of a stock model with a prior, and the weights
ADAPTER_FORMAT = 1  # of an adapter with a decay
EXPORT_FORMAT = 1  # of deployment.json, which describes an exported file


def check_format(what: str, number: Any, newest: int, key: str = FORMAT_KEY) -> None:
    """Refuse a file of a newer format.

    Args:
        what: the file is, for the message.
        number: of its format; 1 for files that have none.
        newest: that this version reads.
        key: under which the file has its number.

    Raises:
        ValueError: for a newer number, and for what is no number of a format.
    """
    if type(number) is not int or number < 1:
        raise ValueError(f"{key}={number!r:.80} must be an integer of 1 or more")
    if number > newest:
        raise ValueError(
            f"{key}={number}: {what} has format {number}, and hf_sparseprior {__version__} reads formats up to "
            f"{newest}: update hf_sparseprior"
        )
