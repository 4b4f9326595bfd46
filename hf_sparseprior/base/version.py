"""The package's version."""

from __future__ import annotations

__version__ = "0.2.0"

# The address of the repository, https://SERVER/OWNER/NAME, from which all links to the project are made; None: there is
# none yet, and no link. `python -m tests.address` writes them.
ADDRESS: str | None = None
