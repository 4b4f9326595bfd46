"""git's answers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def git(root: Path, *arguments: str) -> str:
    """What a git command prints.

    Raises:
        ValueError: if it fails, as without a repository.
    """
    # Variables of a git command that this runs under, such as a hook's, would name another repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | {"LC_ALL": "C"}
    command = ["git", "-C", str(root), "-c", "core.quotePath=false", "-c", "log.showRoot=true", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise ValueError(f"git {arguments[0]} in {root}: {' '.join(done.stderr.split())}")
    return done.stdout
