"""Episodes of an evaluation: played by one or several processes, each kept as soon as it is over.

An episode follows from its seed and from the conditions (weights, sampler, simulator, versions), not from what was
played before it or beside it. So it is a file of its own, in a folder whose name follows from the conditions. Whoever
plays locks an episode first and leaves alone what another process has locked or finished; the processes of one
evaluation share it that way, and so do two evaluations in one folder. A lock ends with its process, however that dies.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_sparseprior.base.files import replace_durably, write_text
from hf_sparseprior.base.json_files import RECORD_BYTES, read_json
from hf_sparseprior.base.variables import variables_set
from hf_sparseprior.cli.command import USER_ERRORS
from hf_sparseprior.runs.locks import NoLocks, locked
from hf_sparseprior.runs.processes import visible_gpus
from tasks.robotics.rollout import Episode

CONDITIONS = "conditions.json"
WAKE = 0.5  # seconds between two looks at what other processes do
KEPT: dict[str, Any] = {"seed": int, "success": bool, "max_reward": (int, float), "steps": int}
KEPT["coverage"] = (int, float, type(None))
VARIABLES = {"OMP_NUM_THREADS": "1"}  # for libraries that are imported later


@dataclass(frozen=True)
class Wanted:
    """An episode to play: its seed, and pixels of the frames that are kept; 0: none."""

    seed: int
    picture_size: int = 0


class EpisodeStore:
    """Finished episodes under the same conditions, in a folder of their own.

    Args:
        folder: holds one such folder for all conditions that there were.
        conditions: what the outcome of an episode depends on besides its seed, as values for JSON.
    """

    def __init__(self, folder: Path, conditions: Mapping[str, Any]) -> None:
        text = json.dumps(conditions, indent=1, sort_keys=True) + "\n"
        self.name = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.folder = folder / self.name
        self._text = text

    def prepare(self) -> None:
        """Make the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / CONDITIONS).exists():
            with self.claimed(CONDITIONS) as mine:
                if mine:
                    write_text(self.folder / CONDITIONS, self._text)

    def read(self, wanted: Wanted) -> Episode | None:
        """The episode, if it was played to its end and has the frames that are wanted.

        Raises:
            ValueError: for a file that is damaged.
        """
        path = self._path(wanted.seed)
        frames = self._frames(wanted)
        try:
            content = read_json(path, RECORD_BYTES, finite=False)
            if {key: isinstance(content[key], kind) for key, kind in KEPT.items()} != dict.fromkeys(KEPT, True):
                raise ValueError("a value is missing or of another kind")
            episode = Episode(**{key: content[key] for key in KEPT})
            if episode.seed != wanted.seed:
                raise ValueError(f"it is of seed {episode.seed}")
            if wanted.picture_size:
                with np.load(frames, allow_pickle=False) as file:
                    episode.frames = list(file["frames"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
            raise ValueError(f"{path} or its frames are damaged ({error}); remove them") from None
        return episode

    def write(self, episode: Episode, wanted: Wanted) -> None:
        """Keep an episode that is over. It is there whole or not at all, and last."""
        if wanted.picture_size:
            frames = self._frames(wanted)
            scratch = frames.with_name(f"{frames.name}.partial")
            with scratch.open("wb") as file:
                np.savez_compressed(file, frames=np.stack(episode.frames))
            replace_durably(scratch, frames)
        kept = {key: getattr(episode, key) for key in KEPT}
        write_text(self._path(episode.seed), json.dumps(kept) + "\n")

    @contextmanager
    def claimed(self, what: int | str) -> Iterator[bool]:
        """Whether this process may play the episode of a seed. Where files cannot be locked it may."""
        with ExitStack() as held:
            try:
                mine = held.enter_context(locked(self.folder / f"{what}.lock"))
            except NoLocks:
                mine = True
            yield mine

    def _path(self, seed: int) -> Path:
        return self.folder / f"seed_{seed:08d}.json"

    def _frames(self, wanted: Wanted) -> Path:
        return self.folder / f"seed_{wanted.seed:08d}_{wanted.picture_size}.npz"


def play(
    store: EpisodeStore,
    wanted: Sequence[Wanted],
    roll: Callable[[Wanted], Episode],
    on_episode: Callable[[Episode], None] = lambda episode: None,
) -> list[Episode]:
    """All episodes: those that are finished already are read, the others are played here, or by who is playing them.

    Args:
        store: where finished episodes are kept.
        wanted: in the order in which they are tried.
        roll: plays one.
        on_episode: called with each as soon as it is finished or read.
    """
    found: dict[int, Episode] = {}
    while left := [each for each in wanted if each.seed not in found]:
        before = len(found)
        for each in left:
            episode = store.read(each)
            if episode is None:
                with store.claimed(each.seed) as mine:
                    # Another process may have finished it between the two lines before.
                    if mine and (episode := store.read(each)) is None:
                        episode = roll(each)
                        store.write(episode, each)
            if episode is not None:
                found[each.seed] = episode
                on_episode(episode)
        if len(found) == before:
            time.sleep(WAKE)
    return [found[each.seed] for each in wanted]


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes in one thread in this block: with more, sums are rounded differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# ---- several processes ----------------------------------------------------------------------------------------------


def play_in_processes(
    jobs: int, store: EpisodeStore, wanted: Sequence[Wanted], work: Callable[..., None], *arguments: Any
) -> Iterator[None]:
    """Start processes that play, and end when all have ended. Each step of the iterator is a moment of waiting.

    A process that is killed leaves its episode to the others. Closing the iterator ends the processes.

    Args:
        jobs: how many.
        store, wanted: as `play` takes them.
        work: a function of a module, called as `work(store, wanted, *arguments)` in each process, which plays.
        arguments: are pickled.

    Raises:
        ValueError, OSError, ImportError: as one of the processes raised it.
        RuntimeError: if one failed otherwise.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    gpus = visible_gpus()
    processes: list[Any] = []
    links: list[Any] = []
    try:
        for number in range(jobs):
            mine, theirs = context.Pipe()
            order = [*wanted[number::jobs], *(each for index, each in enumerate(wanted) if index % jobs != number)]
            # The server keeps the variables of its start; what was set in this process since is handed on.
            variables = VARIABLES | {name: os.environ[name] for name in ("MUJOCO_GL",) if name in os.environ}
            variables |= {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {}
            process = context.Process(target=_work, args=(theirs, variables, work, (store, order, *arguments)))
            with variables_set(VARIABLES):
                forkserver.ensure_running()
                process.start()
            theirs.close()
            processes.append(process)
            links.append(mine)
        while any(process.exitcode is None for process in processes):
            connection.wait([process.sentinel for process in processes if process.exitcode is None], WAKE)
            for process, link in zip(processes, links, strict=True):
                _check(process, link)
            yield
    finally:
        for process in processes:
            process.terminate()
        for process, link in zip(processes, links, strict=True):
            process.join()
            link.close()


def _check(process: Any, link: Any) -> None:
    """Raise what a process raised. One that was killed is no error: others play what it left."""
    said = None
    with suppress(EOFError, OSError):
        said = link.recv() if link.poll() else None
    if said is not None:
        kind, text = said
        raise {"ImportError": ImportError, "OSError": OSError}.get(kind, ValueError)(text)
    if process.exitcode is not None and 0 < process.exitcode < 128:
        raise RuntimeError(f"process {process.pid}, which played episodes, failed with exit status {process.exitcode}")


def _work(link: Any, variables: Mapping[str, str], work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    multiprocessing.set_start_method(None, force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; who started this ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(link,), daemon=True).start()
    os.environ.update(variables)
    try:
        with one_thread():
            work(*arguments)
    except USER_ERRORS as error:
        kind = next((base.__name__ for base in (ImportError, OSError) if isinstance(error, base)), "ValueError")
        link.send((kind, str(error)))


def _end_with(link: Any) -> None:
    """End this process when the one that started it is gone."""
    with suppress(EOFError, OSError):
        link.recv()
    os.kill(os.getpid(), signal.SIGKILL)  # an episode that is not over is nothing that is kept
