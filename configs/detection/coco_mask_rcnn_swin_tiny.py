"""VIOLIN Table 8, right: Mask R-CNN on COCO with the 1x schedule, Swin-T; a cell for each prior.

Weights of a trained Swin-T: model.backbone.pretrained=FOLDER.
"""

_base_ = ["base/coco_1x.py"]
cells = dict(
    dense=dict(model=dict(backbone=dict(prior="dense"))),
    # "Freshly initialized at fine-tuning": alpha and beta as the paper starts them on trained weights, a mask near 1.
    violin=dict(model=dict(backbone=dict(prior=dict(decay=dict(name="violin", init="finetune"))))),
    fibottention=dict(model=dict(backbone=dict(prior="fibottention"))),
)
model = dict(
    backbone=dict(
        _delete_=True,
        type="SparsePriorSwin",
        preset="swin_tiny",
        pretrained=None,
        out_indices=[1, 2, 3, 4],
        drop_path_rate=0.2,
    ),
    neck=dict(_delete_=True, type="FPN", in_channels=[96, 192, 384, 768], out_channels=256, num_outs=5),
)
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={"bias_table": dict(decay_mult=0.0)}))
