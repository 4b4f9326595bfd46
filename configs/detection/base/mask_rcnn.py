"""Mask R-CNN (He et al. 2017) as mmdetection's 1x config has it, on SparsePriorViT and ViTDet's simple feature
pyramid. DeiT-B in size.
Weights of a trained classifier: model.backbone.pretrained=FOLDER.
"""

_base_ = ["../../mm/runtime.py"]
custom_imports = dict(imports=["tasks.detection"], allow_failed_imports=False)
default_scope = "mmdet"
custom_hooks = [
    dict(type="SeedSteps"),
    dict(type="OneLineProgress", metrics=["coco/bbox_mAP", "coco/segm_mAP"]),
    dict(type="StopOnSignal"),
]
num_classes = 80
strides = [4, 8, 16, 32, 64]
_boxes = dict(type="DeltaXYWHBBoxCoder", target_means=[0.0, 0.0, 0.0, 0.0])
_regions = dict(type="SingleRoIExtractor", out_channels=256, featmap_strides=strides[:4])
_nms = dict(type="nms", iou_threshold=0.7)

model = dict(
    type="MaskRCNN",
    data_preprocessor=dict(
        type="DetDataPreprocessor",
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_mask=True,
        pad_size_divisor=32,
    ),
    backbone=dict(
        type="SparsePriorViT",
        preset="deit_base",
        pretrained=None,
        image_size=224,  # the grid of the position embedding, which is interpolated to each batch's
        out_indices=[12],
        apply_layernorm=True,
        drop_path_rate=0.1,
        with_cp=True,  # 4200 tokens at 1333x800
    ),
    neck=dict(type="SimpleFeaturePyramid", in_channels=768, out_channels=256, scales=[4, 2, 1, 0.5], num_outs=5),
    rpn_head=dict(
        type="RPNHead",
        in_channels=256,
        feat_channels=256,
        anchor_generator=dict(type="AnchorGenerator", scales=[8], ratios=[0.5, 1.0, 2.0], strides=strides),
        bbox_coder=dict(**_boxes, target_stds=[1.0, 1.0, 1.0, 1.0]),
        loss_cls=dict(type="CrossEntropyLoss", use_sigmoid=True, loss_weight=1.0),
        loss_bbox=dict(type="L1Loss", loss_weight=1.0),
    ),
    roi_head=dict(
        type="StandardRoIHead",
        bbox_roi_extractor=dict(**_regions, roi_layer=dict(type="RoIAlign", output_size=7, sampling_ratio=0)),
        bbox_head=dict(
            type="Shared2FCBBoxHead",
            in_channels=256,
            fc_out_channels=1024,
            roi_feat_size=7,
            num_classes=num_classes,
            bbox_coder=dict(**_boxes, target_stds=[0.1, 0.1, 0.2, 0.2]),
            reg_class_agnostic=False,
            loss_cls=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=1.0),
            loss_bbox=dict(type="L1Loss", loss_weight=1.0),
        ),
        mask_roi_extractor=dict(**_regions, roi_layer=dict(type="RoIAlign", output_size=14, sampling_ratio=0)),
        mask_head=dict(
            type="FCNMaskHead",
            num_convs=4,
            in_channels=256,
            conv_out_channels=256,
            num_classes=num_classes,
            loss_mask=dict(type="CrossEntropyLoss", use_mask=True, loss_weight=1.0),
        ),
    ),
    train_cfg=dict(
        rpn=dict(
            assigner=dict(
                type="MaxIoUAssigner",
                pos_iou_thr=0.7,
                neg_iou_thr=0.3,
                min_pos_iou=0.3,
                match_low_quality=True,
                ignore_iof_thr=-1,
            ),
            sampler=dict(type="RandomSampler", num=256, pos_fraction=0.5, neg_pos_ub=-1, add_gt_as_proposals=False),
            allowed_border=-1,
            pos_weight=-1,
            debug=False,
        ),
        rpn_proposal=dict(nms_pre=2000, max_per_img=1000, nms=_nms, min_bbox_size=0),
        rcnn=dict(
            assigner=dict(
                type="MaxIoUAssigner",
                pos_iou_thr=0.5,
                neg_iou_thr=0.5,
                min_pos_iou=0.5,
                match_low_quality=True,
                ignore_iof_thr=-1,
            ),
            sampler=dict(type="RandomSampler", num=512, pos_fraction=0.25, neg_pos_ub=-1, add_gt_as_proposals=True),
            mask_size=28,
            pos_weight=-1,
            debug=False,
        ),
    ),
    test_cfg=dict(
        rpn=dict(nms_pre=1000, max_per_img=1000, nms=_nms, min_bbox_size=0),
        rcnn=dict(score_thr=0.05, nms=dict(type="nms", iou_threshold=0.5), max_per_img=100, mask_thr_binary=0.5),
    ),
)
del _boxes, _regions, _nms
