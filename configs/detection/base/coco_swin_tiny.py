"""Mask R-CNN with FPN on Swin-T, on COCO with the 1x schedule."""

_base_ = ["coco_1x.py"]
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
# Biases decay in mmdetection's recipe for Swin.
optim_wrapper = dict(paramwise_cfg=dict(bias_decay_mult=None, custom_keys={"bias_table": dict(decay_mult=0.0)}))
