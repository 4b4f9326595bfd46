"""Compare video models over seeds: python -m tasks.video.compare --config FILE [section.key=value ...]

base: smoke.yaml                     configuration that every run shares, besides sections in the file itself
seeds: [0, 1, 2]
variants:                            name of a row: what it changes
  dense: {}
  single frame: {model: {num_frames: 1}}

Records, table and picture, and what happens after a kill, are those of tasks/classification/compare.py.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers.utils import logging as transformers_logging

from hf_sparseprior.training.allocator import keep_freed_memory
from tasks.classification.compare import (
    OWNED,
    Comparison,
    all_records,
    check_seeds,
    refuse_owned,
    run_comparison,
    write_comparison,
)
from tasks.common.command import run_command
from tasks.common.config import apply_overrides, check_known, check_name, config_name, read_layers
from tasks.video.config import SECTIONS, check_config
from tasks.video.train import run


def load_comparison(path: str | Path, overrides: Sequence[str] = ()) -> Comparison:
    """Read a comparison and check every configuration in it before anything runs.

    Raises:
        ValueError: for unknown keys and bad values, naming the variant.
        OSError: for a missing file.
    """
    path = Path(path)
    content = read_layers(path, SECTIONS, ("seeds", "variants"))
    seeds, variants = content.pop("seeds", None), content.pop("variants", None)
    check_seeds(seeds, str(path))
    refuse_owned([override.partition("=")[0] for override in overrides], OWNED, "the command line")
    if not isinstance(variants, dict) or not variants:
        raise ValueError(f"{path}: variants={variants!r} must hold a name and changes for each row")
    shared = check_config(content)
    configs = {}
    for name, changes in variants.items():
        check_name(str(name), f"{path}: variant")
        where, config = f"{path}, variant {name!r}", copy.deepcopy(shared)
        try:
            check_known(changes or {}, SECTIONS, "it")
            for section, values in (changes or {}).items():
                refuse_owned([f"{section}.{key}" for key in values], OWNED, "it")
                config[section].update(values)
            apply_overrides(config, overrides, SECTIONS)
            configs[str(name)] = check_config(config)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{where}: {error}") from None
    return Comparison(config_name(path), configs, seeds)


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.video.compare",
        description="Train a list of video models over seeds. Goes on where it was stopped, and does no run twice.",
    )
    parser.add_argument("--config", required=True, help="YAML file with base, seeds and variants")
    parser.add_argument("--out", type=Path, help="folder of the runs; default: outputs/NAME")
    parser.add_argument("--records", type=Path, help="folder of one record a run, table and picture; default: --out")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="only these rows")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="only these seeds, or others than the file's")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for every row")
    arguments = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()

    def work() -> None:
        keep_freed_memory()
        comparison = load_comparison(arguments.config, arguments.overrides)
        check_known(arguments.variants or (), list(comparison.configs), arguments.config)
        if arguments.seeds:
            check_seeds(arguments.seeds, "--seeds")
            comparison.seeds = arguments.seeds
        out = arguments.out or Path("outputs") / comparison.name
        records = arguments.records or out
        run_comparison(comparison, out, records, arguments.variants, train=run)
        write_comparison(all_records(comparison, records), records)

    return run_command(parser.prog, work, "where it stopped")


if __name__ == "__main__":
    sys.exit(main())
