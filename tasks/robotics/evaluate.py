"""Evaluate a policy in its simulator: python -m tasks.robotics.evaluate RUN [--episodes N] [--jobs J] [--untrained]

Every episode is kept in OUT/episodes as soon as it is over. After an interruption the same command goes on with the
episodes that are left, and `--episodes 100` after 50 plays 50 more. The results are the same, bit for bit, however many
processes play and wherever they were interrupted.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers.utils import logging as transformers_logging

from hf_sparseprior.analysis.pictures import ACCENT, INK, pyplot, save
from hf_sparseprior.base.checks import check_integer
from hf_sparseprior.base.files import file_sha256
from hf_sparseprior.base.own_files import import_files, imported_paths
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.environment import environment
from hf_sparseprior.runs.locks import turn
from hf_sparseprior.runs.measured import settings, suffix
from hf_sparseprior.runs.processes import check_alone
from hf_sparseprior.runs.results import Results
from hf_sparseprior.runs.run_folder import MODEL, check_place, evaluation_folder
from tasks.robotics import commands
from tasks.robotics.config import TEST_SEED
from tasks.robotics.environment import Environment
from tasks.robotics.environments import picture_problem
from tasks.robotics.episodes import EpisodeStore, Wanted, one_thread, play, play_in_processes
from tasks.robotics.policy import POLICY_FILE, CrosswayPolicy, policy_sha256
from tasks.robotics.rollout import Episode, make_matching_environment, rollout, summary
from tasks.robotics.video import write_video

RESULTS_TEST = "results_test"
EPISODES = "episodes"
PICTURED = 4  # episodes in picture and video
FRAME_SIZE = 160  # pixels of each
SHOWN_EVERY = 0.5  # seconds between two lines of progress inside an episode


@dataclass
class Rollouts:
    """Which episodes a policy is judged by.

    episodes: how many; their seeds are `seed`, `seed` + 1, ...
    seed: seed of the first episode; None: the run's `trainer.test_seed`, by default TEST_SEED.
    untrained: the same policy with random weights instead, for comparison.
    max_steps: actions of an episode; None: the environment's horizon.
    sampler, sampling_steps: replace the policy's own.
    """

    episodes: int = 50
    seed: int | None = None
    untrained: bool = False
    max_steps: int | None = None
    sampler: str | None = None
    sampling_steps: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("episodes", "max_steps", "sampling_steps"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value} must be 1 or more")
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"--seed {self.seed} must be 0 or more")


def evaluate(
    run: Path, rollouts: Rollouts, out: Path | None = None, show_progress: bool = False, jobs: int = 1
) -> dict[str, Any]:
    """Measure success on held-out seeds; write results_test.json, episodes.png and a film of the first episodes.

    Of other episodes or settings than those in the folder they have a name of their own
    (hf_sparseprior/runs/measured.py).

    Episodes that were played before, under the same conditions, are not played again. If nothing can be drawn, picture
    and film are left out, and one line says so. A policy without cameras does not need them.

    Args:
        run: folder of a run, or of a saved policy.
        rollouts: which episodes.
        out: folder; None: `default_folder`. Several evaluations may use one at the same time.
        show_progress: show progress in one line.
        jobs: how many processes play; each computes in one thread.

    Raises:
        ValueError, OSError: for bad values, files, and an environment with other settings than the demonstrations'.
    """
    check_alone("evaluate")
    return judge(run, rollouts, out, show_progress, jobs)


def judge(
    run: Path, rollouts: Rollouts, out: Path | None = None, show_progress: bool = False, jobs: int = 1
) -> dict[str, Any]:
    """`evaluate`, in a process that may be one of several of which it alone plays."""
    if jobs < 1:
        raise ValueError(f"--jobs {jobs} must be 1 or more")
    folder, out = policy_folder(run), out or default_folder(run, rollouts.untrained)
    check_place(out, "--out")
    policy = load_policy(folder, rollouts)
    started = time.monotonic()
    store = EpisodeStore(out / EPISODES, conditions(policy, folder, rollouts))
    found, played, fps = run_episodes(policy, folder, rollouts, store, jobs, show_progress)
    results = Results(
        task="robotics",
        metrics=summary(found),
        config={"rollouts": asdict(rollouts) | {"seed": first_seed(policy, rollouts)}},
        parameters=sum(parameter.numel() for parameter in policy.parameters()),
        seconds=round(time.monotonic() - started, 2),
        details={
            "policy": str(folder),
            "untrained": rollouts.untrained,
            "environment": policy.about["environment"],
            "settings": policy.about["settings"],
            "episodes": [{key: value for key, value in asdict(each).items() if key != "frames"} for each in found],
            "played_now": played,
            "sampler": policy.config.sampler,
            "sampling_steps": policy.config.sampling_steps or policy.config.noise_levels,
            "model_sha256": None if rollouts.untrained else policy_sha256(folder),
            "film": None,
        },
    )
    out.mkdir(parents=True, exist_ok=True)
    with turn(out / "evaluation.lock"):  # results, picture and film of one evaluation
        own_name = name_apart(out, results.content())
        if pictured := [episode for episode in found if episode.frames]:
            drawn = out / f"episodes{own_name}"
            results.details["film"] = draw(pictured, results.metrics, policy, rollouts, fps, drawn)
        return results.write(out / f"{RESULTS_TEST}{own_name}.json")


def name_apart(out: Path, results: Mapping[str, Any]) -> str:
    """What the names of the files of an evaluation have so that they replace those of no other."""
    config, weights = results["config"], results["model_sha256"]
    return suffix(out, RESULTS_TEST, config, weights, lambda of: settings(of, "rollouts"), None)


def draw(
    pictured: Sequence[Episode],
    metrics: Mapping[str, Any],
    policy: CrosswayPolicy,
    rollouts: Rollouts,
    fps: int,
    path: Path,
) -> str:
    """Picture and film of the first episodes, PATH.png and a film next to it. Returns the film's name."""
    name = policy.about["environment"]["name"]
    heading = f"{name}: {success_text(metrics, rollouts.episodes)}{', untrained' if rollouts.untrained else ''}"
    draw_episodes(pictured, path.with_name(f"{path.name}.png"), heading)
    longest = max(len(episode.frames) for episode in pictured)
    frames = [side_by_side(pictured, index) for index in range(longest)]
    return write_video(path.with_name(f"{path.name}.mp4"), frames, fps).name


