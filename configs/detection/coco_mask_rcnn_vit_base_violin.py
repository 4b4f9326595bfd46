"""Mask R-CNN 1x on COCO, DeiT-B with VIOLIN."""

_base_ = ["base/coco_1x.py"]
# alpha and beta as the paper starts them on trained weights: a mask near 1.
model = dict(backbone=dict(prior=dict(decay=dict(name="violin", init="finetune"))))
