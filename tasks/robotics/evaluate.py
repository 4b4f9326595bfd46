"""Evaluate a policy in its simulator: python -m tasks.robotics.evaluate RUN [--episodes N] [--seed S] [--untrained]"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers.utils import logging as transformers_logging

from hf_sparseprior.analysis.pictures import ACCENT, INK, pyplot, save
from tasks.common.command import run_command
from tasks.common.environment import command_line, environment
from tasks.common.results import write_results
from tasks.common.run_folder import MODEL
from tasks.robotics.config import TEST_SEED
from tasks.robotics.environments import picture_problem
from tasks.robotics.policy import POLICY_FILE, CrosswayPolicy, policy_sha256
from tasks.robotics.rollout import Episode, make_matching_environment, rollout, summary
from tasks.robotics.video import write_video

PICTURED = 4  # episodes in picture and video
FRAME_SIZE = 160  # pixels of each


def evaluate(
    run: Path,
    episodes: int,
    seed: int,
    out: Path,
    untrained: bool = False,
    max_steps: int | None = None,
    sampler: str | None = None,
    sampling_steps: int | None = None,
    show_progress: bool = False,
) -> dict[str, Any]:
    """Success on held-out seeds; writes results.json, episodes.png and a film of the first episodes into `out`.

    Where nothing can be drawn, which the observations of a policy without cameras do not need, picture and film are
    left out, with one line.

    Args:
        run: folder of a run, or of a saved policy.
        episodes: how many, of the seeds `seed`, `seed` + 1, ...
        seed: of the first.
        out: folder.
        untrained: the same policy with random weights, for comparison.
        max_steps: actions of an episode; None: the environment's horizon.
        sampler, sampling_steps: instead of the policy's own.
        show_progress: one line of it.

    Raises:
        ValueError, OSError: for bad values, files, and an environment with other settings than the demonstrations'.
    """
    for name, value in (("--episodes", episodes), ("--max-steps", max_steps), ("--sampling-steps", sampling_steps)):
        if value is not None and value < 1:
            raise ValueError(f"{name} {value} must be 1 or more")
    folder = run / MODEL if (run / MODEL / POLICY_FILE).is_file() else run
    policy = CrosswayPolicy.from_pretrained(folder)
    about = policy.about
    if untrained:
        torch.manual_seed(0)
        policy = CrosswayPolicy(policy.config, policy.normalizer).eval()
    if sampler is not None:
        policy.config.sampler = sampler
    if sampling_steps is not None:
        policy.config.sampling_steps = sampling_steps
    policy.config.__post_init__()
    if torch.cuda.is_available():
        policy.cuda()
    started = time.monotonic()
    found: list[Episode] = []
    with make_matching_environment(about, str(folder)) as simulator:
        if problem := picture_problem(simulator):
            print(f"no pictures: {problem}", file=sys.stderr)
        seeds = tqdm(range(seed, seed + episodes), desc="episodes", disable=not show_progress, dynamic_ncols=True)
        for number, episode_seed in enumerate(seeds):
            size = FRAME_SIZE if number < PICTURED and not problem else 0
            found.append(rollout(policy, simulator, episode_seed, max_steps, size))
            seeds.set_postfix(solved=sum(episode.success for episode in found), refresh=False)
        fps = simulator.fps
    seconds = time.monotonic() - started
    results = {
        "task": "robotics",
        "policy": str(folder),
        "untrained": untrained,
        "environment": about["environment"],
        "settings": about["settings"],
        "metrics": summary(found),
        "episodes": [{key: value for key, value in asdict(episode).items() if key != "frames"} for episode in found],
        "sampler": policy.config.sampler,
        "sampling_steps": policy.config.sampling_steps or policy.config.noise_levels,
        "seconds": round(seconds, 2),
        "model_sha256": None if untrained else policy_sha256(folder),
        "command": command_line(),
        **environment(),
    }
    out.mkdir(parents=True, exist_ok=True)
    pictured = [episode for episode in found if episode.frames]
    heading = f"{about['environment']['name']}: {_rate(results)}{', untrained' if untrained else ''}"
    results["film"] = None
    if pictured:
        draw_episodes(pictured, out / "episodes.png", heading)
        longest = max(len(episode.frames) for episode in pictured)
        film = write_video(out / "episodes.mp4", [side_by_side(pictured, index) for index in range(longest)], fps)
        results["film"] = film.name
    write_results(out / "results.json", results)
    return results


def _rate(results: dict[str, Any]) -> str:
    low, high = results["metrics"]["success_interval"]
    solved = sum(episode["success"] for episode in results["episodes"])
    return f"{solved} of {len(results['episodes'])} solved (95 %: {100 * low:.0f} to {100 * high:.0f} %)"


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
    """The frames of this moment beside each other; an episode that has ended keeps its last one."""
    return np.concatenate([episode.frames[min(index, len(episode.frames) - 1)] for episode in episodes], 1)


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.robotics.evaluate", description="Evaluate a policy in the simulator it was trained for."
    )
    parser.add_argument("run", type=Path, help="folder of a run, or of a saved policy")
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--seed", type=int, default=TEST_SEED, help=f"of the first episode; default {TEST_SEED}")
    parser.add_argument("--untrained", action="store_true", help="random weights instead of the trained ones")
    parser.add_argument("--max-steps", type=int, help="actions of an episode; default: the environment's horizon")
    parser.add_argument("--sampler", help="ddpm or ddim instead of the policy's own")
    parser.add_argument("--sampling-steps", type=int, help="evaluations of the network for a plan")
    parser.add_argument("--out", type=Path, help="folder for results and pictures; default: RUN/evaluation")
    arguments = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()
    name = "evaluation_untrained" if arguments.untrained else "evaluation"
    out = arguments.out or arguments.run / name

    def work() -> None:
        results = evaluate(
            arguments.run,
            arguments.episodes,
            arguments.seed,
            out,
            arguments.untrained,
            arguments.max_steps,
            arguments.sampler,
            arguments.sampling_steps,
            show_progress=True,
        )
        print(f"success: {_rate(results)}")
        for key in ("max_reward", "final_coverage"):
            if key in results["metrics"]:
                print(f"{key}: {results['metrics'][key]:.3f}")
        pictures = f", picture: {out}/episodes.png, film: {out}/{results['film']}" if results["film"] else ""
        print(f"results: {out}/results.json{pictures}")

    return run_command(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
