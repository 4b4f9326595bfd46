"""Do the tests notice a mistake? Thirty of them, one at a time, each with the tests that have to fail.

    python -m tests.mutations [NAME ...] [--root CHECKOUT]

A mistake replaces a short text that occurs once in hf_sparseprior or tasks by another. The tree is copied, one mistake
is made in the copy, and the named test files run there until the first failure. A mistake that no test notices
survives. It is an error if the text does not occur exactly once, or if no test is selected. The exit status is 1 if any
mistake survives. pytest does not collect this file; it takes some ten minutes on one core.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SOURCES = ("hf_sparseprior", "tasks")
COPIED = (*SOURCES, "tests", "configs", "pyproject.toml")


@dataclass(frozen=True)
class Mutation:
    """`old` becomes `new`. `tests` are names of test files in any folder; `select` is pytest's -k."""

    name: str
    old: str
    new: str
    tests: str
    select: str = ""


OPS = "matches_loops or reference"
RUNS = "test_run_folder.py test_run.py"
NOT_VIDEO = "(folder or differences or configuration or overwrite or finished or skipped) and not video"
MUTATIONS = (
    # The attention core.
    Mutation(
        "masked pairs get another logit",
        '"neg_inf" else 0.0)\n    if',
        '"neg_inf" else 1.0)\n    if',
        "test_ops.py test_backend_*.py",
        OPS,
    ),
    Mutation(
        "prefix tokens decay",
        "(prefix, 0, prefix, 0), value=1.0)",
        "(prefix, 0, prefix, 0), value=0.9)",
        "test_ops.py test_backend_*.py",
        OPS,
    ),
    Mutation(
        "residual with the wrong sign", "else 1.0 + decay_HTT", "else 1.0 - decay_HTT", "test_placement.py", "formula"
    ),
    Mutation(
        "add forgets its one",
        '(decay_HTT - 1.0) if placement == "add"',
        'decay_HTT if placement == "add"',
        "test_placement.py",
        "formula",
    ),
    Mutation("sdpa without its mask", "attn_mask=mask", "attn_mask=None", "test_ops.py test_backend_*.py", OPS),
    Mutation("dropped keys keep their weight", "clamp_min(1e-6)", "clamp_min(1e9)", "test_token_pruning.py"),
    Mutation(
        "diagonal forgets the floor",
        "probs / total - floor * inside",
        "probs / total",
        "test_ops.py test_backend_*.py",
        "diagonal",
    ),
    Mutation(
        "diagonal's prefix without V",
        "out + probs[..., :prefix] @ v_prefix",
        "out + 0 * probs[..., :prefix] @ v_prefix",
        "test_ops.py test_backend_*.py",
        "diagonal",
    ),
    Mutation(
        "gather forgets the softmax's sum in its gradient",
        "grad_logits = probs * (grad_probs - (probs * grad_probs).sum(-1, keepdim=True))",
        "grad_logits = probs * grad_probs",
        "test_ops.py test_backend_*.py",
        "gather",
    ),
    Mutation(
        "frames forgets the softmax's sum in its gradient",
        "grad_scores = probs * (grad_probs - (probs * grad_probs).sum(-1, keepdim=True))",
        "grad_scores = probs * grad_probs",
        "test_time.py",
    ),
    # Supports, sequences and curves.
    Mutation(
        "windows end too early",
        "(high - low) * head // (num_heads - 1)",
        "(high - low) * head // num_heads",
        "test_supports.py",
    ),
    Mutation(
        "every layer has the same order",
        "random.Random(shuffle_seed + layer)",
        "random.Random(shuffle_seed)",
        "test_supports.py",
    ),
    Mutation("Fibonacci adds one", "a, b = b, a + b", "a, b = b, a + b + 1", "test_sequences.py"),
    Mutation(
        "the window's end is left out",
        "1 <= term <= window",
        "1 <= term < window",
        "test_sequences.py test_supports.py",
    ),
    Mutation(
        "the snake turns too early", "rank[1::2] = rank[1::2, ::-1]", "rank[::2] = rank[::2, ::-1]", "test_curves.py"
    ),
    Mutation(
        "the zigzag goes the other way",
        "np.where(diagonal % 2 == 0, columns - first, last - columns)",
        "np.where(diagonal % 2 == 1, columns - first, last - columns)",
        "test_curves.py",
    ),
    Mutation(
        "a pruning ratio of tokens, not pairs", "/ 100.0) * num_tokens**2", "/ 100.0) * num_tokens", "test_supports.py"
    ),
    Mutation("Longformer's window is twice as wide", "else w // 2", "else w", "test_supports.py"),
    # Decays.
    Mutation("the sum over curves, not their mean", "total / distance_C.shape[0]", "total", "test_decay.py"),
    Mutation(
        "Chebyshev, not Manhattan",
        "positions_CAN.unsqueeze(-2)).abs().sum(1)",
        "positions_CAN.unsqueeze(-2)).abs().amax(1)",
        "test_decay.py",
    ),
    Mutation("gamma is not the sigmoid of beta", '- math.log1p(-settings["gamma"])', "", "test_placement.py", "gamma"),
    Mutation(
        "beta in bfloat16",
        "if moved.dtype in (torch.float16, torch.bfloat16)",
        "if moved.dtype in (torch.float16,)",
        "test_decay.py",
    ),
    Mutation(
        "a learned order is not stretched",
        "align_corners=True)[0] * stretch",
        "align_corners=True)[0]",
        "test_placement.py",
        "learned_order",
    ),
    # Training.
    Mutation(
        "layer decay is one layer off",
        "layer_decay ** (num_layers + 1 - layer)",
        "layer_decay ** (num_layers - layer)",
        "test_layer_decay.py",
    ),
    Mutation(
        "micro-batches weigh alike",
        "loss * (size * self.accelerator.num_processes / num_items_in_batch)",
        "loss * (4 * self.accelerator.num_processes / num_items_in_batch)",
        "test_training.py",
        "mean_over_its_samples or shorter_last",
    ),
    Mutation("beta decays", "and id(parameter) not in exempt", "", "test_trainer.py", "no_decay"),
    Mutation(
        "mixed labels are swapped",
        "mix.share * targets[row] + (1 - mix.share)",
        "(1 - mix.share) * targets[row] + mix.share",
        "test_mixing.py",
    ),
    Mutation(
        "every epoch has the first one's order",
        '[self.seed, epoch, *b"order"]',
        '[self.seed, 0, *b"order"]',
        "test_training.py test_sampling.py",
        "order",
    ),
    # Run folders and results.
    Mutation("another run's folder is taken", "if differences and not overwrite:", "if False:", RUNS, NOT_VIDEO),
    Mutation("a cut checkpoint counts as whole", 'return f"{name} is missing"', "continue", RUNS, NOT_VIDEO),
    Mutation(
        "another run's results are read",
        "not (out / RESULTS).exists() or folder_differences(out, config)",
        "not (out / RESULTS).exists()",
        "test_run_folder.py test_run.py test_compare.py",
        "not video",
    ),
)


