"""Slide mode beside crops by hand, at full size: python -m tests.tasks.segmentation.slide [CONFIG] [key=value ...]

CONFIG is a full-size configuration of segmentation whose weights are drawn. Prints seconds and memory for an image as
ADE20K has them, 512x683 pixels, as a whole, by crops, and by crops that are cut, moved and averaged here.
"""

import multiprocessing
import resource
import sys
import time

import torch
import torch.nn.functional as F
from mmengine.registry import init_default_scope
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample

from tasks.common.mm.config import load_config

CONFIG = "configs/segmentation/ade20k_deit_base.py#fibottention"
HEIGHT, WIDTH, CROP, STRIDE = 512, 683, 512, 341
SLIDE = [
    "model.test_cfg.mode=slide",
    f"model.test_cfg.crop_size=({CROP},{CROP})",
    f"model.test_cfg.stride=({STRIDE},{STRIDE})",
]


def build(config, overrides=()):
    """The model of a configuration in evaluation mode; what is drawn near 0 is drawn wider, so that pixels differ."""
    loaded = load_config("segmentation", config, ["model.backbone.pretrained=None", *overrides])
    init_default_scope("mmseg")
    for part in ("backbone", "neck", "decode_head", "auxiliary_head"):  # one process has nothing to synchronise
        if "norm_cfg" in (loaded.model.get(part) or {}):
            loaded.model[part].norm_cfg = {"type": "BN"}
    torch.manual_seed(0)
    model = MODELS.build(loaded.model).eval()
    torch.nn.init.normal_(model.decode_head.conv_seg.weight)
    return model


def photograph():
    """uint8 BGR (3, HEIGHT, WIDTH): smooth colours with noise on them."""
    random = torch.Generator().manual_seed(1)
    smooth = F.interpolate(torch.rand(1, 3, 8, 11, generator=random), (HEIGHT, WIDTH), mode="bicubic")[0]
    return (255 * (smooth + 0.1 * torch.rand(3, HEIGHT, WIDTH, generator=random))).clamp(0, 255).to(torch.uint8)


def by_framework(model, image):
    """mmsegmentation's own test step."""
    size = tuple(image.shape[1:])
    sample = SegDataSample(metainfo={"img_shape": size, "ori_shape": size})
    return model.test_step({"inputs": [image], "data_samples": [sample]})[0].seg_logits.data


def by_hand(model, image):
    """Crops at every STRIDE, the last ones moved in from the border; logits averaged where crops share pixels."""
    mean, std = (torch.tensor(value)[:, None, None] for value in ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)))
    pixels = (image.flip(0).float() - mean) / std
    height, width = ((side + 15) // 16 * 16 for side in pixels.shape[1:])  # the configuration's size_divisor
    pixels = F.pad(pixels, (0, width - pixels.shape[2], 0, height - pixels.shape[1]))
    total, count = 0, torch.zeros(height, width)
    for top in places(height):
        for left in places(width):
            crop = pixels[None, :, top : top + CROP, left : left + CROP]
            maps = model.backbone(crop)
            logits = model.decode_head(model.neck(maps) if model.with_neck else maps)
            logits = F.interpolate(logits, (CROP, CROP), mode="bilinear", align_corners=False)[0]
            total = total + F.pad(logits, (left, width - left - CROP, top, height - top - CROP))
            count[top : top + CROP, left : left + CROP] += 1
    return (total / count)[:, : image.shape[1], : image.shape[2]]


def places(side):
    """Where crops begin along a side."""
    starts = [0]
    while starts[-1] + CROP < side:
        starts.append(min(starts[-1] + STRIDE, side - CROP))
    return starts


def measured(call, config, overrides):
    """Logits as an array, seconds of the prediction, and the most memory of this process, MiB."""
    model, image = build(config, overrides), photograph()
    start = time.perf_counter()
    with torch.no_grad():
        logits = call(model, image)
    seconds = time.perf_counter() - start
    return logits.numpy(), seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(arguments):
    config, *overrides = arguments or [CONFIG]
    print(f"{config}, {HEIGHT}x{WIDTH} pixels, {torch.get_num_threads()} threads")
    found = {}
    for name, given, call in (("whole", [], by_framework), ("slide", SLIDE, by_framework), ("by hand", [], by_hand)):
        with multiprocessing.get_context("fork").Pool(1) as pool:  # a process each, for its memory
            found[name], seconds, peak_mib = pool.apply(measured, (call, config, [*overrides, *given]))
        print(f"{name}: {seconds:.1f} s, {peak_mib:.0f} MiB", flush=True)
    slide, expected = found["slide"], found["by hand"]
    print(f"slide and by hand differ by {abs(slide - expected).max():.1e}, logits spread by {expected.std():.1e}")


if __name__ == "__main__":
    main(sys.argv[1:])
