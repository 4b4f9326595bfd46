"""Detection transformers on COCO: mmdetection's DETR, DINO (the detector) and Mask2Former on Swin-T, and ViTDet on
DeiT-B, as far as mmdetection has it.

Model, optimizer, steps and augmentation of the first three are read from mmdetection's files; the backbone is ours.
ViTDet (Li et al. 2022): squares of 1024 pixels, large-scale jittering, 100 epochs, layer decay 0.7, two convolutions in
the region proposals, four in the boxes' head. Its norms of channels in these heads and its windows are not in
mmdetection; Fibottention takes the windows' place. Weights: model.backbone.pretrained=FOLDER or FILE.
"""

from importlib.util import find_spec

from mmengine.config import Config

_base_ = ["base/coco_1x.py"]
_theirs = {
    name: Config.fromfile(f"{find_spec('mmdet').submodule_search_locations[0]}/.mim/configs/{file}.py").to_dict()
    for name, file in dict(
        detr="detr/detr_r50_8xb2-150e_coco",
        dino="dino/dino-4scale_r50_8xb2-12e_coco",
        mask2former="mask2former/mask2former_r50_8xb2-lsj-50e_coco",
    ).items()
}
_read = [dict(type="SeedAugmentation"), dict(type="ReadListedImage")]


def _swin(*stages):
    return dict(
        type="SparsePriorSwin",
        preset="swin_tiny",
        prior="violin",
        out_indices=[*stages],
        drop_path_rate=0.2,
        with_cp=True,
    )


def _steps(theirs, read=_read):
    # Their first step reads; ours reads, checks and numbers what is drawn.
    return dict(dataset=dict(pipeline=[*read, *theirs["train_dataloader"]["dataset"]["pipeline"][1:]]))


def _cell(theirs, backbone, **parts):
    wrapper, schedule = {**theirs["optim_wrapper"], "_delete_": True}, theirs["param_scheduler"]
    keys = {**wrapper["paramwise_cfg"]["custom_keys"], "bias_table": dict(decay_mult=0.0)}
    wrapper["paramwise_cfg"] = {**wrapper["paramwise_cfg"], "custom_keys": keys}
    model = {**theirs["model"], "_delete_": True, "backbone": backbone}
    for part, changes in parts.items():
        model[part] = {**model[part], **changes}
    return dict(
        model=model,
        optim_wrapper=wrapper,
        train_dataloader=_steps(theirs),
        param_scheduler=schedule if isinstance(schedule, list) else [schedule],
    )


_boxes_alone = dict(val_evaluator=dict(metric=["bbox"]), test_evaluator=dict(metric=["bbox"]))
_vitdet = dict(
    model=dict(
        backbone=dict(
            image_size=1024, prior=dict(support=dict(name="fibottention", w_min=5, w_max=None)), drop_path_rate=0.1
        ),
        rpn_head=dict(num_convs=2),
        roi_head=dict(bbox_head=dict(type="Shared4Conv1FCBBoxHead")),
        data_preprocessor=dict(batch_augments=[dict(type="BatchFixedSizePad", size=(1024, 1024), pad_mask=True)]),
    ),
    train_dataloader=_steps(_theirs["mask2former"]),  # large-scale jittering
    optim_wrapper=dict(
        _delete_=True,
        type="OptimWrapper",
        optimizer=dict(type="AdamW", lr=1e-4, betas=(0.9, 0.999), weight_decay=0.1),
        constructor="LearningRateDecayOptimizerConstructor",
        paramwise_cfg=dict(decay_rate=0.7, decay_type="layer_wise", num_layers=12),
    ),
    train_cfg=dict(max_epochs=100, val_interval=10),
    param_scheduler=[
        dict(type="LinearLR", start_factor=0.001, by_epoch=False, begin=0, end=250),
        dict(type="MultiStepLR", begin=0, end=100, by_epoch=True, milestones=[88, 96], gamma=0.1),
    ],
)
cells = dict(
    detr=dict(
        **_cell(_theirs["detr"], _swin(4), neck=dict(in_channels=[768])), train_cfg=dict(max_epochs=150), **_boxes_alone
    ),
    dino=dict(**_cell(_theirs["dino"], _swin(2, 3, 4), neck=dict(in_channels=[192, 384, 768])), **_boxes_alone),
    # 50 epochs, where mmdetection counts 368750 steps of 16 images.
    mask2former=dict(
        **_cell(_theirs["mask2former"], _swin(1, 2, 3, 4), panoptic_head=dict(in_channels=[96, 192, 384, 768])),
        train_cfg=dict(max_epochs=50, val_interval=5),
    ),
    vitdet=_vitdet,
)
del Config, find_spec, _theirs, _read, _boxes_alone, _vitdet
