import json

import numpy as np
import pytest

pytest.importorskip("pycocotools", reason="the extra `heads` is not installed")

from pycocotools.coco import COCO

from tasks.common.coco_baseline import DETECTIONS, fit_constant, overlaps
from tasks.common.mm.scenes import mask_box, run_lengths

pytestmark = pytest.mark.slow


def make_coco(tmp_path, masks_by_image):
    """masks_by_image: lists of (category, mask)."""
    images, annotations = [], []
    for number, objects in enumerate(masks_by_image):
        height, width = objects[0][1].shape if objects else (40, 40)
        images.append({"id": number, "file_name": f"{number}.png", "height": height, "width": width})
        for category, mask in objects:
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": category,
                    "bbox": mask_box(mask),
                    "area": int(mask.sum()),
                    "iscrowd": 0,
                    "segmentation": run_lengths(mask),
                }
            )
    path = tmp_path / "instances.json"
    categories = [{"id": index, "name": str(index)} for index in (3, 7)]
    path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return COCO(path)


def square(top, left, side, size=40):
    mask = np.zeros((size, size), dtype=bool)
    mask[top : top + side, left : left + side] = True
    return mask


def test_objects_that_never_move_are_predicted_exactly(tmp_path):
    """Category 7 is in every image, always in the corner, category 3 in one of four."""
    corner = square(0, 0, 10)
    corner[:5, :5] = False
    coco = make_coco(tmp_path, [[(7, corner), (3, square(20, 20, 20))], [(7, corner)], [(7, corner)], [(7, corner)]])
    predictor = fit_constant(coco, [3, 7])
    assert predictor.labels[0] == 1 and predictor.scores[0] == 1.0
    found = predictor.predict(40, 40)
    np.testing.assert_allclose(found["bboxes"][0], [0, 0, 10, 10], atol=1e-9)
    assert np.array_equal(found["masks"][0], corner)
    assert np.isclose(predictor.scores[predictor.labels == 0].max(), 0.25)
    assert len(predictor.scores) == DETECTIONS
    assert (np.diff(predictor.scores) <= 0).all()
    larger = predictor.predict(80, 120)
    np.testing.assert_allclose(larger["bboxes"][0], [0, 0, 30, 20], atol=1e-9)
    assert larger["masks"].shape == (DETECTIONS, 80, 120)


def test_scores_are_shares_of_images_counted_one_by_one(tmp_path):
    random = np.random.default_rng(0)
    scenes = [[(3, square(*random.integers(0, 28, 2), 12)) for _ in range(random.integers(0, 3))] for _ in range(15)]
    scenes[0] = [(3, square(4, 4, 12))]
    coco = make_coco(tmp_path, scenes)
    predictor = fit_constant(coco, [3, 7])
    assert set(predictor.labels) == {0}
    for box, score in zip(predictor.predict(40, 40)["bboxes"], predictor.scores, strict=True):
        hits = 0
        for objects in scenes:
            hit = False
            for _, mask in objects:
                left, top, width, height = mask_box(mask)
                across = min(box[2], left + width) - max(box[0], left)
                down = min(box[3], top + height) - max(box[1], top)
                shared = max(across, 0) * max(down, 0)
                hit |= bool(shared / (144 + 144 - shared) >= 0.5)
            hits += hit
        assert np.isclose(score, hits / 15)


def test_overlaps_by_counting_pixels():
    random = np.random.default_rng(1)
    corners = random.integers(0, 10, (6, 2))
    boxes = np.concatenate([corners, corners + random.integers(1, 9, (6, 2))], 1)
    counted = np.zeros((6, 6))
    drawn = np.zeros((6, 20, 20), dtype=bool)
    for canvas, (left, top, right, bottom) in zip(drawn, boxes, strict=True):
        canvas[top:bottom, left:right] = True
    for row in range(6):
        for column in range(6):
            counted[row, column] = (drawn[row] & drawn[column]).sum() / (drawn[row] | drawn[column]).sum()
    np.testing.assert_allclose(overlaps(boxes, boxes), counted)
