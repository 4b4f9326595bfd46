"""Arguments of `python -m hf_sparseprior`. Importing this imports nothing but Python's own modules.

`hf_sparseprior/__init__.py` asks the parser before anything else, so that `--help` and wrong arguments are answered at
once, without torch.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hf_sparseprior.base.json_files import parse_json
from hf_sparseprior.base.other_names import OTHER_KEYS
from hf_sparseprior.base.version import __version__

SCRIPT = "sparseprior"  # the console script
PROGRAM = SCRIPT if Path(sys.argv[0]).stem == SCRIPT else "python -m hf_sparseprior"
# Each is compared with what it names by a test; the modules that have these import torch.
TARGETS = (
    *("sparseprior_vit", "sparseprior_timesformer", "sparseprior_swin", "sparseprior_convit", "sparseprior_iformer"),
    *("timm", "original", "vit", "deit", "dinov2", "dinov2_with_registers", "dinov3_vit"),
    *("siglip", "swin", "timesformer"),
)
FORMATS = ("torch", "onnx", "openvino", "aoti")
BACKENDS = ("sdpa", "gather", "diagonal", "reference")  # of exported files
WEIGHTS = {"bfloat16": ("torch", "aoti"), "int8": ("torch", "onnx", "openvino")}
EXTRAS = ("video", "heads", "dense", "robotics", "export")
DTYPES = ("float32", "bfloat16")
TUNING, LABELS = ("full", "linear", "lora", "dora", "violin"), ("classes", "several", "numbers")
RAW = argparse.RawDescriptionHelpFormatter
TUNING_AFTERWARDS = ("full", "lora")  # of sparsify
# A test gives each example to the check of configurations.
SECTIONS_OF_TRAIN = """\
sections of the settings, each with examples for --set:
  data           where images and labels are
      data.label_column=species          column of the label, of a table
      data.test_fraction=0.1             share of the images that is kept for the test
      data.corrupt=skip                  leave out images that cannot be read
  augmentation   how images are changed before the model sees them
      augmentation.crop=none             the whole image in place of a random part
      augmentation.flip=0                no mirror images
      augmentation.balance=loss          rare classes count more
      augmentation.mixup=0.8             pairs of images are mixed
  model          fields of the model's config
      model.image_size=384
      model.drop_path_rate=0.2
      'model.prior={support: fibottention, decay: {name: violin, init: growing}}'
  tuning         with --tuning lora or dora: size and place of the updates
      tuning.rank=16
      tuning.targets=attention+mlp
  trainer        the training itself, keys of transformers' TrainingArguments and ours
      trainer.learning_rate=1e-4
      trainer.per_device_train_batch_size=64
      trainer.seed=1
      trainer.early_stopping=3           end after 3 evaluations without a better one
      trainer.report_to=tensorboard
      trainer.bf16=true
  distillation, token_labels, compression
      a teacher, labels of patches, smaller models: tasks/classification/training.md of the project

example: %(prog)s photos --model vit_small --out run --set trainer.learning_rate=1e-4 model.image_size=384
"""
FEATURES, UNREADABLE = ("pooled", "patches"), ("skip", "fatal")
KINDS = ("families", "supports", "sequences", "decays", "curves", "predictors", "mixers", "extras", "backends")


class OneLine(argparse.HelpFormatter):
    """Leaves room for the longest command, so that each has its help in its line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = 15


