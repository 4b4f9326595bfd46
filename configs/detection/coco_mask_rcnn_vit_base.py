"""Mask R-CNN on COCO with the 1x schedule, DeiT-B; a cell for each prior."""

_base_ = ["base/coco_1x.py"]
cells = dict(
    dense=dict(model=dict(backbone=dict(prior="dense"))),
    # alpha and beta as the paper starts them on trained weights: a mask near 1.
    violin=dict(model=dict(backbone=dict(prior=dict(decay=dict(name="violin", init="finetune"))))),
    # As on ImageNet.
    fibottention=dict(model=dict(backbone=dict(prior=dict(support=dict(name="fibottention", w_min=5, w_max=65))))),
)
