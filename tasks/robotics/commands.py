"""Arguments of the commands in this folder, see tasks/common/parsers.py."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from tasks.common.parsers import add_import, command_parser, compare_parser, train_parser

KINDS = ("video", "image")  # of images in a LeRobotDataset
ENVIRONMENTS = ("lift", "can", "pusht")
TEST_SEED = 100_000  # seeds from here on are for evaluation; those of demonstrations are below both

train = partial(train_parser, "robotics", "a diffusion policy on demonstrations", "encoder.prior=violin")
compare = partial(compare_parser, "robotics")


def convert() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.robotics.convert`."""
    parser = command_parser("robotics.convert", "Write demonstrations in another layout.")
    parser.add_argument("source", type=Path, metavar="IN", help="HDF5, zarr or a LeRobotDataset")
    parser.add_argument("out", type=Path, metavar="OUT", help="new; its name ends in .lerobot, .hdf5 or .zarr")
    parser.add_argument("--images", choices=KINDS, default="video", help="of a LeRobotDataset, default %(default)s")
    return parser


def demonstrate() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.robotics.demonstrate`."""
    parser = command_parser("robotics.demonstrate")
    parser.add_argument("task", nargs="?", choices=ENVIRONMENTS)
    parser.add_argument("out", nargs="?", type=Path, help="file of demonstrations: .hdf5, for pusht a .zarr folder")
    parser.add_argument("--episodes", type=int, default=50, help="solved episodes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first episode; each attempt takes the next")
    parser.add_argument("--cameras", nargs="*", default=(), help="whose images are recorded (default: none)")
    parser.add_argument("--image-size", type=int, help="pixels (default: as in the published data sets)")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="execute the actions of a file again")
    return parser


def evaluate() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.robotics.evaluate`."""
    parser = command_parser("robotics.evaluate", "Evaluate a policy in the simulator it was trained for.")
    parser.add_argument("run", type=Path, help="folder of a run, or of a saved policy")
    add_import(parser)
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--seed", type=int, help=f"of the first episode; default: trainer.test_seed or {TEST_SEED}")
    parser.add_argument("--untrained", action="store_true", help="random weights instead of the trained ones")
    parser.add_argument("--max-steps", type=int, help="actions of an episode; default: the environment's horizon")
    parser.add_argument("--sampler", help="ddpm or ddim instead of the policy's own")
    parser.add_argument("--sampling-steps", type=int, help="evaluations of the network for a plan")
    parser.add_argument("--jobs", type=int, default=1, help="processes that play; default %(default)s")
    parser.add_argument("--out", type=Path, help="folder for results and pictures; default: RUN/evaluation")
    return parser


def lerobot_eval() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.robotics.lerobot_eval`."""
    return command_parser(
        "robotics.lerobot_eval",
        "lerobot-eval with our policies and simulators. All arguments are lerobot-eval's.",
        epilog="for example --policy.path=OUT --env.task=PushT-v0 --eval.n_episodes=10 --eval.batch_size=2",
    )


def lerobot_export() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.robotics.lerobot_export`."""
    parser = command_parser("robotics.lerobot_export", "Write a policy as lerobot reads it.")
    parser.add_argument("run", type=Path, help="folder of a run, or of a saved policy")
    parser.add_argument("out", type=Path, help="the new folder")
    return parser
