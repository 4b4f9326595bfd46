"""VIOLIN Table 8, right: Mask R-CNN on COCO with the 1x schedule, Swin-T; a cell for each prior.

Weights of a trained Swin-T: model.backbone.pretrained=FOLDER.
"""

_base_ = ["base/coco_swin_tiny.py"]
cells = dict(
    dense=dict(model=dict(backbone=dict(prior="dense"))),
    # "Freshly initialized at fine-tuning": alpha and beta as the paper starts them on trained weights, a mask near 1.
    violin=dict(model=dict(backbone=dict(prior=dict(decay=dict(name="violin", init="finetune"))))),
    fibottention=dict(model=dict(backbone=dict(prior="fibottention"))),
)
