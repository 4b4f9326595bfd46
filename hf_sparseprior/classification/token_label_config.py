"""The `token_labels` section: label maps that the patch tokens learn from."""

from __future__ import annotations

from dataclasses import dataclass

from hf_sparseprior.base.checks import check_finite


@dataclass
class TokenLabelConfig:
    """Token labelling (Jiang et al. 2021); off without a path.

    path: folder of label maps of the training images, as `python -m tasks.classification.label_maps` makes them.
    weight: weight of the patch tokens' loss; the classifier's loss has 1.
    teacher: folder of a saved model. Before training it makes the maps at `path` that are missing.
    """

    path: str | None = None
    weight: float = 0.5
    teacher: str | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        for name in ("path", "teacher"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"token_labels.{name}={value!r} must be the name of a folder")
        if self.teacher and not self.path:
            raise ValueError(f"token_labels.teacher={self.teacher!r} needs token_labels.path, a folder for its maps")
        check_finite("token_labels.weight", self.weight, zero=False)
