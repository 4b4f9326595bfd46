"""Mask R-CNN on a folder of your own (tasks/detection/README.md, "Your own data"): change what is above the line.

`classes` are categories of the annotation files, in the order of these; heads with num_classes=None have as many.
Images may have any sizes: the shorter side becomes `side` pixels, the longer one at most 5/3 of it.
"""

_base_ = ["base/mask_rcnn.py"]
data_root = "data/own"
classes = ("cat", "dog")
masks = True  # False: boxes alone, and annotations need no segmentation
steps, batch, side = 20000, 2, 800
max_per_img = 100  # most objects that are found in an image
# ---------------------------------------------------------------------------------------------------------------------
_warmup = max(1, min(1000, steps // 10))
_load = [
    dict(type="LoadImageFromFile", imdecode_backend="pillow"),
    dict(type="LoadAnnotations", with_bbox=True, with_mask=masks),
    dict(type="Resize", scale=(side * 5 // 3, side), keep_ratio=True),
]
_meta = ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")
train_pipeline = [dict(type="SeedAugmentation"), *_load, dict(type="RandomFlip", prob=0.5), dict(type="PackDetInputs")]
test_pipeline = [_load[0], _load[2], _load[1], dict(type="PackDetInputs", meta_keys=_meta)]


def _loader(split, pipeline, size, sampler, training):
    return dict(
        batch_size=size,
        num_workers=2,
        persistent_workers=True,
        worker_init_fn=dict(type="outlive_sigterm"),
        drop_last=False,
        sampler=dict(type=sampler, shuffle=training),
        dataset=dict(
            type="CheckedCocoDataset",
            metainfo=dict(classes=classes),
            data_root=data_root,
            ann_file=f"annotations/instances_{split}.json",
            data_prefix=dict(img=f"images/{split}/"),
            filter_cfg=dict(filter_empty_gt=True),  # acts in training alone
            test_mode=not training,
            pipeline=pipeline,
        ),
    )


train_dataloader = _loader("training", train_pipeline, batch, "NumberedSampler", True)
val_dataloader = _loader("validation", test_pipeline, 1, "DefaultSampler", False)
test_dataloader = _loader("test", test_pipeline, 1, "DefaultSampler", False)
val_evaluator = dict(type="QuietCocoMetric", metric=["bbox", "segm"] if masks else ["bbox"])
test_evaluator = val_evaluator
model = dict(
    backbone=dict(prior="fibottention"),
    roi_head=dict(
        bbox_head=dict(num_classes=None),
        **dict(mask_head=dict(num_classes=None)) if masks else dict(mask_roi_extractor=None, mask_head=None),
    ),
    test_cfg=dict(rcnn=dict(max_per_img=max_per_img)),
)
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=1e-4, betas=(0.9, 0.999), weight_decay=0.05),
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        custom_keys={name: dict(decay_mult=0.0) for name in ("position_embeddings", "class_token")},
    ),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.001, by_epoch=False, begin=0, end=_warmup),
    dict(
        type="MultiStepLR", by_epoch=False, begin=0, end=steps, milestones=[2 * steps // 3, 11 * steps // 12], gamma=0.1
    ),
]
train_cfg = dict(type="IterBasedTrainLoop", max_iters=steps, val_interval=max(1, steps // 10))
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
del _load, _meta, _warmup
