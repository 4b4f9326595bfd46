"""What the terminal shows at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_sparseprior.runs.results import metric_text, print_warnings
from hf_sparseprior.runs.run_folder import MODEL, RESULTS
from hf_sparseprior.training.decay_movement import LEAST_CHANGE, unmoved_text


def tell_best_epoch(best: Mapping[str, Any] | None) -> str:
    """A line about what `best_epoch` returns."""
    if best is None:
        return "no epoch was chosen on validation: the weights of the last step are saved"
    metric, value = best["metric"].replace("_", " "), best["value"]
    number = f"{value:.4f}" if metric.endswith("loss") else metric_text(best["metric"], value)
    line = f"best epoch: {best['epoch']:.4g} of {best['epochs']:.4g}, {metric} {number}"
    return line if best["stopped_epoch"] is None else f"{line}; stopped early after epoch {best['stopped_epoch']:.4g}"


def decay_settings(results: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings of a run's decay, of the first stage that has one; None without a decay."""
    priors = results.get("prior_settings") or []
    decays = [prior.get("decay") for prior in (priors if isinstance(priors, list) else [priors])]
    return next((decay for decay in decays if decay), None)


def print_results(results: dict[str, Any], out: str) -> None:
    """What the terminal shows at the end of a run; runs of earlier versions may lack a part."""
    for name, value in results["metrics"].items():
        print(f"{name}: {metric_text(name, value)}")
    if (trained := results.get("trainable_parameters", results["parameters"])) != results["parameters"]:
        if trained > results["parameters"]:  # a head that is not saved, or what compression cut out
            print(f"{trained} parameters trained, of which the saved model keeps {results['parameters']}")
        else:
            print(f"{trained} parameters trained of {results['parameters']}")
    if "best_epoch" in results:  # runs of earlier versions do not say it
        print(tell_best_epoch(results["best_epoch"]))
    print(f"waiting for data: {100 * results['data_wait']:.1f} % of the training time")
    if results.get("max_decay_change") is not None:
        print(f"max |M - 1| of the learned decay: {results['max_decay_change']:.4f}")
        if (decay := decay_settings(results)) is not None and results["max_decay_change"] < LEAST_CHANGE:
            print(unmoved_text(decay))
    print_warnings(results)
    pictures = " ".join(f"{out}/{name}" for name in results.get("pictures", ("curves.png", "confusion.png")))
    print(f"results: {out}/{RESULTS}, pictures: {pictures}, model: {out}/{MODEL}")