class Parser(argparse.ArgumentParser):
    """A parser that names the choice, command or option which a wrong one may have been meant for."""

    def parse_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """As argparse; what is not recognized is answered by the parser of the command."""
        parsed, others = self.parse_known_args(args, namespace)
        if others:
            commands = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
            parser = commands[0].choices[parsed.command] if commands else self
            parser.error(f"unrecognized arguments: {' '.join(others)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """As argparse, with a hint."""
        super().error(message + self._hint(message))

    def _hint(self, message: str) -> str:
        if choice := re.search(r"invalid choice: '?([^' ]+)'? \(choose from (.*)\)", message):
            return meant(choice[1], [name.strip(" '") for name in choice[2].split(",")])
        if option := re.search(r"unrecognized arguments: --([\w-]+)", message):
            known = [name for name in self._option_string_actions if name.startswith("--")]
            keys = OTHER_KEYS.get(option[1].replace("-", "_"), ()) if "--set" in known else ()
            return f"; did you mean --set trainer.{keys[0]}=...?" if keys else meant(f"--{option[1]}", known)
        return ""


def meant(name: str, known: Sequence[str]) -> str:
    """The known name that is nearest to a wrong one, as a question; "" if none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def make_parser(targets: Sequence[str] = TARGETS) -> argparse.ArgumentParser:
    """The parser of all commands; `targets` are the formats of `convert`."""
    parser = Parser(
        prog=PROGRAM,
        formatter_class=OneLine,
        description="Vision transformers with sparse attention and spatial priors.",
        epilog="A bad value ends with one line; with SPARSEPRIOR_TRACEBACK=1 its traceback shows before that.",
    )
    parser.add_argument("--version", action="version", version=f"{SCRIPT} {__version__}")
    # A line each, with these names in it: a test counts them.
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    add_list(commands.add_parser("list", help="print the names of families, supports, decays, curves"))
    add_explain(commands.add_parser("explain", help="show what a prior does on a grid"))
    text = "train a classifier on a folder of images or a table"
    add_train(commands.add_parser("train", help=text, epilog=SECTIONS_OF_TRAIN, formatter_class=RAW))
    text = "make a dense model faster: sparse layers within a time budget"
    add_sparsify(commands.add_parser("sparsify", help=text))
    text = "write labels, features, masks or boxes of images"
    add_predict(commands.add_parser("predict", help=text))
    text = "make a folder to upload, or an ONNX or other file"
    add_export(commands.add_parser("export", help=text))
    text = "run a package of `export --format aoti`"
    note = "A package is code: run those alone that you trust."
    add_run_package(commands.add_parser("run-package", help=text, description=note))
    text = "turn checkpoints of other libraries into ours, or back"
    note = "Checkpoints of transformers, timm, DeiT, DINOv2, SigLIP, Swin ... as ours, and ours as theirs."
    add_convert(commands.add_parser("convert", help=text, description=note), targets)
    text = "show priors, attention and times in a browser"
    add_app(commands.add_parser("app", help=text, description="It needs the extra `app`."))
    doctor = commands.add_parser("doctor", help="check what runs on this machine")
    text = "only what this extra's tasks lack; exit status 1 if anything"
    doctor.add_argument("--require", choices=EXTRAS, help=text)
    return parser


def add_list(parser: argparse.ArgumentParser) -> None:
    """Arguments of `list`."""
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)}; default: all")


def add_import(parser: argparse.ArgumentParser) -> None:
    """--import, of the commands that know a user's own supports and decays."""
    text = "Python file that registers a support, a decay ...; imported first, and saved with models"
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="FILE", help=text)


def written_prior(text: str) -> Any:
    """A prior by name, or what the JSON of one holds."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return parse_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} must be a name, or a prior as JSON: {error}") from None


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Arguments of `explain`."""
    add_import(parser)
    text = (
        f"a name that `{PROGRAM} list` prints: supports, decays, predictors, mixers, extras; names joined by +; a "
        "prior as JSON, as in config.json; or the folder of a saved model or a run"
    )
    parser.add_argument("prior", type=written_prior, help=text)
    parser.add_argument("--heads", type=int, help="attention heads (default 12, or the model's)")
    text = "patch grid, HEIGHTxWIDTH, or FRAMESxHEIGHTxWIDTH of a clip (default 14x14, or the saved model's)"
    parser.add_argument("--grid", type=parse_grid, help=text)
    parser.add_argument(
        "--prefix", type=int, help="class, distillation and register tokens (default 1, or the model's)"
    )
    parser.add_argument("--head-dim", type=int, help="width of a head, for the FLOPs (default 64, or the model's)")
    parser.add_argument("--layers", type=int, help="layers, for the FLOPs (default 12, or the model's)")
    parser.add_argument("--layer", type=int, help="draw this layer (from 1), with its shuffled heads")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting, JSON value")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the pictures (default: this one)")
    parser.add_argument("--no-picture", action="store_true", help="numbers only")
    parser.add_argument("--time", action="store_true", help="predict time and memory on this machine, in some seconds")
    parser.add_argument(
        "--model", metavar="PRESET", help="with --time: vit_small, swin_tiny ...; else a ViT of --heads"
    )
    parser.add_argument("--images", type=int, help="with --time: how many at once (default 1)")
    parser.add_argument("--dtype", choices=DTYPES, help="with --time (default float32)")


def parse_grid(text: str) -> tuple[int, ...]:
    """(height, width) of "14x14", (frames, height, width) of "8x14x14"."""
    parts = text.lower().split("x")
    if len(parts) not in (2, 3) or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be HEIGHTxWIDTH, for example 14x14, or FRAMESxHEIGHTxWIDTH, for example 8x14x14"
        )
    return tuple(map(int, parts))


