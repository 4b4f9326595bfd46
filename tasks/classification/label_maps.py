"""Label maps of training images: python -m tasks.classification.label_maps TEACHER --config FILE --out DIR

TEACHER is the folder of a saved classifier with the classes of the data. It sees every training image as a whole, and a
map holds the most probable classes of each of its patches. The command can be killed at any moment and started again;
then it goes on where it was.
"""

from __future__ import annotations

import sys

from transformers.utils import logging as transformers_logging

from hf_sparseprior.classification.label_maps import make_label_maps, training_images
from hf_sparseprior.runs.command import run_command
from tasks.classification import commands


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.label_maps()
    arguments = parser.parse_intermixed_args(argv)
    for name, low in (("batch_size", 1), ("workers", 0), ("images_per_file", 1)):
        if getattr(arguments, name) < low:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be {low} or more")
    transformers_logging.disable_progress_bar()

    def work() -> None:
        data = training_images(arguments.config, arguments.overrides, arguments.workers)
        header = make_label_maps(
            arguments.teacher,
            data,
            arguments.out,
            arguments.top_k,
            arguments.batch_size,
            arguments.workers,
            images_per_file=arguments.images_per_file,
        )
        height, width = header.grid
        print(f"{arguments.out}: maps of {header.images} images, {height}x{width}, top {header.top_k} classes")

    return run_command(parser.prog, work, "where it stopped")


if __name__ == "__main__":
    sys.exit(main())
