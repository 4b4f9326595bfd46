"""Scripted demonstrations: python -m tasks.robotics.demonstrate TASK OUT [--episodes N] [--seed S] [--cameras ...]

    python -m tasks.robotics.demonstrate lift demonstrations/lift.hdf5 --episodes 100
    python -m tasks.robotics.demonstrate lift images.hdf5 --cameras agentview robot0_eye_in_hand
    python -m tasks.robotics.demonstrate pusht pusht.zarr --cameras image
    python -m tasks.robotics.demonstrate --replay demonstrations/lift.hdf5

A controller that knows the simulator's state solves the task. Its actions are recorded, noisy ones are executed, and
only episodes that end solved are kept. OUT.json (rates, versions, time) and, if something can be drawn, a picture and a
film of episodes lie next to the file. Each episode is written when it is over, so the same command goes on after an
interruption. `--replay` executes the actions of a file again: those with noise, which must give the same states, and
those without.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from hf_sparseprior.base.checks import check_integer
from hf_sparseprior.base.files import check_new, write_text
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.environment import command_line
from hf_sparseprior.runs.locks import holder, locked
from hf_sparseprior.runs.results import write_results
from tasks.robotics import commands
from tasks.robotics.config import VALIDATION_SEED
from tasks.robotics.environment import Environment
from tasks.robotics.environments import make_environment, picture_problem
from tasks.robotics.formats import (
    Demonstrations,
    Episode,
    check_environment,
    open_demonstrations,
    write_demonstrations,
)
from tasks.robotics.formats.demonstrations import ACTIONS, EXECUTED
from tasks.robotics.video import contact_sheet, write_video

if TYPE_CHECKING:  # their simulators are imported when they are made
    from tasks.robotics.pusht import PushT
    from tasks.robotics.robosuite_arm import RobosuiteArm

STEPS = {"lift": 150, "can": 300, "pusht": 300}  # an episode that takes longer has failed
FILM_SIZE, PICTURE_SIZE = 256, 96
SHOWN = 4  # episodes in the picture
AFTER_SUCCESS = 4  # steps that are recorded after the task is first solved; it has to be solved at the last one as well
GIVES_UP = 20  # failures in a row


class Demonstrator(Protocol):
    """Solves a task from the simulator's state."""

    def reset(self, seed: int) -> None:
        """Prepare for an episode that the environment has just begun."""

    def act(self) -> np.ndarray:
        """The right action for the environment's state."""

    def disturbed(self, action: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """What is executed instead of the action."""


def make_demonstrator(environment: Environment) -> Demonstrator:
    """The demonstrator of an environment."""
    if environment.name == "pusht":
        from tasks.robotics.pusht_demonstrator import PushTDemonstrator

        return PushTDemonstrator(cast("PushT", environment))
    from tasks.robotics.arm_demonstrator import ArmDemonstrator

    return ArmDemonstrator(cast("RobosuiteArm", environment))


def record(environment: Environment, demonstrator: Demonstrator, seed: int) -> Episode | None:
    """One episode, or None if it failed.

    Args:
        environment: where the demonstrations are recorded.
        demonstrator: controller for this environment.
        seed: seeds the environment and the noise.
    """
    observation = environment.reset(seed)
    demonstrator.reset(seed)
    generator = np.random.default_rng(seed)
    rows: list[tuple[Any, ...]] = []
    left = AFTER_SUCCESS if environment.name != "pusht" else 0
    success = False
    for _ in range(STEPS[environment.name]):
        state = environment.state()
        action = demonstrator.act()
        disturbed = demonstrator.disturbed(action, generator)
        following, reward, success, _ = environment.step(disturbed)
        rows.append((action, disturbed, state, reward, success, observation))
        observation = following
        if success and not left:
            break
        left -= success
    if not success:
        return None
    actions, executed, states, rewards, dones, observations = zip(*rows, strict=True)
    return Episode(
        seed=seed,
        actions=np.array(actions, dtype=np.float64),
        executed=np.array(executed, dtype=np.float64),
        states=np.array(states, dtype=np.float64),
        rewards=np.array(rewards, dtype=np.float64),
        dones=np.array(dones, dtype=bool),
        observations={key: np.stack([seen[key] for seen in observations]) for key in observations[0]},
    )


def demonstrate(
    task: str, out: Path, episodes: int, seed: int = 0, cameras: Sequence[str] = (), image_size: int | None = None
) -> dict[str, Any]:
    """Write a file of demonstrations, and return what is written next to it as JSON.

    Raises:
        ValueError: for bad values, unfinished work of another run, or a task that is never solved.
        OSError: if the file exists and is finished, with its JSON and pictures, or while another process writes it.
    """
    if episodes < 1:
        raise ValueError(f"--episodes {episodes} must be 1 or more")
    check_integer("--seed", seed, 0)
    lock = out.with_name(f"{out.name}.lock")
    with locked(lock) as mine:
        if not mine:
            raise OSError(
                f"{out} is in use by {holder(lock) or 'another process'}; wait for its end or choose another OUT"
            )
        return _demonstrate(task, out, episodes, seed, cameras, image_size)


def _demonstrate(
    task: str, out: Path, episodes: int, seed: int, cameras: Sequence[str], image_size: int | None
) -> dict[str, Any]:
    folder = _unfinished(out)
    if not folder.exists():  # else the episodes may be written and what lies next to them not
        check_new(out)
    started = time.perf_counter()
    environment = make_environment(task, cameras, image_size)
    _claim(folder, environment.settings | {"first_seed": seed})
    demonstrator = make_demonstrator(environment)
    kept: list[Path] = []
    failed: list[int] = []
    lengths: list[int] = []
    attempt = seed
    while len(kept) < episodes:
        if attempt >= VALIDATION_SEED:
            raise ValueError(
                f"--seed {seed} reaches {VALIDATION_SEED} after {attempt - seed} attempts; seeds from there on are "
                "those that policies are chosen and tested by"
            )
        path, failure = folder / f"seed_{attempt:08d}.npz", folder / f"seed_{attempt:08d}.failed"
        if not path.exists() and not failure.exists():
            episode = record(environment, demonstrator, attempt)
            if episode is None:
                failure.touch()
            else:
                episode.save(path)
                lengths.append(len(episode.actions))
        if path.exists():
            kept.append(path)
        else:
            failed.append(attempt)
        if len(failed) >= GIVES_UP and all(number in failed for number in range(attempt + 1 - GIVES_UP, attempt + 1)):
            raise ValueError(f"{task}: {GIVES_UP} episodes in a row failed, the last with seed {attempt}")
        attempt += 1
        _progress(f"{task}: {len(kept)}/{episodes} episodes, {len(failed)} failed", last=len(kept) == episodes)
    if not out.exists():
        write_demonstrations(out, kept, environment.settings)
    demonstrations = open_demonstrations(out)
    if len(demonstrations.episodes) != episodes or demonstrations.settings != environment.settings:
        raise ValueError(f"{out} has {len(demonstrations.episodes)} episodes of other settings; choose another OUT")
    steps = list(demonstrations.lengths.values())
    results = {
        "command": command_line(),
        "metric": "share of episodes that ended solved",
        "episodes": episodes,
        "attempts": attempt - seed,
        "success": episodes / (attempt - seed),
        "failed_seeds": failed,
        "steps": {"mean": float(np.mean(steps)), "min": min(steps), "max": max(steps)},
        "megabytes": round(sum(file.stat().st_size for file in _files(out)) / 1e6, 2),
        "recorded_now": len(lengths),
        "seconds": round(time.perf_counter() - started, 2),
        "settings": environment.settings,
    }
    write_results(out.with_name(f"{out.name}.json"), results)
    if problem := picture_problem(environment):
        print(f"no pictures: {problem}", file=sys.stderr)
    else:
        draw(environment, demonstrations, out)
    environment.close()
    shutil.rmtree(folder)  # comes last: until then the same command goes on
    return results


def draw(environment: Environment, demonstrations: Demonstrations, out: Path) -> None:
    """A picture of the first episodes and a film of the first one, by executing their actions again."""
    rows = []
    seeds = known_seeds(demonstrations)
    for index, name in enumerate(demonstrations.episodes[:SHOWN]):
        environment.reset(seeds[name])
        frames, film = [environment.render(PICTURE_SIZE)], [environment.render(FILM_SIZE)]
        for action in demonstrations.read(name, EXECUTED):
            environment.step(action)
            frames.append(environment.render(PICTURE_SIZE))
            if index == 0:
                film.append(environment.render(FILM_SIZE))
        if index == 0:
            write_video(out.with_name(f"{out.name}.mp4"), film, environment.fps)
        rows.append(frames)
    contact_sheet(rows).save(out.with_name(f"{out.name}.png"))


def known_seeds(demonstrations: Demonstrations) -> dict[str, int]:
    """The seed of each episode by name.

    Raises:
        ValueError: if the file does not say one.
    """
    seeds = {name: seed for name, seed in demonstrations.seeds.items() if seed is not None}
    if len(seeds) < len(demonstrations.seeds):
        raise ValueError(f"{demonstrations.path} does not say the seeds of its episodes")
    return seeds


def replay(path: Path) -> dict[str, Any]:
    """Execute a file's actions again.

    Returns:
        episodes: their number; executed: share solved by the executed actions; state_error: the largest difference of
        the states that they lead to, 0 on the machine that recorded them; recorded: share solved by the recorded
        actions, which have no noise.

    Raises:
        ValueError: if the file was made in another environment, or does not say its seeds.
    """
    demonstrations = open_demonstrations(path)
    seeds = known_seeds(demonstrations)
    # Images are not needed, and nothing depends on them.
    environment = make_environment(demonstrations.settings["environment"])
    check_environment(demonstrations, environment)
    solved = {EXECUTED: 0, ACTIONS: 0}
    error = 0.0
    keys = [key for key, shape in demonstrations.shapes.items() if len(shape) == 1]
    for index, name in enumerate(demonstrations.episodes):
        for key in solved:
            observation = environment.reset(seeds[name])
            recorded = {wanted: demonstrations.read(name, wanted) for wanted in keys}
            success = False
            for step, action in enumerate(demonstrations.read(name, key)):
                if key == EXECUTED:
                    error = max(error, *(float(np.abs(observation[k] - recorded[k][step]).max()) for k in keys))
                observation, _, success, _ = environment.step(action)
            solved[key] += success
        _progress(f"replayed {index + 1}/{len(demonstrations.episodes)}", index + 1 == len(demonstrations.episodes))
    environment.close()
    count = len(demonstrations.episodes)
    return {
        "episodes": count,
        "executed": solved[EXECUTED] / count,
        "state_error": error,
        "recorded": solved[ACTIONS] / count,
    }


def _unfinished(out: Path) -> Path:
    """The folder for episodes of an unfinished file."""
    return out.with_name(f"{out.name}.episodes")


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Make the folder of episodes that of these settings, and refuse one that has others."""
    owner = folder / "settings.json"
    text = json.dumps(settings, indent=1) + "\n"
    if owner.exists() and owner.read_text(encoding="utf-8") != text:
        raise ValueError(f"{folder} holds episodes of another run; delete it or choose another OUT")
    folder.mkdir(parents=True, exist_ok=True)
    write_text(owner, text)


def _files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def _progress(text: str, last: bool) -> None:
    """One line that is overwritten on a terminal; elsewhere only the last is printed."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="\n" if last else "", file=sys.stderr, flush=True)
    elif last:
        print(text, file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.demonstrate()
    arguments = parser.parse_args(argv)
    if (arguments.replay is None) == (arguments.out is None):
        parser.error("give TASK and OUT, or --replay FILE")

    def work() -> None:
        if arguments.replay is not None:
            print(json.dumps(replay(arguments.replay)))
            return
        results = demonstrate(
            arguments.task,
            arguments.out,
            arguments.episodes,
            arguments.seed,
            arguments.cameras,
            arguments.image_size,
        )
        print(
            f"{arguments.out}: {results['episodes']} of {results['attempts']} attempts solved, "
            f"{results['steps']['mean']:.0f} steps on average, {results['seconds']:.0f} s"
        )

    return run_command(parser.prog, work, goes_on=f"with {arguments.out}" if arguments.out else None)


if __name__ == "__main__":
    sys.exit(main())
