"""VIOLIN Table 8, right: Mask R-CNN on COCO with the 1x schedule, Swin-T; a cell for each prior.

The recipe is mmdetection's mask-rcnn_swin-t-p4-w7_fpn_1x. Weights of Swin-T on ImageNet, in one folder:
python -m hf_sparseprior convert swin_tiny_patch4_window7_224.pth checkpoints/swin_tiny
"""

_base_ = ["base/coco_swin_tiny.py"]
model = dict(backbone=dict(pretrained="checkpoints/swin_tiny"))
cells = dict(
    dense=dict(model=dict(backbone=dict(prior="dense"))),
    # "Freshly initialized at fine-tuning": alpha and beta as the paper starts them on trained weights, a mask near 1.
    violin=dict(model=dict(backbone=dict(prior=dict(decay=dict(name="violin", init="finetune"))))),
    fibottention=dict(model=dict(backbone=dict(prior="fibottention"))),
)
