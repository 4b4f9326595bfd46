"""transformers' own tests: python -m tests.conformance.sources FOLDER

They come from the source distribution of the installed release, which has the tests that its models share, but not
those of any model, nor three modules that the shared ones import. In their places stand empty mixins and our own table
of what every config takes, so tests of export and generation do not run. The folder gets `transformers_tests`, a
package of another name than ours, and says in `version.txt` of which release.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import transformers

ROOT = Path(__file__).parents[2]
DEFAULT = ROOT / ".venv" / "conformance"
PACKAGE = "transformers_tests"
# What the source distribution lacks. Values are none that a config has by default.
MISSING = {
    "__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "utils/test_configuration_utils.py": """\
config_common_kwargs = {
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "architectures": ["SomeModel"],
    "is_encoder_decoder": True,
    "id2label": {0: "a"},
    "label2id": {"a": 0},
    "problem_type": "regression",
}
""",
}


def is_laid_out(folder: Path = DEFAULT) -> bool:
    """Whether the tests of the installed release are there."""
    version = folder / "version.txt"
    return version.is_file() and version.read_text() == transformers.__version__


def lay_out(folder: Path = DEFAULT) -> Path:
    """The folder of the package; it is made if it is missing or of another release.

    Raises:
        OSError: if pip finds no source distribution of the installed release.
    """
    package = folder / PACKAGE
    if is_laid_out(folder):
        return package
    with tempfile.TemporaryDirectory() as place:
        words = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", place]
        pip = [sys.executable, "-m", "pip", *words, f"transformers=={transformers.__version__}"]
        process = subprocess.run(pip, capture_output=True, text=True, check=False)
        archives = list(Path(place).glob("*.tar.gz"))
        if process.returncode or not archives:
            last = (process.stderr.strip().splitlines() or ["no message"])[-1]
            raise OSError(f"no source distribution of transformers {transformers.__version__}: {last}")
        with tarfile.open(archives[0]) as archive:
            for member in archive:
                parts = Path(member.name).parts[1:]
                if member.isfile() and parts[:1] == ("tests",) and parts[-1].endswith(".py"):
                    _write(package.joinpath(*parts[1:]), archive.extractfile(member).read())
    for name, text in MISSING.items():
        _write(package / name, text.encode())
    _write(folder / "version.txt", transformers.__version__.encode())
    return package


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


if __name__ == "__main__":
    try:
        print(lay_out(Path(sys.argv[1]) if sys.argv[1:] else DEFAULT))
    except OSError as error:
        sys.exit(f"python -m tests.conformance.sources: {error}")
