"""Ours: UPerNet on Swin-T with the data, steps and batch of VIOLIN Table 8 (left); a cell for each prior.

Weights of a trained Swin-T: model.backbone.pretrained=FOLDER. Heads and stochastic depth are mmsegmentation's for it.
"""

_base_ = ["ade20k_deit_base.py"]
cells = dict(
    dense=dict(model=dict(backbone=dict(prior="dense"))),
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
        drop_path_rate=0.3,
    ),
    neck=None,  # Swin has a pyramid of its own
    decode_head=dict(in_channels=[96, 192, 384, 768]),
    auxiliary_head=dict(in_channels=384, in_index=2),
)
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={"bias_table": dict(decay_mult=0.0), "norm": dict(decay_mult=0.0)}))
