"""Command line: python -m hf_sparseprior explain | export | convert | doctor.

A bad value ends with one line; with SPARSEPRIOR_TRACEBACK=1 its traceback shows before that.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hf_sparseprior.command import USER_ERRORS, report_error

FOR_FORMATS = ("size", "backend", "weights", "images")  # options of `export` that mean nothing without --format


def main(argv: list[str] | None = None) -> int:
    """Run a command; a bad value prints one line and returns 2."""
    parser = argparse.ArgumentParser(prog="python -m hf_sparseprior", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    # Every command imports what it needs when it is parsed: --help stays quick and torch is loaded once.
    from transformers.utils import logging as transformers_logging

    from hf_sparseprior.analysis import explain
    from hf_sparseprior.convert import convert_checkpoint, target_formats
    from hf_sparseprior.doctor import REQUIRABLE, missing_of, report

    explain_parser = commands.add_parser(
        "explain", help="what a prior does on a grid, numbers and pictures", epilog=explain.SEQUENCE_HELP
    )
    explain.add_arguments(explain_parser)
    add_export(
        commands.add_parser(
            "export", help="make a saved model ready to upload, or a file of it that runs without this package"
        )
    )
    convert_parser = commands.add_parser(
        "convert", help="checkpoints of transformers, timm, DeiT, DINOv2, SigLIP, Swin ... as ours, and ours as theirs"
    )
    convert_parser.add_argument("source", type=Path, help="folder, .safetensors, .pth or .bin file")
    convert_parser.add_argument(
        "out", type=Path, help="new folder; or .safetensors file (--to timm), .pth file (--to original)"
    )
    convert_parser.add_argument(
        "--to",
        choices=list(target_formats()),
        help="format: ours (default), a model of transformers, timm, or the original .pth file of DeiT, DINO, Swin ...",
    )
    convert_parser.add_argument(
        "--prior",
        help="prior of the new model (default the source's, dense if it has none); --prior dense drops "
        "the prior that --to a foreign format cannot carry",
    )
    convert_parser.add_argument("--image-size", type=int, help="interpolate the positions to this image size")
    convert_parser.add_argument("--heads", type=int, help="attention heads of a timm ViT of an unpublished width")
    convert_parser.add_argument("--drop-classifier", action="store_true", help="write the base model alone")
    doctor_parser = commands.add_parser("doctor", help="what runs on this machine, what does not, and how to get it")
    doctor_parser.add_argument(
        "--require", choices=REQUIRABLE, help="only what this extra's tasks lack; exit status 1 if anything"
    )
    arguments = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()
    try:
        if arguments.command == "explain":
            explain.run(arguments)
        elif arguments.command == "doctor" and arguments.require:
            missing = missing_of(arguments.require)
            print("\n".join(missing) or f"ok       everything for {arguments.require}")
            return int(bool(missing))
        elif arguments.command == "doctor":
            for line in report():
                print(line, flush=True)
        elif arguments.command == "convert":
            lines = convert_checkpoint(
                arguments.source,
                arguments.out,
                arguments.prior,
                arguments.image_size,
                arguments.heads,
                arguments.drop_classifier,
                arguments.to,
            )
            print("\n".join(lines))
        else:
            print("\n".join(export(arguments)))
    except USER_ERRORS as error:
        return report_error(f"{parser.prog} {arguments.command}", error)
    return 0


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `export`."""
    from hf_sparseprior.deployment import BACKENDS
    from hf_sparseprior.runtimes import FORMATS, WEIGHTS

    weights = ", ".join(f"{name} (--format {own})" for name, own in WEIGHTS.items())
    parser.add_argument("source", type=Path, help="folder of a saved model or a training run")
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument("--license", help="for the model card (default apache-2.0)")
    parser.add_argument(
        "--format", choices=list(FORMATS), help="write one file for torch.export, ONNX Runtime or OpenVINO instead"
    )
    parser.add_argument("--size", help="with --format: HEIGHTxWIDTH of the images, or one number")
    parser.add_argument(
        "--backend", choices=BACKENDS, help=f"with --format: the form of attention (default {BACKENDS[0]})"
    )
    parser.add_argument("--weights", choices=list(WEIGHTS), help=f"{weights}; default float32")
    parser.add_argument(
        "--images", type=Path, help="with --format: folder with a folder of images for each class, for the accuracy"
    )


def export(arguments: argparse.Namespace) -> list[str]:
    """What `export` does; lines for the user.

    Raises:
        ValueError: also for options that mean nothing together.
    """
    from hf_sparseprior.deployment import BACKENDS, deploy
    from hf_sparseprior.export import export_folder

    if not arguments.format:
        if given := [name for name in FOR_FORMATS if getattr(arguments, name) is not None]:
            raise ValueError(f"--{given[0]} needs --format; a folder to upload holds the model as it is")
        return export_folder(arguments.source, arguments.out, arguments.license or "apache-2.0")
    if arguments.license:
        raise ValueError("--license is for the model card, which a folder with --format does not have")
    backend = arguments.backend or BACKENDS[0]
    options = (arguments.size, backend, arguments.weights, arguments.images)
    return deploy(arguments.source, arguments.out, arguments.format, *options)


if __name__ == "__main__":
    sys.exit(main())
