"""Mask R-CNN 1x on COCO, DeiT-B with Fibottention (w_min 5, w_max 65, as on ImageNet)."""

_base_ = ["base/coco_1x.py"]
model = dict(backbone=dict(prior={"support": {"name": "fibottention", "w_min": 5, "w_max": 65}}))
