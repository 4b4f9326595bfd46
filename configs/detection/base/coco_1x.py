"""COCO 2017 in its usual layout below data/coco: annotations/instances_{train,val}2017.json, train2017/, val2017/.
The test annotations are not public: what is called test here is val2017.

The 1x schedule: 12 epochs of batches of 16, a tenth of the learning rate after 8 and 11. AdamW as mmdetection's Swin
configs have it, which VIOLIN's detection follows (batch 16, 1x; the paper does not name the rest).
"""

_base_ = ["mask_rcnn.py"]
data_root = "data/coco/"
_load = [
    dict(type="ReadListedImage"),
    dict(type="LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="Resize", scale=(1333, 800), keep_ratio=True),
]
_meta = ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")
train_pipeline = [dict(type="SeedAugmentation"), *_load, dict(type="RandomFlip", prob=0.5), dict(type="PackDetInputs")]
# Annotations are loaded after resizing: what is drawn and measured is of the original size.
test_pipeline = [_load[0], _load[2], _load[1], dict(type="PackDetInputs", meta_keys=_meta)]
train_dataloader = dict(
    batch_size=2,  # on each of 8 GPUs
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type="NumberedEpochSampler", shuffle=True),
    batch_sampler=dict(type="AspectRatioBatchSampler"),
    dataset=dict(
        type="CheckedCocoDataset",
        data_root=data_root,
        ann_file="annotations/instances_train2017.json",
        data_prefix=dict(img="train2017/"),
        filter_cfg=dict(filter_empty_gt=True, min_size=32),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=2,
    persistent_workers=True,
    drop_last=False,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(
        type="CheckedCocoDataset",
        data_root=data_root,
        ann_file="annotations/instances_val2017.json",
        data_prefix=dict(img="val2017/"),
        test_mode=True,
        pipeline=test_pipeline,
    ),
)
val_evaluator = dict(type="QuietCocoMetric", metric=["bbox", "segm"])  # on the annotations of the data set
test_dataloader = val_dataloader
test_evaluator = val_evaluator
del _load, _meta

train_cfg = dict(type="EpochBasedTrainLoop", max_epochs=12, val_interval=1)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
param_scheduler = [
    dict(type="LinearLR", start_factor=0.001, by_epoch=False, begin=0, end=1000),
    dict(type="MultiStepLR", begin=0, end=12, by_epoch=True, milestones=[8, 11], gamma=0.1),
]
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=1e-4, betas=(0.9, 0.999), weight_decay=0.05),
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        custom_keys={
            name: dict(decay_mult=0.0)
            for name in ("position_embeddings", "class_token", "distillation_token", "register_tokens", "decay_bias")
        },
    ),
)
auto_scale_lr = dict(enable=False, base_batch_size=16)
default_hooks = dict(
    logger=dict(type="LoggerHook", log_metric_by_epoch=True),
    checkpoint=dict(type="CheckpointHook", by_epoch=True, interval=1),
)
log_processor = dict(by_epoch=True)
env_cfg = dict(dist_cfg=dict(backend="nccl"))
