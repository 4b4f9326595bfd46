"""Command line: sparseprior (or python -m hf_sparseprior) with list, explain, predict, export, convert and others.

A bad value ends with one line; with SPARSEPRIOR_TRACEBACK=1 its traceback shows before that.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial

from hf_sparseprior.cli.arguments import PROGRAM, make_parser
from hf_sparseprior.cli.command import USER_ERRORS, report_error

# Options of `export` that mean nothing without --format.
FOR_FORMATS = ("size", "backend", "weights", "images", "kernels")


def main(argv: list[str] | None = None) -> int:
    """Run a command; a bad value prints one line and returns 2."""
    from transformers.utils import logging as transformers_logging

    from hf_sparseprior.base.own_files import import_files
    from hf_sparseprior.convert import target_formats  # with the families that a program has registered

    arguments = make_parser(list(target_formats())).parse_args(argv)
    transformers_logging.disable_progress_bar()
    try:
        import_files(getattr(arguments, "imports", []))
        status = COMMANDS[arguments.command](arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever reads, `| head`, has read enough; Python's own flush at exit must not fail either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except USER_ERRORS as error:
        return report_error(f"{PROGRAM} {arguments.command}", error)


def _list(arguments: argparse.Namespace) -> int:
    from hf_sparseprior.cli.names import listed

    print("\n".join(listed(arguments.kinds)))
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    from hf_sparseprior.analysis import explain

    explain.run(arguments)
    return 0


def _train(arguments: argparse.Namespace) -> int:
    from hf_sparseprior.classification.command import train
    from hf_sparseprior.runs.command import run_command

    return run_command(f"{PROGRAM} train", partial(train, arguments), "from the last checkpoint")


def _sparsify(arguments: argparse.Namespace) -> int:
    from hf_sparseprior.runs.command import run_command, sigterm_as_interrupt
    from hf_sparseprior.sparsification.command import run

    def work() -> None:
        print("\n".join(run(arguments)))

    with sigterm_as_interrupt():
        return run_command(f"{PROGRAM} sparsify", work, f"from {arguments.out}/plan.json")


def _predict(arguments: argparse.Namespace) -> int:
    from hf_sparseprior.prediction.predict import predict

    options = {name: value for name, value in vars(arguments).items() if name not in ("command", "imports")}
    for line in predict(options.pop("model"), options.pop("images"), options.pop("out"), **options):
        print(line)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    return _whole(f"{PROGRAM} export", partial(export, arguments))


def _whole(program: str, work: Callable[[], list[str]]) -> int:
    """A command that writes a folder whole or not at all, also on Ctrl-C and SIGTERM, and then prints lines."""
    from hf_sparseprior.runs.command import run_command, sigterm_as_interrupt

    lines: list[str] = []
    with sigterm_as_interrupt():
        status = run_command(program, lambda: lines.extend(work()))
    if status == 0:
        print("\n".join(lines))
    return status


def export(arguments: argparse.Namespace) -> list[str]:
    """What `export` does; lines for the user.

    Raises:
        ValueError: also for options that mean nothing together.
    """
    if not arguments.format:
        from hf_sparseprior.cli.export import export_folder

        if given := [name for name in FOR_FORMATS if getattr(arguments, name) is not None]:
            raise ValueError(f"--{given[0]} needs --format; a folder to upload holds the model as it is")
        return export_folder(arguments.source, arguments.out, arguments.license)
    from hf_sparseprior.cli.deployment import BACKENDS, deploy

    if arguments.license:
        raise ValueError("--license is for the model card, which a folder with --format does not have")
    backend = arguments.backend or BACKENDS[0]
    options = (arguments.size, backend, arguments.weights, arguments.images, bool(arguments.kernels))
    return deploy(arguments.source, arguments.out, arguments.format, *options)


def _run_package(arguments: argparse.Namespace) -> int:
    from hf_sparseprior.cli.packages import run_package

    for line in run_package(arguments.folder, arguments.images):
        print(line, flush=True)
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from hf_sparseprior.convert import convert_checkpoint

    options = (arguments.prior, arguments.image_size, arguments.heads, arguments.drop_classifier, arguments.to)
    return _whole(f"{PROGRAM} convert", partial(convert_checkpoint, arguments.source, arguments.out, *options))


def _doctor(arguments: argparse.Namespace) -> int:
    from hf_sparseprior.cli.doctor import missing_of, report

    if arguments.require:
        missing = missing_of(arguments.require)
        print("\n".join(missing) or f"ok       everything for {arguments.require}")
        return int(bool(missing))
    for line in report():
        print(line, flush=True)
    return 0


def _app(arguments: argparse.Namespace) -> int:
    from hf_sparseprior.analysis import app
    from hf_sparseprior.runs.command import sigterm_as_interrupt

    with sigterm_as_interrupt():  # uploaded images go with it
        app.run(arguments)
    return 0


COMMANDS = {
    "list": _list,
    "explain": _explain,
    "train": _train,
    "sparsify": _sparsify,
    "predict": _predict,
    "export": _export,
    "run-package": _run_package,
    "convert": _convert,
    "app": _app,
    "doctor": _doctor,
}

if __name__ == "__main__":
    sys.exit(main())
