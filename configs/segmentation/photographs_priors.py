"""Four priors on photographs with pseudo-labels, over seeds: smoke.py's model, 130 steps, under a minute a run.

python -m tasks.common.mm.photographs data/photographs
python -m tasks.segmentation.compare --config configs/segmentation/photographs_priors.py
"""

_base_ = ["scenes_priors.py"]
data_root = "data/photographs"
num_classes = 6
steps, warmup = 130, 15
train_pipeline = [
    dict(type="SeedAugmentation"),
    dict(type="ReadImage"),
    dict(type="ReadAnnotation"),
    # None of these photographs has an upper side.
    dict(type="RandomFlip", prob=0.5, direction="horizontal"),
    dict(type="RandomFlip", prob=0.5, direction="vertical"),
    dict(type="PackSegInputs"),
]
test_pipeline = [dict(type="ReadImage"), dict(type="ReadAnnotation"), dict(type="PackSegInputs")]
train_dataloader = dict(dataset=dict(data_root=data_root, pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(data_root=data_root, pipeline=test_pipeline))
test_dataloader = dict(dataset=dict(data_root=data_root, pipeline=test_pipeline))
model = dict(decode_head=dict(num_classes=num_classes))
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=warmup),
    dict(type="PolyLR", eta_min=0.0, power=1.0, by_epoch=False, begin=warmup, end=steps),
]
train_cfg = dict(max_iters=steps, val_interval=steps)