def first_seed(policy: CrosswayPolicy, rollouts: Rollouts) -> int:
    """Seed of the first episode.

    Raises:
        ValueError: if that in policy.json is none.
    """
    if rollouts.seed is not None:
        return rollouts.seed
    return check_integer(f"{POLICY_FILE}: about.test_seed", policy.about.get("test_seed", TEST_SEED), 0)


def conditions(policy: CrosswayPolicy, folder: Path, rollouts: Rollouts) -> dict[str, Any]:
    """What the outcome of an episode depends on besides its seed."""
    found = environment()
    return {
        "policy": file_sha256(folder / POLICY_FILE),
        "weights": None if rollouts.untrained else policy_sha256(folder),
        "max_steps": rollouts.max_steps,
        "sampler": policy.config.sampler,
        "sampling_steps": policy.config.sampling_steps,
        "versions": found["versions"],
        "hardware": {key: value for key, value in found["hardware"].items() if key in ("cpu", "gpu")},
    }


def policy_folder(run: Path) -> Path:
    """The folder of a run's saved policy. A folder that is no run is taken to be a policy's."""
    return run / MODEL if (run / MODEL / POLICY_FILE).is_file() else run


def default_folder(run: Path, untrained: bool) -> Path:
    """RUN/evaluation, or RUN/evaluation/untrained for random weights."""
    folder = evaluation_folder(policy_folder(run))
    return folder / "untrained" if untrained else folder


def load_policy(folder: Path, rollouts: Rollouts) -> CrosswayPolicy:
    """The policy that acts, in evaluation mode."""
    policy = CrosswayPolicy.from_pretrained(folder)
    if rollouts.untrained:
        about = policy.about
        torch.manual_seed(0)
        policy = CrosswayPolicy(policy.config, policy.normalizer).eval()
        policy.about = about
    if rollouts.sampler is not None:
        policy.config.sampler = rollouts.sampler
    if rollouts.sampling_steps is not None:
        policy.config.sampling_steps = rollouts.sampling_steps
    policy.config.__post_init__()
    return policy.cuda() if torch.cuda.is_available() else policy


