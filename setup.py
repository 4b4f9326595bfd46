"""What pyproject.toml cannot say: a wheel has the CPU kernels compiled, one library for each kind of processor.

Without a compiler, or elsewhere than on Linux on x86-64 and 64-bit ARM, or with SPARSEPRIOR_WHEEL=pure, the wheel has
none and fits every machine, which compiles them at first use. A wheel for the other processor is made by a compiler for
it: CXX=aarch64-linux-gnu-g++ _PYTHON_HOST_PLATFORM=linux-aarch64.
"""

import importlib.util
import os
import sysconfig
import warnings
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


def kernels_build():
    """hf_sparseprior/kernels/build.py without the package around it, which needs torch."""
    return alone("kernels/build.py")


def project_urls():
    """`[project.urls]`: what has the one address of the project in it; {} while there is none."""
    address = alone("base/version.py").ADDRESS
    if address is None:
        return {}
    pages = {"Repository": "", "Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md"}
    return {name: address + page for name, page in {**pages, "Issues": "/issues"}.items()}


def alone(file):
    """A module of the package without the package around it."""
    spec = importlib.util.spec_from_file_location(Path(file).stem + "_alone", ROOT / "hf_sparseprior" / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def why_pure():
    """Why a wheel has no compiled kernels; None if it has."""
    chosen = os.environ.get("SPARSEPRIOR_WHEEL", "")
    if chosen not in ("", "pure", "compiled"):
        raise SystemExit(f"SPARSEPRIOR_WHEEL={chosen!r} must be pure or compiled")
    if chosen == "pure":
        return "SPARSEPRIOR_WHEEL=pure"
    reason = None
    system, _, machine = sysconfig.get_platform().partition("-")
    if system != "linux" or machine not in kernels_build().MACHINES:
        reason = f"on {system} {machine} kernels are compiled at first use"
    elif kernels_build().find_compiler() is None:
        reason = "there is no C++ compiler"
    if reason and chosen == "compiled":
        raise SystemExit(f"SPARSEPRIOR_WHEEL=compiled: {reason}")
    return reason


class Build(build_py):
    """Python files, and the kernels."""

    def run(self):
        """As setuptools, and compile."""
        super().run()
        if self.editable_mode:
            return
        if reason := why_pure():
            print(f"no compiled kernels in the wheel: {reason}")
            return
        build = kernels_build()
        folder = Path(self.build_lib) / "hf_sparseprior" / "kernels" / build.PREBUILT.name
        folder.mkdir(parents=True, exist_ok=True)
        for name, (_, flags) in build.MACHINES[sysconfig.get_platform().partition("-")[2]].items():
            print(f"compiling the CPU kernels for {name}")
            for host in (build.TORCH, build.ONNXRUNTIME):
                library = folder / build.prebuilt_file(name, host)
                build.compile_library(build.find_compiler(), library, [*flags, "-s"], host=host)
        (folder / "libtorch_cpu.so").unlink()


class Wheel(bdist_wheel):
    """A wheel with compiled kernels fits every Python 3 of its platform: they know nothing of Python."""

    def get_tag(self):
        """(Python, ABI, platform)."""
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


class Package(Distribution):
    """A distribution that says whether its wheel has compiled code."""

    def has_ext_modules(self):
        """Whether there are kernels in it."""
        return why_pure() is None


# setuptools says at every editable installation that folders of the package's name come first where Python is
# started. In a checkout that folder is the package.
warnings.filterwarnings("ignore", message="Editable installation")
setup(distclass=Package, cmdclass={"build_py": Build, "bdist_wheel": Wheel}, project_urls=project_urls())
