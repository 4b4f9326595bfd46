"""`custom_imports = dict(imports=["hf_sparseprior.mm"])` is all that mm's own tools need."""

import pytest

from tests.processes import run_script

pytest.importorskip("mmseg", reason="mmsegmentation is not installed: make dense")
pytest.importorskip("mmdet", reason="mmdetection is not installed: make dense")

SCRIPT = """
import sys
import numpy as np
from mmengine.config import Config
from mmseg.apis import inference_model, init_model
model = init_model(Config.fromfile("segmentation.py"), device="cpu")
image = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
found = inference_model(model, image).pred_sem_seg.data
assert found.shape == (1, 40, 56), found.shape
print(type(model.backbone).__name__, type(model.backbone).__module__)
from mmdet.apis import inference_detector, init_detector
model = init_detector(Config.fromfile("detection.py"), palette="random", device="cpu")
image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
found = inference_detector(model, image).pred_instances
assert found.bboxes.shape[1] == 4
assert not any(name.partition(".")[0] == "tasks" for name in sys.modules)
print(type(model.backbone).__name__, type(model.neck).__name__)
"""
BACKBONE = """
custom_imports = dict(imports=["hf_sparseprior.mm"], allow_failed_imports=False)
backbone = dict(
    type="SparsePriorViT", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
    image_size=32, patch_size=8, prior="fibottention+violin", out_indices=[2],
)
"""
SEGMENTATION = """
default_scope = "mmseg"
model = dict(
    type="EncoderDecoder",
    data_preprocessor=dict(type="SegDataPreProcessor", size=(32, 32)),
    backbone=backbone,
    decode_head=dict(
        type="FCNHead", in_channels=16, channels=8, num_convs=1, num_classes=3, in_index=0,
        norm_cfg=dict(type="BN"), loss_decode=dict(type="CrossEntropyLoss"),
    ),
    test_cfg=dict(mode="whole"),
)
test_pipeline = [dict(type="LoadImageFromFile"), dict(type="PackSegInputs")]
test_dataloader = dict(dataset=dict(pipeline=test_pipeline))
"""
DETECTION = """
default_scope = "mmdet"
model = dict(
    type="RetinaNet",
    data_preprocessor=dict(type="DetDataPreprocessor"),
    backbone=backbone,
    neck=dict(type="SimpleFeaturePyramid", in_channels=16, out_channels=8, num_outs=4),
    bbox_head=dict(
        type="RetinaHead", num_classes=3, in_channels=8, stacked_convs=1, feat_channels=8,
        anchor_generator=dict(
            type="AnchorGenerator", octave_base_scale=4, scales_per_octave=1, ratios=[1.0], strides=[2, 4, 8, 16],
        ),
        bbox_coder=dict(type="DeltaXYWHBBoxCoder"),
    ),
    test_cfg=dict(nms_pre=10, score_thr=0.0, nms=dict(type="nms", iou_threshold=0.5), max_per_img=5),
)
test_pipeline = [
    dict(type="LoadImageFromFile"), dict(type="Resize", scale=(64, 64)),
    dict(type="PackDetInputs", meta_keys=("img_shape", "ori_shape", "scale_factor")),
]
test_dataloader = dict(dataset=dict(pipeline=test_pipeline))
"""


@pytest.mark.slow
def test_mms_own_tools(tmp_path):
    (tmp_path / "segmentation.py").write_text(BACKBONE + SEGMENTATION)
    (tmp_path / "detection.py").write_text(BACKBONE + DETECTION)
    printed = run_script(SCRIPT, folder=tmp_path, package=True).stdout.splitlines()
    assert "SparsePriorViT hf_sparseprior.mm.backbone" in printed
    assert printed[-1] == "SparsePriorViT SimpleFeaturePyramid"