def add_train(parser: argparse.ArgumentParser) -> None:
    """Arguments of `train`."""
    add_import(parser)
    tables = "a .csv, .parquet or .arrow file, or a folder of these"
    text = f"a folder for each class, also below train, validation and test; or {tables}"
    parser.add_argument("data", help=text)
    text = f"a preset of `{PROGRAM} list families` (from scratch), folder of a run or a model, or a name on the hub"
    parser.add_argument("--model", required=True, help=text)
    parser.add_argument("--out", required=True, help="folder of the run; the same command goes on in it")
    text = "fibottention, violin, fibottention+violin ..., or a prior as JSON (default: the model's)"
    parser.add_argument("--prior", type=written_prior, help=text)
    text = "what is trained: everything, the classifier, LoRA, DoRA, or the prior's decay (default %(default)s)"
    parser.add_argument("--tuning", choices=TUNING, default=TUNING[0], help=text)
    text = "of an image: a class, several, or numbers; the last two of tables (default %(default)s)"
    parser.add_argument("--labels", choices=LABELS, default=LABELS[0], help=text)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=float, help="of training (default 20)")
    length.add_argument("--minutes", type=float, help="of training and tests, measured on this machine")
    parser.add_argument("--overwrite", action="store_true", help="replace a run with other settings")
    text = "any setting, see below"
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="section.key=value", help=text)


def add_sparsify(parser: argparse.ArgumentParser) -> None:
    """Arguments of `sparsify`, those of `sp.sparsify`."""
    add_import(parser)
    text = "folder of a training run or a saved dense model, ours or of transformers; or a name on the hub"
    parser.add_argument("model", help=text)
    parser.add_argument("out", help="folder of the result; the same command goes on in it")
    text = "folder of images; for accuracy a folder for each class, also below train and test"
    parser.add_argument("--data", required=True, help=text)
    text = "share of the dense model's time on this machine (default %(default)s)"
    parser.add_argument("--budget", type=float, default=0.5, help=text)
    parser.add_argument("--image-size", help="HEIGHTxWIDTH of the images, or one number (default: the model's)")
    parser.add_argument("--batch", type=int, help="images at once in what is timed (default 1)")
    parser.add_argument("--device", help="cpu, cuda ... (default: a GPU if there is one)")
    text = "what a layer may have: names of supports, or JSON with settings (default: each support in some settings)"
    parser.add_argument("--candidates", nargs="+", metavar="CANDIDATE", help=text)
    parser.add_argument("--calibration", type=int, help="images of the search at most (default 64)")
    parser.add_argument("--test", type=int, help="images of the test at most (default 1000)")
    parser.add_argument("--minutes", type=float, help="of distillation from the dense model afterwards (default 0)")
    parser.add_argument("--tuning", choices=TUNING_AFTERWARDS, help="with --minutes: all weights (default) or LoRA")
    parser.add_argument("--learning-rate", type=float, help="of --minutes (default 3e-5, with LoRA 5e-4)")
    text = "images at once in training, whose steps have 16; fewer need less memory (default 16)"
    parser.add_argument("--micro-batch", type=int, help=text)
    text = "train what the result is compared with for --minutes each, too"
    parser.add_argument("--recover-all", action="store_true", default=None, help=text)
    parser.add_argument("--seed", type=int, help="of the division of the images and of --minutes (default 0)")
    parser.add_argument("--processor", help="folder of an image processor (default: the model's)")


