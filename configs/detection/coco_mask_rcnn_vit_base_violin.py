"""Mask R-CNN 1x on COCO, DeiT-B with VIOLIN."""

_base_ = ["base/coco_1x.py"]
model = dict(backbone=dict(prior="violin"))
