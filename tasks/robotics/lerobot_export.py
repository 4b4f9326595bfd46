"""A policy as lerobot reads it: python -m tasks.robotics.lerobot_export RUN OUT

OUT gets the policy's files as they are, and next to them config.json and lerobot's two pipelines, which do nothing: the
policy scales observations and actions itself. `python -m tasks.robotics.lerobot_eval` evaluates it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from hf_sparseprior.base.files import whole_folder, write_text
from hf_sparseprior.runs.command import run_command
from tasks.robotics import commands
from tasks.robotics.observation_groups import ENVIRONMENT, GROUPS, STATE, image_feature

POLICY_TYPE = "sparseprior_crossway"
DEVICE = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
PIPELINES: dict[str, list[dict[str, Any]]] = {
    "policy_preprocessor": [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        DEVICE,
    ],
    "policy_postprocessor": [DEVICE],
}


def export(run: Path, out: Path) -> Path:
    """Write the folder, and return it.

    Args:
        run: folder of a run, or of a saved policy.
        out: the new folder.

    Raises:
        ValueError: for a policy of another simulator, or one that sees what lerobot is not shown.
        OSError: if the folder exists, or no policy is in the other.
    """
    from tasks.robotics.evaluate import policy_folder
    from tasks.robotics.policy import read_policy_file

    folder = policy_folder(run)
    content = read_policy_file(folder)
    policy, environment = content["policy"], content["about"].get("environment")
    name = environment.get("name") if isinstance(environment, dict) else None
    if name not in GROUPS:
        raise ValueError(f"{folder} is a policy of environment {name!r}; lerobot is shown {', '.join(GROUPS)}")
    known = {key: feature for feature, sizes in GROUPS[name].items() for key in sizes}
    features: dict[str, dict[str, Any]] = {}
    for key, shape in policy["observations"].items():
        if len(shape) == 3:
            features[image_feature(key)] = {"type": "VISUAL", "shape": [3, shape[0], shape[1]]}
        elif key not in known:
            raise ValueError(f"{folder} sees {key!r}, which lerobot is not shown; it is shown {', '.join(known)}")
        else:
            kind = {STATE: "STATE", ENVIRONMENT: "ENV"}[known[key]]
            features[known[key]] = {"type": kind, "shape": [sum(GROUPS[name][known[key]].values())]}
    config = {
        "type": POLICY_TYPE,
        "n_obs_steps": policy["observation_steps"],
        "input_features": features,
        "output_features": {"action": {"type": "ACTION", "shape": [policy["action_size"]]}},
        "push_to_hub": False,
        "horizon": policy["horizon"],
        "n_action_steps": policy["action_steps"],
    }
    with whole_folder(out) as scratch:
        shutil.copytree(folder, scratch, dirs_exist_ok=True)
        write_text(scratch / "config.json", json.dumps(config, indent=1) + "\n")
        for pipeline, steps in PIPELINES.items():
            text = json.dumps({"name": pipeline, "steps": steps}, indent=1) + "\n"
            write_text(scratch / f"{pipeline}.json", text)
    return out


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.lerobot_export()
    arguments = parser.parse_args(argv)
    return run_command(parser.prog, lambda: print(f"policy for lerobot: {export(arguments.run, arguments.out)}"))


if __name__ == "__main__":
    sys.exit(main())
