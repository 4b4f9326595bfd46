"""Arguments of the commands in this folder, see tasks/common/parsers.py."""

from __future__ import annotations

import argparse
from pathlib import Path

from tasks.common.parsers import add_machines, command_parser

TASKS = (  # as in hf_sparseprior/images/vtab_tasks.py
    "cifar",
    "caltech101",
    "dtd",
    "oxford_flowers102",
    "oxford_iiit_pet",
    "svhn",
    "sun397",
    "patch_camelyon",
    "eurosat",
    "resisc45",
    "diabetic_retinopathy",
    "clevr_count",
    "clevr_dist",
    "dmlab",
    "kitti",
    "dsprites_loc",
    "dsprites_ori",
    "smallnorb_azi",
    "smallnorb_ele",
)


def report() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.classification.vtab.report`."""
    parser = command_parser("classification.vtab.report", "Tables and picture of a VTAB-1K sweep.")
    parser.add_argument("--config", required=True, help="YAML file of the sweep")
    parser.add_argument("--records", type=Path, required=True, help="its folder of records")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="as the sweep got them")
    return parser


def sweep() -> argparse.ArgumentParser:
    """Arguments of `python -m tasks.classification.vtab.sweep`."""
    parser = command_parser(
        "classification.vtab.sweep", "Fine-tune on VTAB-1K. Goes on where it was stopped, and does no run twice."
    )
    parser.add_argument(
        "--config", required=True, help="YAML file of a sweep, such as configs/classification/vtab.yaml#deit_base-full"
    )
    parser.add_argument("--out", type=Path, help="folder of the runs while they last; default: outputs/TASK/NAME")
    parser.add_argument("--records", type=Path, help="folder of one record a run, tables and picture; default: --out")
    parser.add_argument("--tasks", nargs="+", metavar="NAME", help=f"only these of {', '.join(TASKS)}")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="only these rows")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="only these of the final stage")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes, GPUs in turn; default: 1")
    add_machines(parser)
    parser.add_argument("--keep", action="store_true", help="keep the folders of finished runs, with their models")
    parser.add_argument("--dry-run", action="store_true", help="say how many runs are done and still to do")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for every run")
    return parser
