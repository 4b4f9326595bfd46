"""Scenes with exact masks (tasks.common.mm.scenes), 128x128 pixels: the background and eight classes."""

data_root = "data/scenes"
num_classes = 9
train_pipeline = [
    dict(type="SeedAugmentation"),
    dict(type="ReadImage"),
    dict(type="ReadAnnotation", num_classes=num_classes),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PhotoMetricDistortion"),
    dict(type="PackSegInputs"),
]
test_pipeline = [
    dict(type="ReadImage"),
    dict(type="ReadAnnotation", num_classes=num_classes),
    dict(type="PackSegInputs"),
]
train_dataloader = dict(
    batch_size=8,
    num_workers=0,
    sampler=dict(type="NumberedSampler", shuffle=True),
    dataset=dict(type="FolderSegmentation", data_root=data_root, split="training", pipeline=train_pipeline),
)
val_dataloader = dict(
    batch_size=8,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="FolderSegmentation", data_root=data_root, split="validation", pipeline=test_pipeline),
)
test_dataloader = dict(
    batch_size=8,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="FolderSegmentation", data_root=data_root, split="test", pipeline=test_pipeline),
)
val_evaluator = dict(type="IoUMetric", iou_metrics=["mIoU"])
test_evaluator = dict(type="IoUMetric", iou_metrics=["mIoU"])
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
