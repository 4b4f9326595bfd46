"""mmsegmentation's own inference on a saved run, in an interpreter that has imported nothing of ours:
python inference.py IMAGE OUT CONFIG WEIGHTS [CONFIG WEIGHTS ...]

OUT is a NumPy file with what each way predicts, in the order of `WAYS` for each pair.
"""

import sys
import warnings

import mmcv
import numpy as np

WAYS = ("init_model", "init_model with an array", "MMSegInferencer", "MMSegInferencer with an array")


def predict(image, config, weights):
    """Class indices (height, width) by each of WAYS, and the classes' names as the first one shows them."""
    from mmseg.apis import MMSegInferencer, inference_model, init_model, show_result_pyplot

    found, images = [], (image, mmcv.imread(image))
    model = init_model(config, weights, device="cpu")
    for given in images:
        result = inference_model(model, given)
        found.append(result.pred_sem_seg.data[0].numpy())
        drawn = show_result_pyplot(model, mmcv.imread(image), result, show=False, draw_gt=False)
        assert drawn.shape[2] == 3
    inferencer = MMSegInferencer(config, weights, device="cpu", show_progress=False)
    for given in images:
        results = inferencer([given, given], batch_size=2, return_vis=True)
        assert np.array_equal(*results["predictions"]) and results["visualization"][0].shape[2] == 3
        found.append(results["predictions"][0])
    return found, model.dataset_meta["classes"]


if __name__ == "__main__":
    warnings.filterwarnings("error", message=".*dataset_meta.*")
    picture, out, *pairs = sys.argv[1:]
    predicted = []
    for pair in zip(pairs[::2], pairs[1::2], strict=True):
        maps, names = predict(picture, *pair)
        assert list(names) == ["background", "bright", "dark"], names
        predicted += maps
    np.save(out, np.stack(predicted))
