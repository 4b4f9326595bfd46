"""Train a diffusion policy on demonstrations: python -m tasks.robotics.train --config FILE [section.key=value ...]

A run that was interrupted goes on from its last checkpoint; a finished run is not done again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from hf_sparseprior.base.json_files import read_json
from hf_sparseprior.base.own_files import import_files
from hf_sparseprior.models.pretrained import check_saved_folder, load_changed_model, saved_family
from hf_sparseprior.runs.command import run_command, tell_data
from hf_sparseprior.runs.metrics import pack_correct
from hf_sparseprior.runs.models import FAMILY_KEYS, alike_across_priors, decay_change
from hf_sparseprior.runs.results import Results, finite_or_null, print_warnings
from hf_sparseprior.runs.run_folder import (
    MODEL,
    RESULTS,
    RUN_CONFIG,
    finished_results,
    folder_differences,
    last_whole_checkpoint,
    owned,
)
from hf_sparseprior.training.allocator import keep_freed_memory
from hf_sparseprior.training.trainer import has_unlearned_predictor
from tasks.robotics import commands
from tasks.robotics.config import TrainerConfig, check_config, load_config
from tasks.robotics.data import Windows, check_shapes, fit_normalizer, read_episodes
from tasks.robotics.evaluate import Rollouts, judge
from tasks.robotics.formats import Demonstrations, demonstrations_sha256, open_demonstrations
from tasks.robotics.plots import draw_history
from tasks.robotics.policy import CrosswayPolicy, policy_sha256
from tasks.robotics.rollout import make_matching_environment
from tasks.robotics.training import CHECKPOINT_FILES, Training

CURVES = "curves.png"
DEMONSTRATIONS = "demonstrations"  # additional section of run_config.json: what the file of demonstrations held


def run(
    config: dict[str, dict[str, Any]],
    command: str | None = None,
    overwrite: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
) -> dict[str, Any]:
    """Train, choose the policy on validation seeds and test it if asked to, write results, policy and pictures.

    Args:
        config: as `load_config` returns it; `trainer.output_dir` is where everything goes.
        command: for results.json.
        overwrite: throw away what an earlier run with another configuration left in the folder.
        callbacks: their `on_step_end` hears of every step.

    Returns:
        The content of results.json.

    Raises:
        ValueError, OSError: for bad values and files, before anything is written.
        RunStopped: on SIGTERM, after a checkpoint was saved.
    """
    out = Path(check_config(config)[2].output_dir)
    identity = run_identity(config, out, overwrite)
    if finished := finished_results(out, identity, overwrite, needed=("metrics", "steps", "seconds")):
        return finished
    demonstrations = open_demonstrations(config["data"]["path"])
    training, episodes = make_training(config, demonstrations)
    with owned(out, identity, partial(last_whole_checkpoint, out, CHECKPOINT_FILES), overwrite) as checkpoint:
        if checkpoint:
            training.load(Path(checkpoint))
        if training.accelerator.is_main_process:
            tell_episodes(training, episodes)
        training.callbacks = callbacks
        try:
            training.run()
        finally:
            if training.simulator is not None:
                training.simulator.close()
        results = results_of(training, config, command)
        results.resumed_from = checkpoint and Path(checkpoint).name
        results.details |= {
            "environment": demonstrations.environment,
            "episodes": episodes,
            "data": described(demonstrations.environment["name"], episodes, training.config.test_episodes),
            "data_wait": None,  # windows are in memory
            "demonstrations_sha256": identity.get(DEMONSTRATIONS, {}).get("sha256"),
        }
        if training.accelerator.is_main_process:
            results.details["model_sha256"] = policy_sha256(out / MODEL)
            draw_history(training.history, out / CURVES, f"{demonstrations.environment['name']}, {out.name}")
            if training.config.test_episodes:
                test(out, training.config, results)
            # This comes last: a run counts as finished only when everything else exists.
            results.write(out / RESULTS)
        training.accelerator.wait_for_everyone()
    return finite_or_null(results.content())


def make_training(config: dict[str, dict[str, Any]], demonstrations: Demonstrations) -> tuple[Training, dict[str, int]]:
    """Policy, data and simulator of a configuration, ready for the first step, and the number of episodes by split.

    Raises:
        ValueError, OSError: for values, demonstrations, encoders and simulators that do not fit each other.
    """
    data, policy_config, trainer = check_config(config)
    check_shapes(demonstrations, policy_config)
    episodes = demonstrations.split("train")
    if data.episodes is not None and data.episodes > len(episodes):
        raise ValueError(
            f"data.episodes={data.episodes} must be at most the {len(episodes)} for training in {data.path}"
        )
    train = read_episodes(demonstrations, episodes[: data.episodes], policy_config)
    held_out = read_episodes(demonstrations, demonstrations.split("validation"), policy_config)
    normalizer = fit_normalizer(train, policy_config, data.floor, data.floors)
    torch.manual_seed(trainer.seed)
    policy = alike_across_priors(
        lambda changes: CrosswayPolicy(
            replace(policy_config, encoder={**policy_config.encoder, **changes}), normalizer
        ),
        lambda policy: all(policy.encoder(key).config.prior_name == "dense" for key in policy_config.cameras),
    )
    if folder := config["encoder"].get("pretrained"):
        start_encoders(policy, folder, config["encoder"])
    elif has_unlearned_predictor(policy):
        raise ValueError(
            f"encoder.prior={policy_config.encoder.get('prior')!r} has a predictor that learns from dense attention, "
            "which nothing does here; start from encoder.pretrained, where it has learned"
        )
    validation = Windows(held_out, policy_config) if held_out else None
    training = Training(policy, trainer, Windows(train, policy_config), validation, Path(trainer.output_dir))
    training.about = {
        "environment": demonstrations.environment,
        "settings": demonstrations.settings,
        "demonstrations": Path(data.path).name,
        "seed": trainer.seed,
    }
    if trainer.test_seed is not None:
        training.about["test_seed"] = trainer.test_seed
    if trainer.validation_episodes:
        training.simulator = make_matching_environment(training.about, str(data.path))
    elif trainer.test_episodes:
        make_matching_environment(training.about, str(data.path)).close()  # one that does not match ends it here
    return training, {"train": len(train), "validation": len(held_out)}


def test(out: Path, trainer: TrainerConfig, results: Results) -> None:
    """Play the episodes of evaluation and add to the results what came of them.

    Those that were played before an interruption are not played again.
    """
    rollouts = Rollouts(episodes=trainer.test_episodes, max_steps=trainer.test_steps)
    found = judge(out, rollouts, show_progress=not trainer.disable_tqdm)
    metrics = {key: value for key, value in found["metrics"].items() if key != "success_interval"}
    results.metrics |= {f"test_{key}": value for key, value in metrics.items()}
    solved = np.array([each["success"] for each in found["episodes"]])
    results.details["test_correct"] = pack_correct(np.ones(len(solved), bool), solved)
    results.details["test_rewards"] = [each["max_reward"] for each in found["episodes"]]


def tell_episodes(training: Training, episodes: dict[str, int]) -> None:
    """Print what is trained on and what validates the policy. `evaluate` tests it on seeds of its own."""
    simulated = training.config.validation_episodes
    played = f", and {simulated} episodes in the simulator" if simulated else ""
    splits: dict[str, tuple[int | None, str]] = {"trains": (episodes["train"], f"train, {len(training.train)} windows")}
    if episodes["validation"] or simulated:
        splits["validates"] = (episodes["validation"], f"validation{played}")
    tell_data("demonstrations", splits)


def results_of(training: Training, config: dict[str, dict[str, Any]], command: str | None) -> Results:
    """Results of a finished training, without what only its files hold."""
    policy = training.policy
    parameters = {name: sum(each.numel() for each in part.parameters()) for name, part in policy.named_children()}
    return Results(
        task="robotics",
        metrics=training.metrics(),
        config=config,
        seed=training.config.seed,
        parameters=sum(parameters.values()),
        trainable_parameters=sum(each.numel() for each in policy.parameters() if each.requires_grad),
        steps=training.steps,
        seconds=round(training.seconds, 2),
        seconds_per_step=training.step_seconds / training.steps,
        processes=training.accelerator.num_processes,
        command=command,
        history=training.history,
        details={
            "windows": len(training.train),
            **about_encoders(policy),
            "parameters_by_part": parameters,
            "warnings": list(training.learning.messages),
        },
    )


def described(task: str, episodes: dict[str, int], tested: int) -> str:
    """The data of a run in words."""
    return f"{task}: {episodes['train']} training demonstrations, {episodes['validation']} for validation" + (
        f", {tested} held-out episodes" if tested else ""
    )


def about_encoders(policy: CrosswayPolicy) -> dict[str, Any]:
    """Prior, share of pairs left out (mean over cameras) and decay (largest change) of the encoders; None without."""
    encoders = [policy.encoder(key) for key in policy.config.cameras]
    if not encoders:
        return {"prior": None}
    config = encoders[0].config
    changes = [change for each in encoders if (change := decay_change(each)["max_decay_change"]) is not None]
    return {
        "prior": config.prior_name,
        "prior_settings": config.prior,
        "pruning_ratio": float(np.mean([each.config.pruning_ratio for each in encoders])),
        "max_decay_change": max(changes, default=None),
    }


def run_identity(config: dict[str, dict[str, Any]], out: Path, overwrite: bool) -> dict[str, dict[str, Any]]:
    """What makes the run this one: its configuration, and what its demonstrations hold, by SHA-256.

    The range of the demonstrations is the policy's normaliser. Weights that were trained on other demonstrations must
    not be used with it. For a run that did not note them, and for a finished one whose demonstrations are gone, the
    configuration alone decides.

    Raises:
        ValueError: if the folder holds this run with other demonstrations, unless `overwrite`.
    """
    path, known = Path(config["data"]["path"]), None
    if (out / RUN_CONFIG).exists() and not folder_differences(out, config):
        stored = read_json(out / RUN_CONFIG, finite=False)
        known = stored[DEMONSTRATIONS]["sha256"] if DEMONSTRATIONS in stored else None
        if known is None or not path.exists():
            return config
    sha256 = demonstrations_sha256(path) if path.exists() else None
    if known not in (None, sha256) and sha256 is not None and known == demonstrations_sha256(path, dated=True):
        sha256 = known
    if known not in (None, sha256) and not overwrite:
        raise ValueError(
            f"data.path={path} holds other demonstrations than those that {out} was trained on; "
            "choose another trainer.output_dir or give --overwrite"
        )
    return {**config, DEMONSTRATIONS: {"sha256": sha256}}


def start_encoders(policy: CrosswayPolicy, folder: str, encoder: dict[str, Any]) -> None:
    """Let every camera's encoder start from a saved model of its family; positions are interpolated to its grid.

    Raises:
        ValueError, OSError: if the folder does not fit.
    """
    check_saved_folder(folder, "encoder.pretrained")
    family, saved = policy.config.encoder_family, saved_family(folder)
    if saved is not family:
        raise ValueError(f"encoder.pretrained={folder} is a {saved.name!r}; set encoder.family to it")
    options = {key: value for key, value in encoder.items() if key not in FAMILY_KEYS}
    for key in policy.config.cameras:
        size = policy.encoder(key).config.image_size
        changes = {**options, "image_size": size}
        classifier, _ = load_changed_model(folder, family.classifier, **changes)
        policy.encoder(key).load_state_dict(classifier.base_model.state_dict())


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.train()
    arguments = parser.parse_intermixed_args(argv)
    transformers_logging.disable_progress_bar()  # bars for reading and writing weights; the training bar stays

    def work() -> None:
        keep_freed_memory()
        import_files(arguments.imports)
        config = load_config(arguments.config, arguments.overrides)
        results = run(config, overwrite=arguments.overwrite)
        if not PartialState().is_main_process:
            return
        out = config["trainer"]["output_dir"]
        for name, value in results["metrics"].items():
            print(f"{name}: " + ("not a number" if value is None else f"{value:.4g}"))
        print_warnings(results)
        print(f"{results['steps']} steps in {results['seconds']:.0f} s")
        print(f"results: {out}/{RESULTS}, picture: {out}/{CURVES}, policy: {out}/{MODEL}")

    return run_command(parser.prog, work, "from the last checkpoint")


if __name__ == "__main__":
    sys.exit(main())
