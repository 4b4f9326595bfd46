"""Several machines that do the runs of one command: its options --shard and --ray (docs/several-machines.md)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hf_sparseprior.runs.locks import NoLocks, locked

LOCAL = "local"  # an address that starts Ray on this machine


@dataclass(frozen=True)
class Shard:
    """One of several commands that do the same runs. Each of them has a part that it does first.

    number: which one, from 1 on. of: how many there are.
    """

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read "K/N"; ValueError if it is something else."""
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        shard = cls(*map(int, found.groups())) if found else None
        if shard is None or not 1 <= shard.number <= shard.of:
            raise ValueError(f"--shard={text} must be K/N with whole numbers 1 <= K <= N, such as 3/16")
        return shard

    def distance(self, run: int) -> int:
        """How many shards this one comes after that of a run, which are numbered from 0 on; 0 for its own."""
        return (run - self.number + 1) % self.of

    def order(self, runs: int) -> list[int]:
        """Numbers of all runs as this shard does them: its own, then those of the next one, and so on round.

        What is left at the end is begun by each shard in another place, so that they seldom want the same run.
        """
        return sorted(range(runs), key=self.distance)


def check_options(jobs: int | None, shard: Shard | None, ray: str | None) -> None:
    """Raise ValueError for values that are not allowed, alone or together; None: the option was not given."""
    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs={jobs} must be 1 or more")
    if ray is None:
        return
    if not ray or "://" in ray:  # a client outside the cluster does not see the disk
        raise ValueError(f"--ray={ray!r} must be {LOCAL}, auto, or HOST:PORT of a cluster that this machine belongs to")
    if jobs is not None:
        raise ValueError(
            f"--jobs={jobs} and --ray={ray} exclude each other: the cluster says how many runs go at a time"
        )
    if shard is not None:
        raise ValueError(
            f"--shard={shard.number}/{shard.of} and --ray={ray} exclude each other: the cluster spreads the runs itself"
        )


def check_locks(folder: Path) -> None:
    """Raise NoLocks if files in the folder, which is made, cannot be locked: shards would do runs twice."""
    try:
        with locked(folder / "shards.lock"):
            pass
    except NoLocks as error:
        raise NoLocks(f"--shard: {error}") from None
