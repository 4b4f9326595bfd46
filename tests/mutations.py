"""Do the tests notice a mistake? Sixty of them, one at a time, each with the tests that have to fail.

    python -m tests.mutations [PART OF A NAME ...] [--root CHECKOUT] [--jobs N]

Forty are chosen (`mutation_list.CHOSEN`), each with its tests. Twenty are drawn by a fixed seed from all that can be
made in functions of hf_sparseprior (`drawn`); for these the tests that import the module run first, then the others of
its room (`tests_of`).

Each mistake is made in a copy of the checkout. It counts as noticed if a test fails which passes without it; a survivor
is one that no test noticed, unless it is explained (`mutation_list.EXPLAINED`). The exit status is 1 if there is a
survivor, or a mistake that cannot be made or tested. pytest does not collect this file.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutation_list import CHOSEN, EXPLAINED, Mutation
from tests.mutation_sites import Site, changed, sites

SEED, DRAWN = 0, 20
LEFT_OUT = (".git", ".venv", "outputs", "build", "data", "demonstrations")
KILLED, SURVIVED, EXPLAINED_AWAY, ERROR = "killed", "SURVIVED", "explained", "ERROR"


@dataclass(frozen=True)
class Trial:
    """A mistake to be made. stages: pytest's arguments, one list after the other until a test fails."""

    title: str
    site: Site
    stages: list[list[str]]


# ---- which mistakes -------------------------------------------------------------------------------------------------


def site_of(root: Path, mutation: Mutation) -> Site:
    """The one site that a chosen mutation means.

    Raises:
        ValueError: if there is none, or more than one.
    """
    path, _, function = mutation.place.partition("::")
    wanted = (function, mutation.operator, mutation.node)
    found = [site for site in sites(root, path) if (site.function, site.operator, site.node) == wanted]
    if mutation.number is not None:
        found = [site for site in found if site.number == mutation.number]
    if len(found) != 1:
        where = f"{mutation.place} {mutation.operator} {mutation.node} {mutation.number or ''}".strip()
        raise ValueError(f"{mutation.what}: {where} is {len(found)} nodes, it has to be one")
    return found[0]


def drawn(root: Path) -> list[Site]:
    """The sites of all functions of hf_sparseprior with the smallest hashes of seed and name.

    So it takes a change of these functions, or a new site with a small hash, to draw another one.
    """
    files = sorted(path.relative_to(root).as_posix() for path in (root / "hf_sparseprior").rglob("*.py"))
    every = (site for path in files for site in sites(root, path))
    return heapq.nsmallest(DRAWN, every, key=lambda site: hashlib.sha256(f"{SEED} {site.name}".encode()).digest())


def arguments_of(root: Path, mutation: Mutation) -> list[str]:
    """pytest's arguments for the tests of a chosen mutation.

    Raises:
        ValueError: for a name that no test file has.
    """
    files = []
    for name in mutation.tests.split():
        if not (named := sorted((root / "tests").rglob(name))):
            raise ValueError(f"{mutation.what}: there is no test file {name}")
        files += [str(path.relative_to(root)) for path in named]
    return [*files, *(["-k", mutation.select] if mutation.select else [])]


def tests_of(root: Path, path: str) -> list[list[str]]:
    """Tests of a module of the library: those of its name or that import it, then the others of its room."""
    module, folder = Path(path).with_suffix(""), Path("tests", *Path(path).parts[:2])
    package, name = ".".join(module.parent.parts), re.escape(module.name)
    imports = re.compile(rf"\b{re.escape(package)}\.{name}\b|\bfrom {re.escape(package)} import [^\n]*\b{name}\b")
    library = sorted((root / "tests" / "hf_sparseprior").rglob("test_*.py"))
    near = [file for file in library if file.stem == f"test_{module.name}" or imports.search(file.read_text())]
    room = [file for file in library if file not in near and file.relative_to(root).is_relative_to(folder)]
    return [[str(file.relative_to(root)) for file in files] for files in (near, room) if files]


