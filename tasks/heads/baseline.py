"""The best constant predictor of objects, by the metric of the heads."""

from __future__ import annotations

from tasks.heads.data import Objects
from tasks.heads.kinds import Kind, ObjectScore, indexed


def constant_objects(kind: Kind, train: Objects, test: Objects) -> dict[str, float]:
    """Metrics of the constant predictor of the training images on the test images, by their names in results.json."""
    from tasks.common.coco_baseline import fit_constant  # needs an extra, which `--help` does not

    predictor = fit_constant(indexed(train.coco), list(train.coco.categories))
    score = ObjectScore(kind, test.coco)
    for image in test.images:
        found = predictor.predict(image["height"], image["width"])
        places = found["masks" if kind.finds == "masks" else "bboxes"]
        score.add(image, found["scores"], found["labels"], places)
    return {f"test_{name}": value for name, value in score.metrics().items()}