def sources(root: Path) -> dict[Path, str]:
    """Every source file and its text."""
    return {path: path.read_text() for folder in SOURCES for path in sorted((root / folder).rglob("*.py"))}


def mutate(root: Path, mutation: Mutation) -> Path:
    """Make the mistake. Returns the file that has it now.

    Raises:
        ValueError: if the text is not there once.
    """
    found = [(path, text) for path, text in sources(root).items() if mutation.old in text]
    count = sum(text.count(mutation.old) for _, text in found)
    if count != 1:
        places = ", ".join(str(path.relative_to(root)) for path, _ in found) or "nowhere"
        raise ValueError(f"{mutation.name}: {mutation.old!r} stands {count} times ({places}), it has to stand once")
    path, text = found[0]
    path.write_text(text.replace(mutation.old, mutation.new))
    return path


def run_tests(root: Path, mutation: Mutation) -> tuple[int, str]:
    """pytest's exit status in this tree, and its last line."""
    names = mutation.tests.split()
    files = [str(path) for name in names for path in sorted((root / "tests").rglob(name))]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    command += ["-k", mutation.select] if mutation.select else []
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, (failed or lines or done.stderr.splitlines() or [""])[-1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="checkout to test")
    arguments = parser.parse_args(argv)
    chosen = [mutation for mutation in MUTATIONS if not arguments.names or mutation.name in arguments.names]
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for name in COPIED:
            source = arguments.root / name
            ignored = shutil.ignore_patterns("__pycache__", "results", "pictures")
            _ = shutil.copytree(source, root / name, ignore=ignored) if source.is_dir() else shutil.copy(source, root)
        originals, survived, wrong = sources(root), [], []
        for mutation in chosen:
            start = time.monotonic()
            try:
                path = mutate(root, mutation)
            except ValueError as error:
                wrong.append(mutation.name)
                print(f"ERROR     {error}", flush=True)
                continue
            status, line = run_tests(root, mutation)
            path.write_text(originals[path])
            verdict = {0: "SURVIVED", 1: "killed"}.get(status, "ERROR")
            survived += [mutation.name] if status == 0 else []
            wrong += [mutation.name] if status not in (0, 1) else []
            where = path.relative_to(root)
            print(f"{verdict:9} {mutation.name} ({where}, {time.monotonic() - start:.0f} s): {line[:150]}", flush=True)
    killed = len(chosen) - len(survived) - len(wrong)
    print(f"{len(chosen)} mutations: {killed} killed, {len(survived)} survived, {len(wrong)} errors")
    return int(bool(survived or wrong))


if __name__ == "__main__":
    sys.exit(main())
