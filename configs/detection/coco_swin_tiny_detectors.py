"""Other detectors on Swin-T and FPN, on COCO with the 1x schedule: mmdetection's RetinaNet and Cascade Mask R-CNN.

Heads are as in mmdetection's configs (retinanet_r50_fpn, cascade-mask-rcnn_r50_fpn). Weights of a trained Swin-T:
model.backbone.pretrained=FOLDER; another prior: model.backbone.prior=NAME.
"""

_base_ = ["base/coco_1x.py"]
num_classes = 80
_images = dict(
    type="DetDataPreprocessor",
    mean=[123.675, 116.28, 103.53],
    std=[58.395, 57.12, 57.375],
    bgr_to_rgb=True,
    pad_mask=True,
    pad_size_divisor=32,
)
_backbone = dict(
    type="SparsePriorSwin",
    preset="swin_tiny",
    pretrained=None,
    prior="violin",
    out_indices=[1, 2, 3, 4],
    drop_path_rate=0.2,
)
_channels = [96, 192, 384, 768]
_strides = [4, 8, 16, 32, 64]
_boxes = dict(type="DeltaXYWHBBoxCoder", target_means=[0.0, 0.0, 0.0, 0.0])
_regions = dict(type="SingleRoIExtractor", out_channels=256, featmap_strides=_strides[:4])
_nms = dict(type="nms", iou_threshold=0.7)


def _assigner(threshold, least, low_quality=False):
    return dict(
        type="MaxIoUAssigner",
        pos_iou_thr=threshold,
        neg_iou_thr=least,
        min_pos_iou=0.3 if low_quality else threshold,
        match_low_quality=low_quality,
        ignore_iof_thr=-1,
    )


def _sampler(count, share, with_truth):
    return dict(type="RandomSampler", num=count, pos_fraction=share, neg_pos_ub=-1, add_gt_as_proposals=with_truth)


def _box_head(spread, boxes=_boxes):
    return dict(
        type="Shared2FCBBoxHead",
        in_channels=256,
        fc_out_channels=1024,
        roi_feat_size=7,
        num_classes=num_classes,
        bbox_coder=dict(**boxes, target_stds=spread),
        reg_class_agnostic=True,
        loss_cls=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=1.0),
        loss_bbox=dict(type="SmoothL1Loss", beta=1.0, loss_weight=1.0),
    )


def _stage(threshold):
    return dict(
        assigner=_assigner(threshold, threshold),
        sampler=_sampler(512, 0.25, True),
        mask_size=28,
        pos_weight=-1,
        debug=False,
    )


_retinanet = dict(
    _delete_=True,
    type="RetinaNet",
    data_preprocessor={**_images, "pad_mask": False},
    backbone=_backbone,
    neck=dict(
        type="FPN",
        in_channels=_channels,
        out_channels=256,
        start_level=1,
        add_extra_convs="on_input",
        num_outs=5,
    ),
    bbox_head=dict(
        type="RetinaHead",
        num_classes=num_classes,
        in_channels=256,
        stacked_convs=4,
        feat_channels=256,
        anchor_generator=dict(
            type="AnchorGenerator",
            octave_base_scale=4,
            scales_per_octave=3,
            ratios=[0.5, 1.0, 2.0],
            strides=[8, 16, 32, 64, 128],
        ),
        bbox_coder=dict(**_boxes, target_stds=[1.0, 1.0, 1.0, 1.0]),
        loss_cls=dict(type="FocalLoss", use_sigmoid=True, gamma=2.0, alpha=0.25, loss_weight=1.0),
        loss_bbox=dict(type="L1Loss", loss_weight=1.0),
    ),
    train_cfg=dict(
        assigner={**_assigner(0.5, 0.4), "min_pos_iou": 0, "match_low_quality": True},
        sampler=dict(type="PseudoSampler"),
        allowed_border=-1,
        pos_weight=-1,
        debug=False,
    ),
    test_cfg=dict(
        nms_pre=1000, min_bbox_size=0, score_thr=0.05, nms=dict(type="nms", iou_threshold=0.5), max_per_img=100
    ),
)
_cascade = dict(
    _delete_=True,
    type="CascadeRCNN",
    data_preprocessor=_images,
    backbone=_backbone,
    neck=dict(type="FPN", in_channels=_channels, out_channels=256, num_outs=5),
    rpn_head=dict(
        type="RPNHead",
        in_channels=256,
        feat_channels=256,
        anchor_generator=dict(type="AnchorGenerator", scales=[8], ratios=[0.5, 1.0, 2.0], strides=_strides),
        bbox_coder=dict(**_boxes, target_stds=[1.0, 1.0, 1.0, 1.0]),
        loss_cls=dict(type="CrossEntropyLoss", use_sigmoid=True, loss_weight=1.0),
        loss_bbox=dict(type="SmoothL1Loss", beta=1.0 / 9.0, loss_weight=1.0),
    ),
    roi_head=dict(
        type="CascadeRoIHead",
        num_stages=3,
        stage_loss_weights=[1, 0.5, 0.25],
        bbox_roi_extractor=dict(**_regions, roi_layer=dict(type="RoIAlign", output_size=7, sampling_ratio=0)),
        bbox_head=[
            _box_head(spread) for spread in ([0.1, 0.1, 0.2, 0.2], [0.05, 0.05, 0.1, 0.1], [0.033, 0.033, 0.067, 0.067])
        ],
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
            assigner=_assigner(0.7, 0.3, True),
            sampler=_sampler(256, 0.5, False),
            allowed_border=0,
            pos_weight=-1,
            debug=False,
        ),
        rpn_proposal=dict(nms_pre=2000, max_per_img=2000, nms=_nms, min_bbox_size=0),
        rcnn=[_stage(threshold) for threshold in (0.5, 0.6, 0.7)],
    ),
    test_cfg=dict(
        rpn=dict(nms_pre=1000, max_per_img=1000, nms=_nms, min_bbox_size=0),
        rcnn=dict(score_thr=0.05, nms=dict(type="nms", iou_threshold=0.5), max_per_img=100, mask_thr_binary=0.5),
    ),
)
_boxes_alone = dict(metric=["bbox"])  # RetinaNet has no masks
cells = dict(
    retinanet=dict(model=_retinanet, val_evaluator=_boxes_alone, test_evaluator=_boxes_alone),
    cascade_mask_rcnn=dict(model=_cascade),
)
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={"bias_table": dict(decay_mult=0.0)}))
del _images, _backbone, _channels, _strides, _boxes, _regions, _nms, _retinanet, _cascade, _boxes_alone