def add_predict(parser: argparse.ArgumentParser) -> None:
    """Arguments of `predict`, those of `sp.predict`."""
    add_import(parser)
    text = "folder of a training run, a saved model, an adapter or an exported file; or a name on the hub"
    parser.add_argument("model", help=text)
    text = "folders, image files, lists of paths (.txt), tables (.csv, .tsv, .parquet) and videos"
    parser.add_argument("images", nargs="+", help=text)
    text = (
        "new file: .csv, .jsonl or .parquet; .npz or .parquet with --features; .json (COCO) of a detector; "
        "a new folder of masks of a segmentor"
    )
    parser.add_argument("--out", required=True, help=text)
    parser.add_argument("--top", type=int, help="labels of an image that a classifier gives (default 5)")
    text = "write what the classifier takes, or the last layer's patches, instead of what the model finds"
    parser.add_argument("--features", choices=FEATURES, help=text)
    parser.add_argument("--threshold", type=float, help="least score of an object of a detector (default 0.5)")
    parser.add_argument("--column", help="of a table's paths (default: path, file, image, filename or file_name)")
    parser.add_argument("--every", type=int, help="of a video each so many frames (default: all)")
    parser.add_argument(
        "--batch", type=int, help="images at once (default: as many as fit the memory, at most 16 or 64)"
    )
    parser.add_argument("--device", help="cpu, cuda ... (default: a GPU if there is one)")
    parser.add_argument("--processor", help="folder of an image processor (default: the model's)")
    text = "leave out files that cannot be read and list them (default), or end with the first"
    parser.add_argument("--unreadable", choices=UNREADABLE, default="skip", help=text)
    parser.add_argument("--sheet", help="new .png file of the images that a classifier is surest and least sure of")
    parser.add_argument("--overlay", help="new folder of the images with masks or boxes drawn over them")


def add_export(parser: argparse.ArgumentParser) -> None:
    """Arguments of `export`."""
    add_import(parser)
    text = "folder of a saved model or a training run; with --format also of a stock model or an adapter of peft"
    parser.add_argument("source", type=Path, help=text)
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument("--license", help="for the model card (default apache-2.0)")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="write one file for torch.export, ONNX Runtime, OpenVINO or AOTInductor instead",
    )
    parser.add_argument("--size", help="with --format: HEIGHTxWIDTH of the images, or one number")
    parser.add_argument(
        "--backend", choices=BACKENDS, help=f"with --format: the form of attention (default {BACKENDS[0]})"
    )
    text = "with --format: keep the compiled operators in the file, which then needs their library where it runs"
    parser.add_argument("--kernels", action="store_true", default=None, help=text)
    weights = ", ".join(f"{name} (--format {' or '.join(formats)})" for name, formats in WEIGHTS.items())
    parser.add_argument("--weights", choices=list(WEIGHTS), help=f"{weights}; default float32")
    text = "with --format: folder with a folder of images for each class, for the accuracy"
    parser.add_argument("--images", type=Path, help=text)


def add_run_package(parser: argparse.ArgumentParser) -> None:
    """Arguments of `run-package`."""
    parser.add_argument("folder", type=Path, help="that `export --format aoti` made")
    text = "image files, prepared by the folder's processor; without any a random image is run and timed"
    parser.add_argument("images", nargs="*", type=Path, help=text)


def add_convert(parser: argparse.ArgumentParser, targets: Sequence[str] = TARGETS) -> None:
    """Arguments of `convert`."""
    parser.add_argument("source", type=Path, help="folder, .safetensors, .pth or .bin file")
    parser.add_argument(
        "out", type=Path, help="new folder; or .safetensors file (--to timm), .pth file (--to original)"
    )
    parser.add_argument(
        "--to",
        choices=targets,
        help="format: ours (default), a model of transformers, timm, or the original .pth file of DeiT, DINO, Swin ...",
    )
    parser.add_argument(
        "--prior",
        type=written_prior,
        help="prior of the new model, by name or as JSON (default the source's, dense if it has none); dense drops "
        "the prior that --to a foreign format cannot carry",
    )
    parser.add_argument("--image-size", type=int, help="interpolate the positions to this image size")
    parser.add_argument("--heads", type=int, help="attention heads of a timm ViT of an unpublished width")
    parser.add_argument("--drop-classifier", action="store_true", help="write the base model alone")


def add_app(parser: argparse.ArgumentParser) -> None:
    """Arguments of `app`."""
    add_import(parser)
    text = "folder of a saved model, or 'PRESET PRIOR' for random weights; two are shown side by side"
    parser.add_argument("models", nargs="*", metavar="MODEL", help=text)
    parser.add_argument("--host", default="127.0.0.1", help="address it listens on (default %(default)s)")
    parser.add_argument("--port", type=parse_port, help="default: the first free one from 7860 on")


def parse_port(text: str) -> int:
    """A port from 1 to 65535."""
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} must be from 1 to 65535")
    return int(text)


def answer_at_once() -> None:
    """End the command with `--help` or wrong arguments, as a script or as a module; any other process goes on."""
    given = sys.orig_argv
    is_module = sys.argv[:1] == ["-m"] and "-m" in given and given[given.index("-m") + 1] == "hf_sparseprior"
    if is_module or Path(sys.argv[0]).stem == SCRIPT:
        make_parser().parse_args()
