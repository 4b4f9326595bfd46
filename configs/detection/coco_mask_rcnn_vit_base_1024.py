"""Mask R-CNN on COCO at 1024 px with a plain ViT, as in ViTDet: squares of 4096 patches; a cell for each prior.

Fibottention's offsets go up to a third of the patches here (w_max 1365), as its default has it for a larger grid.
"""

_base_ = ["coco_mask_rcnn_vit_base.py"]
_scale = dict(scale=(1024, 1024), keep_ratio=True)
_load = [
    dict(type="ReadListedImage"),
    dict(type="LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="Resize", **_scale),
]
_meta = ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")
train_pipeline = [dict(type="SeedAugmentation"), *_load, dict(type="RandomFlip", prob=0.5), dict(type="PackDetInputs")]
test_pipeline = [_load[0], _load[2], _load[1], dict(type="PackDetInputs", meta_keys=_meta)]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
cells = dict(
    dense=dict(model=dict(backbone=dict(prior="dense"))),
    fibottention=dict(
        model=dict(backbone=dict(prior=dict(_delete_=True, support=dict(name="fibottention", w_min=5, w_max=None))))
    ),
)
model = dict(
    data_preprocessor=dict(batch_augments=[dict(type="BatchFixedSizePad", size=(1024, 1024), pad_mask=True)]),
    backbone=dict(image_size=1024),
)
del _load, _meta, _scale
