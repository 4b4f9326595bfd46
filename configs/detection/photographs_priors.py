"""Four priors on photographs with pseudo-labels, over seeds: smoke.py's model, 150 steps, about a minute a run.

python -m tasks.common.mm.photographs data/photographs
python -m tasks.detection.compare --config configs/detection/photographs_priors.py
"""

_base_ = ["scenes_priors.py"]
data_root = "data/photographs"
classes = ("coin", "nucleus", "galaxy")
size = 128
_load = [
    dict(type="ReadListedImage"),
    dict(type="LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="Resize", scale=(size, size), keep_ratio=True),
]
# None of these photographs has an upper side.
_flips = [dict(type="RandomFlip", prob=0.5, direction=direction) for direction in ("horizontal", "vertical")]
train_pipeline = [dict(type="SeedAugmentation"), *_load, *_flips, dict(type="PackDetInputs")]


def _dataset(**changes):
    return dict(dataset=dict(data_root=data_root, metainfo=dict(classes=classes), **changes))


train_dataloader = _dataset(pipeline=train_pipeline)
val_dataloader = _dataset()
test_dataloader = _dataset()
model = dict(
    roi_head=dict(bbox_head=dict(num_classes=len(classes)), mask_head=dict(num_classes=len(classes))),
    test_cfg=dict(rcnn=dict(max_per_img=50)),  # nuclei are many
)
del _load, _flips
