"""ADE20K in crops of 512x512 pixels, as mmsegmentation trains on it; batches of 16 over four processes."""

data_root = "data/ade/ADEChallengeData2016"
train_pipeline = [
    dict(type="SeedAugmentation"),
    dict(type="ReadImage"),
    dict(type="ReadAnnotation", num_classes=150),
    dict(type="RandomResize", scale=(2048, 512), ratio_range=(0.5, 2.0), keep_ratio=True),
    dict(type="RandomCrop", crop_size=(512, 512), cat_max_ratio=0.75),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PhotoMetricDistortion"),
    dict(type="PackSegInputs"),
]
# The annotation is read after the image is resized: it is compared at its own size.
test_pipeline = [
    dict(type="ReadImage"),
    dict(type="Resize", scale=(2048, 512), keep_ratio=True),
    dict(type="ReadAnnotation", num_classes=150),
    dict(type="PackSegInputs"),
]
train_dataloader = dict(
    batch_size=4,
    num_workers=4,
    persistent_workers=True,
    worker_init_fn=dict(type="outlive_sigterm"),
    sampler=dict(type="NumberedSampler", shuffle=True),
    dataset=dict(
        type="ADE20KDataset",
        data_root=data_root,
        data_prefix=dict(img_path="images/training", seg_map_path="annotations/training"),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(
        type="ADE20KDataset",
        data_root=data_root,
        data_prefix=dict(img_path="images/validation", seg_map_path="annotations/validation"),
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(type="IoUMetric", iou_metrics=["mIoU"])
test_evaluator = val_evaluator
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