def trials(root: Path) -> tuple[list[Trial], list[str]]:
    """All mistakes, and what is wrong with those that cannot be made."""
    found, wrong = [], []
    for mutation in CHOSEN:
        try:
            found.append(Trial(mutation.what, site_of(root, mutation), [arguments_of(root, mutation)]))
        except ValueError as error:
            wrong.append(str(error))
    found += [Trial("drawn", site, tests_of(root, site.path)) for site in drawn(root)]
    return found, wrong


# ---- making one -----------------------------------------------------------------------------------------------------


def copy_of(root: Path, folder: Path) -> Path:
    """A copy of a checkout, without what it was built into."""

    def ignored(parent: str, names: list[str]) -> Iterable[str]:
        return [name for name in names if name == "__pycache__" or (Path(parent) == root and name in LEFT_OUT)]

    return Path(shutil.copytree(root, folder, ignore=ignored, symlinks=True))


def run_tests(tree: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """pytest's exit status in a tree, and the line that says why."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-o", f"cache_dir={tree}.cache", *arguments]
    command += ["-o", "faulthandler_timeout=300"]  # seconds, after which a mistake that never ends is noticed
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=tree, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, (failed or lines or done.stderr.splitlines() or [""])[-1]


def verdict(tree: Path, trial: Trial) -> tuple[str, str]:
    """What becomes of a mistake, and why. The tree is the same afterwards."""
    if (name := trial.site.name) in EXPLAINED:
        return EXPLAINED_AWAY, EXPLAINED[name]
    file, cache = tree / trial.site.path, Path(f"{tree}.cache")
    original, line = file.read_text(encoding="utf-8"), "no tests"
    for arguments in trial.stages:
        shutil.rmtree(cache, ignore_errors=True)
        try:
            file.write_text(changed(original, trial.site), encoding="utf-8")
            status, line = run_tests(tree, arguments)
        finally:
            file.write_text(original, encoding="utf-8")
        if status == 0:
            continue
        # The cache knows which tests failed.
        without, other = run_tests(tree, [*arguments, "--last-failed"])
        return (KILLED, line) if without == 0 else (ERROR, f"{other} (without the mistake)")
    return (SURVIVED, line) if trial.stages else (ERROR, line)


def report(trial: Trial, result: str, line: str, seconds: float) -> None:
    """One line about a mistake."""
    print(f"{result:9} {trial.title}: {trial.site.name} ({seconds:.0f} s): {line[:200]}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="part of a mutation's name or of what it is; default: all")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="checkout to test")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time")
    arguments = parser.parse_args(argv)
    root = arguments.root.resolve()
    chosen, wrong = trials(root)
    if arguments.names:
        chosen = [each for each in chosen if any(part in f"{each.title}: {each.site.name}" for part in arguments.names)]
    for error in wrong:
        print(f"{ERROR:9} {error}")
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(arguments.jobs) as pool:
        trees: queue.Queue[Path] = queue.Queue()
        for job in range(arguments.jobs):
            trees.put(copy_of(root, Path(scratch, str(job))))

        def attempt(trial: Trial) -> str:
            tree, start = trees.get(), time.monotonic()
            try:
                result, line = verdict(tree, trial)
            finally:
                trees.put(tree)
            report(trial, result, line, time.monotonic() - start)
            return result

        results = [*([ERROR] * len(wrong)), *pool.map(attempt, chosen)]
    counts = {word: results.count(word) for word in (KILLED, SURVIVED, EXPLAINED_AWAY, ERROR)}
    print(f"{len(results)} mutations: {', '.join(f'{count} {word.lower()}' for word, count in counts.items())}")
    return int(not results or bool(counts[SURVIVED] or counts[ERROR]))


if __name__ == "__main__":
    sys.exit(main())
