import numpy as np
from PIL import Image
from transformers import BitImageProcessorPil

import hf_sparseprior as sp
from hf_sparseprior.sparsification.data import resized_processor
from tests.each import each
from tests.hf_sparseprior.sparsification.fakes import CANDIDATES, Timer, model_of


@each("crop, size", [({"height": 32, "width": 32}, {"shortest_edge": 36}), (32, {"height": 40, "width": 40})])
def test_a_crop_of_a_larger_image_shows_the_same_part(crop, size):
    saved = {"do_center_crop": True, "crop_size": crop, "size": size, "resample": 3, "do_normalize": False}
    larger = resized_processor(saved, (64, 64))
    assert larger["crop_size"] == {"height": 64, "width": 64}
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8)).resize((1200, 900))
    small, large = (
        BitImageProcessorPil(**settings)(photo, return_tensors="np")["pixel_values"][0] for settings in (saved, larger)
    )
    assert small.shape == (3, 32, 32) and large.shape == (3, 64, 64)
    halved = large.reshape(3, 32, 2, 32, 2).mean((2, 4))
    assert np.abs(halved - small).mean() < 0.02 < np.abs(np.roll(halved, 3, 1) - small).mean()


def test_what_does_not_crop_stays():
    plain = {"do_resize": True, "size": {"height": 32, "width": 32}}
    crops = {"do_center_crop": True, "crop_size": 32, "size": 36}
    assert resized_processor(plain, (64, 64)) is plain and resized_processor(crops, None) is crops
    assert resized_processor(None, (64, 64)) is None
    assert resized_processor(crops, (64, 96)) == {**crops, "crop_size": {"height": 64, "width": 96}, "size": 108}


def test_a_model_of_a_run_is_searched_at_a_larger_size(monkeypatch, tmp_path):
    """Runs save processors that crop."""
    monkeypatch.setattr("hf_sparseprior.sparsification.timing.seconds_of_rounds", Timer())
    photos = [Image.fromarray(np.full((50, 60, 3), shade, np.uint8)) for shade in range(0, 240, 20)]
    processor = BitImageProcessorPil(crop_size={"height": 32, "width": 32}, size={"shortest_edge": 36})
    found = sp.sparsify(
        model_of("ours"), photos, 0.9, processor=processor,
        settings={"candidates": CANDIDATES, "calibration": 4, "device": "cpu", "image_size": 40},
    )  # fmt: skip
    assert found.processor["crop_size"] == {"height": 40, "width": 40} and found.report.image_size == (40, 40)
