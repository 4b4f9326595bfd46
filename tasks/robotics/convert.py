"""Demonstrations in another layout: python -m tasks.robotics.convert IN OUT

    python -m tasks.robotics.convert lift.hdf5 lift.lerobot
    python -m tasks.robotics.convert pusht_cchi_v7_replay.zarr pusht.lerobot --images image
    python -m tasks.robotics.convert pusht.lerobot pusht.zarr

IN is a file in robomimic's layout (HDF5), a folder in that of Diffusion Policy's PushT (zarr) or a LeRobotDataset of
version 3. OUT is in the layout that the end of its name says: .lerobot for every simulator, .hdf5 for arms, .zarr for
PushT. What IN holds is in OUT, episode by episode: observations, chosen and executed actions, states, rewards, success,
seeds, settings of the environment and which episodes are for validation. OUT is read again and compared with IN before
it gets its name, so it is there whole or not at all, and a command that was interrupted is given again.

Numbers stay as they are, and images too but in a LeRobotDataset with videos, the default, which lose a little
(`--images image` does not). Published actions of robomimic are converted as training does it (`formats`). For what IN
does not hold OUT has a stand-in: executed actions are the chosen ones, rewards are 0, and the last step is the one that
solves the task.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.base.files import check_new
from hf_sparseprior.runs.command import run_command
from tasks.robotics import commands
from tasks.robotics.commands import KINDS

LAYOUTS = {".lerobot": "every environment", ".hdf5": "lift and can", ".zarr": "pusht"}
ENVIRONMENTS = {".hdf5": ("lift", "can"), ".zarr": ("pusht",)}
VIDEO_LOSS = 4.0  # the largest mean difference of an episode's images to their video, of 255


def convert(source: Path, out: Path, images: str = "video") -> dict[str, float]:
    """Write demonstrations in another layout, whole or not at all.

    Args:
        source: the file or folder that is read.
        out: the new one; the end of its name says its layout.
        images: of a LeRobotDataset, "video" or "image".

    Returns:
        The mean difference of each camera's images to those of `source`, of 255.

    Raises:
        OSError: if `source` does not exist, or `out` does.
        ValueError: for an end of a name, an environment or images that cannot be written, for damaged demonstrations,
            and if what was written is not what was read.
        ImportError: without the extra `robotics`.
    """
    from tasks.robotics.formats import open_demonstrations, write_demonstrations

    if out.suffix not in LAYOUTS:
        known = ", ".join(f"{suffix} ({what})" for suffix, what in LAYOUTS.items())
        raise ValueError(f"the name of {out} must end in {known}")
    if images not in KINDS:
        raise ValueError(f"images={images!r} must be one of {', '.join(KINDS)}")
    check_new(out)
    demonstrations = open_demonstrations(source)
    environment = demonstrations.settings["environment"]
    if (wanted := ENVIRONMENTS.get(out.suffix)) is not None and environment not in wanted:
        raise ValueError(
            f"{source} is of environment {environment!r}; {out.suffix} holds demonstrations of {' and '.join(wanted)}"
        )
    held = [name in demonstrations.split("validation") for name in demonstrations.episodes]
    with _scratch(out) as folder:
        episodes = []
        for number, name in enumerate(demonstrations.episodes):
            episodes.append(folder / f"{number}.npz")
            demonstrations.episode(name).save(episodes[-1])
        made = folder / out.name
        write_demonstrations(made, episodes, demonstrations.settings, held, images)
        exact = out.suffix != ".lerobot" or images == "image"
        loss = compare(demonstrations, open_demonstrations(made), exact)
        check_new(out)
        os.replace(made, out)
    return loss


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """A folder next to `out`, on its file system, that is removed in the end."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        yield Path(folder)


def compare(source: Any, made: Any, exact: bool = True) -> dict[str, float]:
    """The mean difference of each camera's images, of 255, in two openings of the same demonstrations.

    Args:
        source, made: as `formats.open_demonstrations` gives them.
        exact: whether images must be the same, too; otherwise those of an episode may differ by `VIDEO_LOSS`.

    Raises:
        ValueError: for the first part of `made` that is not that of `source`.
    """
    pairs = list(zip(source.episodes, made.episodes, strict=False))
    counts = len(source.episodes), len(made.episodes)
    lists = {
        "episodes": counts,
        "observations": (source.shapes, made.shapes),
        "settings": (source.settings, made.settings),
    }
    for split in ("train", "validation"):
        held = [[name in one.split(split) for name in one.episodes] for one in (source, made)]
        lists[f"episodes for {split}"] = held[0], held[1]
    for what, (was, found) in lists.items():
        if was != found:
            raise ValueError(f"{made.path}: {what} came back as {found}, not as {was}")
    total: dict[str, list[float]] = {key: [] for key, shape in source.shapes.items() if len(shape) == 3}
    for name, own in pairs:
        was, found = source.episode(name), made.episode(own)
        parts = {key: (getattr(was, key), getattr(found, key)) for key in ("actions", "executed", "rewards", "dones")}
        parts |= {"states": (was.states, found.states), "seed": (was.seed, found.seed)}
        parts |= {key: (values, found.observations[key]) for key, values in was.observations.items()}
        for key, (one, two) in parts.items():
            if key in total:
                total[key].append(float(np.abs(np.asarray(one, np.int16) - two).mean()))
            if not _same(key, one, two, key in total and not exact, total):
                raise ValueError(f"{made.path}: {key} of {name} did not come back as it was")
    return {key: float(np.mean(values)) for key, values in total.items()}


def _same(key: str, one: Any, two: Any, lossy: bool, total: dict[str, list[float]]) -> bool:
    if lossy:
        return total[key][-1] <= VIDEO_LOSS
    if key in ("states", "rewards"):  # which some layouts keep in float32
        one, two = np.asarray(one, np.float32), np.asarray(two, np.float32)
    return np.array_equal(one, two)


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.convert()
    arguments = parser.parse_args(argv)

    def work() -> None:
        loss = convert(arguments.source, arguments.out, arguments.images)
        differences = ", ".join(f"{key} {value:.2f} of 255" for key, value in loss.items())
        images = f"; images differ by {differences}" if differences else ""
        print(f"{arguments.out}: read again and as {arguments.source}{images}")

    return run_command(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