def run_episodes(
    policy: CrosswayPolicy, folder: Path, rollouts: Rollouts, store: EpisodeStore, jobs: int, show_progress: bool
) -> tuple[list[Episode], int, int]:
    """All episodes, the first ones with frames if something can be drawn.

    Returns:
        The episodes, how many of them were not there before, and the simulator's frames a second.
    """
    with make_matching_environment(policy.about, str(folder)) as simulator, one_thread():
        if problem := picture_problem(simulator):
            print(f"no pictures: {problem}", file=sys.stderr)
        wanted = [
            Wanted(first_seed(policy, rollouts) + number, FRAME_SIZE if number < PICTURED and not problem else 0)
            for number in range(rollouts.episodes)
        ]
        store.prepare()
        there = {each.seed: episode for each in wanted if (episode := store.read(each)) is not None}
        before, solved = len(there), sum(episode.success for episode in there.values())
        progress = tqdm(
            total=len(wanted), initial=before, desc="episodes", disable=not show_progress, dynamic_ncols=True
        )

        shown = float("-inf")

        def on_step(step: int, horizon: int) -> None:
            nonlocal shown
            if time.monotonic() - shown >= SHOWN_EVERY:
                shown = time.monotonic()
                progress.set_postfix(solved=solved, action=f"{step}/{horizon}")

        def on_episode(episode: Episode) -> None:
            nonlocal solved
            if episode.seed in there:
                return
            there[episode.seed] = episode
            solved += episode.success
            progress.set_postfix(solved=solved, refresh=False)
            progress.update()

        with progress:
            left = [each for each in wanted if each.seed not in there]
            if jobs > 1 and len(left) > 1:
                actions = multiprocessing.get_context("forkserver").Value("q", 0)
                given = (folder, rollouts, actions, imported_paths())
                for _ in play_in_processes(min(jobs, len(left)), store, left, play_here, *given):
                    progress.set_postfix(solved=solved, actions=actions.value)
                    for each in left:
                        if each.seed not in there and (episode := store.read(each)) is not None:
                            on_episode(episode)
            # Nothing is left for this process, unless the others were killed.
            found = play(store, wanted, player(policy, simulator, rollouts, on_step), on_episode)
        return found, len(wanted) - before, simulator.fps


def play_here(
    store: EpisodeStore,
    wanted: Sequence[Wanted],
    folder: Path,
    rollouts: Rollouts,
    actions: Any,
    imports: Sequence[str],
) -> None:
    """Play episodes in one of several processes, which has nothing yet.

    actions: a number they share, of actions. imports: files of the user.
    """
    import_files(imports)

    def on_step(step: int, horizon: int) -> None:
        with actions.get_lock():
            actions.value += 1

    policy = load_policy(folder, rollouts)
    with make_matching_environment(policy.about, str(folder)) as simulator:
        play(store, wanted, player(policy, simulator, rollouts, on_step))


def player(
    policy: CrosswayPolicy,
    simulator: Environment,
    rollouts: Rollouts,
    on_step: Callable[[int, int], None] = lambda step, horizon: None,
) -> Callable[[Wanted], Episode]:
    """A function that plays an episode; `on_step` as of `rollout`."""
    return lambda each: rollout(policy, simulator, each.seed, rollouts.max_steps, each.picture_size, on_step)


def success_text(metrics: Mapping[str, Any], episodes: int) -> str:
    """How many of the episodes were solved, with the interval of the rate."""
    low, high = (100 * side for side in metrics["success_interval"])
    solved = round(metrics["success"] * episodes)
    return f"{solved} of {episodes} solved (95 %: {low:.0f} to {high:.0f} %)"


def draw_episodes(episodes: Sequence[Episode], path: Path, heading: str, columns: int = 6) -> Path:
    """A row of pictures for each episode, from its start to its end."""
    plt = pyplot()
    figure, axes = plt.subplots(
        len(episodes), columns, figsize=(1.7 * columns, 1.95 * len(episodes) + 0.4), layout="constrained", squeeze=False
    )
    for row, episode in zip(axes, episodes, strict=True):
        for axis, index in zip(row, np.linspace(0, len(episode.frames) - 1, columns).round().astype(int), strict=True):
            axis.imshow(episode.frames[index])
            axis.set_title(f"action {index}", fontsize=8, color=INK)
            axis.set_xticks([])
            axis.set_yticks([])
            axis.spines[:].set_visible(False)
        outcome = "solved" if episode.success else "not solved"
        row[0].set_ylabel(f"seed {episode.seed}\n{outcome}", fontsize=8, color=INK if episode.success else ACCENT)
    figure.suptitle(heading, fontsize=11)
    return save(figure, path)


def side_by_side(episodes: Sequence[Episode], index: int) -> np.ndarray:
    """The frames of this moment side by side. An episode that has ended keeps its last frame."""
    return np.concatenate([episode.frames[min(index, len(episode.frames) - 1)] for episode in episodes], 1)


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.evaluate()
    arguments = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()
    out = arguments.out or default_folder(arguments.run, arguments.untrained)

    def work() -> None:
        import_files(arguments.imports)
        chosen = {item.name: getattr(arguments, item.name) for item in fields(Rollouts)}
        results = evaluate(arguments.run, Rollouts(**chosen), out, show_progress=True, jobs=arguments.jobs)
        print(f"success: {success_text(results['metrics'], arguments.episodes)}")
        for key in ("max_reward", "final_coverage"):
            if key in results["metrics"]:
                print(f"{key}: {results['metrics'][key]:.3f}")
        own_name = name_apart(out, results)
        film = f", picture: {out}/episodes{own_name}.png, film: {out}/{results['film']}" if results["film"] else ""
        print(f"results: {out}/{RESULTS_TEST}{own_name}.json{film}")

    return run_command(parser.prog, work, "with the episodes that are left")


if __name__ == "__main__":
    sys.exit(main())
