"""mmdetection's own inference on a saved run, in an interpreter that has imported nothing of ours:
python inference.py IMAGE OUT CHECKPOINT CONFIG WEIGHTS [CONFIG WEIGHTS ...]

OUT is a JSON file with what each way predicts: boxes, labels, scores and the area of each mask, the detections of a
picture in the order of their scores. CHECKPOINT is given to DetInferencer alone, which finds the config in it.
"""

import json
import sys
import warnings

import mmcv


def as_lists(instances):
    """A picture's detections."""
    areas = instances.masks.flatten(1).sum(1) if "masks" in instances else instances.labels
    return [part.tolist() for part in (instances.bboxes, instances.labels, instances.scores, areas)]


def predict(image, config, weights):
    """By init_detector and DetInferencer, from a file and from an array."""
    from mmdet.apis import DetInferencer, inference_detector, init_detector

    images = (image, mmcv.imread(image))
    if config is not None:
        model = init_detector(config, weights, device="cpu")
        assert list(model.dataset_meta["classes"]) == ["bright", "dark"]
        yield from (as_lists(inference_detector(model, given).pred_instances) for given in images)
    inferencer = DetInferencer(config, weights, device="cpu", show_progress=False)
    for given in images:
        results = inferencer([given, given], batch_size=2, return_vis=True, return_datasamples=True)
        assert results["visualization"][0].shape[2] == 3
        assert inferencer.visualizer.dataset_meta["classes"] == inferencer.model.dataset_meta["classes"]
        yield from (as_lists(sample.pred_instances) for sample in results["predictions"])


if __name__ == "__main__":
    warnings.filterwarnings("error", message=".*dataset_meta.*")
    picture, out, checkpoint, *pairs = sys.argv[1:]
    predicted = [*predict(picture, None, checkpoint)]
    for pair in zip(pairs[::2], pairs[1::2], strict=True):
        predicted += predict(picture, *pair)
    with open(out, "w") as file:
        json.dump(predicted, file)
