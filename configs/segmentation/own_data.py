"""UPerNet on a folder of your own (tasks/segmentation/README.md, "Your own data"): change
what is above the line.

The classes are those of classes.txt, and heads with num_classes=None have as many. Images may have any sizes: they are
cut to squares for training.
"""

_base_ = ["../mm/runtime.py", "base/upernet.py"]
data_root = "data/own"
img_suffix = ".jpg"
steps, batch, side = 20000, 4, 512
# ---------------------------------------------------------------------------------------------------------------------
custom_imports = dict(imports=["tasks.segmentation"])
default_scope = "mmseg"
_warmup = max(1, min(1500, steps // 10))
_load = [dict(type="LoadImageFromFile", imdecode_backend="pillow"), dict(type="LoadAnnotations")]
train_pipeline = [
    dict(type="SeedAugmentation"),
    *_load,
    dict(type="RandomResize", scale=(4 * side, side), ratio_range=(0.5, 2.0), keep_ratio=True),
    dict(type="RandomCrop", crop_size=(side, side), cat_max_ratio=0.75),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PhotoMetricDistortion"),
    dict(type="PackSegInputs"),
]
test_pipeline = [
    _load[0],
    dict(type="Resize", scale=(4 * side, side), keep_ratio=True),
    _load[1],
    dict(type="PackSegInputs"),
]


def _loader(split, pipeline, size, sampler, shuffle):
    return dict(
        batch_size=size,
        num_workers=2,
        persistent_workers=True,
        worker_init_fn=dict(type="outlive_sigterm"),
        sampler=dict(type=sampler, shuffle=shuffle),
        dataset=dict(
            type="FolderSegmentation", data_root=data_root, split=split, img_suffix=img_suffix, pipeline=pipeline
        ),
    )


train_dataloader = _loader("training", train_pipeline, batch, "NumberedSampler", True)
val_dataloader = _loader("validation", test_pipeline, 1, "DefaultSampler", False)
test_dataloader = _loader("test", test_pipeline, 1, "DefaultSampler", False)
val_evaluator = dict(type="IoUMetric", iou_metrics=["mIoU"])
test_evaluator = dict(type="IoUMetric", iou_metrics=["mIoU"])
model = dict(
    data_preprocessor=dict(size=(side, side)),
    backbone=dict(prior="fibottention", pretrained=None, drop_path_rate=0.1),
    decode_head=dict(num_classes=None),
    auxiliary_head=dict(num_classes=None),
)
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=6e-5, betas=(0.9, 0.999), weight_decay=0.05),
    constructor="LearningRateDecayOptimizerConstructor",
    paramwise_cfg=dict(decay_rate=0.9),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-6, by_epoch=False, begin=0, end=_warmup),
    dict(type="PolyLR", eta_min=0.0, power=1.0, by_epoch=False, begin=_warmup, end=steps),
]
train_cfg = dict(type="IterBasedTrainLoop", max_iters=steps, val_interval=max(1, steps // 10))
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
custom_hooks = [dict(type="SeedSteps"), dict(type="OneLineProgress", metrics=["mIoU"]), dict(type="StopOnSignal")]
find_unused_parameters = True  # the last norm has no part in maps that are taken before it
del _load, _warmup
