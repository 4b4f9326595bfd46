"""Mask R-CNN 1x on COCO, DeiT-B with dense attention."""

_base_ = ["base/coco_1x.py"]
model = dict(backbone=dict(prior="dense"))
