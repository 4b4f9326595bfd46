"""Mask R-CNN small enough for two cores, on scenes of 128 pixels with patches of 8: the backbone's map has stride 8. It
learns from nothing in minutes, which is why it has LV-ViT's convolution stem.

    python -m tasks.common.mm.scenes data/scenes
    python -m tasks.detection.train --config configs/detection/smoke.py
"""

_base_ = ["base/mask_rcnn.py"]
data_root = "data/scenes/"
classes = ("zero", "one", "four", "seven", "top", "trouser", "shoe", "bag")
size, channels = 128, 64
strides = [4, 8, 16, 32]
steps = 1000
regions = dict(out_channels=channels, featmap_strides=strides[:3], finest_scale=28)

model = dict(
    data_preprocessor=dict(pad_size_divisor=8),
    backbone=dict(
        preset=None,
        prior="fibottention+violin",
        image_size=size,
        patch_size=8,
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=192,
        stem="convolution",
        stem_channels=16,
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
        out_indices=[4],
        drop_path_rate=0.0,
        with_cp=False,
    ),
    neck=dict(in_channels=96, out_channels=channels, scales=[2, 1, 0.5], num_outs=4),
    rpn_head=dict(in_channels=channels, feat_channels=channels, anchor_generator=dict(scales=[4], strides=strides)),
    # Boxes and masks are learned for all classes together: the scenes are few.
    roi_head=dict(
        bbox_roi_extractor=dict(**regions, roi_layer=dict(sampling_ratio=1)),
        bbox_head=dict(in_channels=channels, fc_out_channels=128, num_classes=len(classes), reg_class_agnostic=True),
        mask_roi_extractor=dict(**regions, roi_layer=dict(sampling_ratio=1)),
        mask_head=dict(
            num_convs=2, in_channels=channels, conv_out_channels=channels, num_classes=len(classes), class_agnostic=True
        ),
    ),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=64)),
        rpn_proposal=dict(nms_pre=200, max_per_img=100),
        rcnn=dict(sampler=dict(num=32, pos_fraction=0.5)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=200, max_per_img=100), rcnn=dict(max_per_img=20)),
)

_load = [
    dict(type="ReadListedImage"),
    dict(type="LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="Resize", scale=(size, size), keep_ratio=True),  # scenes of another size, and mm needs a scale factor
]
_meta = ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")
# Not mirrored: a mirrored digit is none.
train_pipeline = [*_load, dict(type="PackDetInputs")]
test_pipeline = [_load[0], _load[2], _load[1], dict(type="PackDetInputs", meta_keys=_meta)]


def _split(name, pipeline, test_mode):
    return dict(
        type="CheckedCocoDataset",
        metainfo=dict(classes=classes),
        data_root=data_root,
        ann_file=f"annotations/instances_{name}.json",
        data_prefix=dict(img=f"images/{name}/"),
        test_mode=test_mode,
        pipeline=pipeline,
    )


train_dataloader = dict(
    batch_size=8,
    num_workers=0,
    sampler=dict(type="NumberedSampler", shuffle=True),
    dataset=_split("training", train_pipeline, False),
)
val_dataloader = dict(
    batch_size=8,
    num_workers=0,
    drop_last=False,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=_split("validation", test_pipeline, True),
)
test_dataloader = dict(**{**val_dataloader, "dataset": _split("test", test_pipeline, True)})
val_evaluator = dict(type="QuietCocoMetric", metric=["bbox", "segm"])  # on the annotations of the data set
test_evaluator = val_evaluator

train_cfg = dict(type="IterBasedTrainLoop", max_iters=steps, val_interval=steps)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=100),
    dict(type="CosineAnnealingLR", by_epoch=False, begin=100, end=steps, eta_min=1e-5),
]
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=1e-3, betas=(0.9, 0.999), weight_decay=0.05),
    clip_grad=dict(max_norm=1.0),
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        custom_keys={name: dict(decay_mult=0.0) for name in ("position_embeddings", "class_token", "decay_bias")},
    ),
)
default_hooks = dict(checkpoint=dict(interval=100))
del _load, _meta, regions
