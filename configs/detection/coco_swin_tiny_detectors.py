"""Other detectors on Swin-T and FPN, on COCO with the 1x schedule: mmdetection's RetinaNet and Cascade Mask R-CNN.

What they do not share with Mask R-CNN is as in mmdetection's configs (retinanet_r50_fpn, cascade-mask-rcnn_r50_fpn).
Weights of a trained Swin-T: model.backbone.pretrained=FOLDER; another prior: model.backbone.prior=NAME.
"""

from mmengine.config import Config

_base_ = ["base/coco_swin_tiny.py"]
_shared = Config.fromfile("{{ fileDirname }}/base/coco_swin_tiny.py").model.to_dict()
_backbone = {**_shared["backbone"], "prior": "violin"}
_rpn, _regions, _stage = (_shared["train_cfg"][name] for name in ("rpn", "rpn_proposal", "rcnn"))
_head = {
    **_shared["roi_head"]["bbox_head"],
    "reg_class_agnostic": True,
    "loss_bbox": dict(type="SmoothL1Loss", beta=1.0, loss_weight=1.0),
}


def _overlap(threshold, stage=_stage):
    both = {f"{side}_iou_thr": threshold for side in ("pos", "neg")}
    return {**stage["assigner"], **both, "min_pos_iou": threshold}


_retinanet = dict(
    _delete_=True,
    type="RetinaNet",
    data_preprocessor={**_shared["data_preprocessor"], "pad_mask": False},
    backbone=_backbone,
    neck={**_shared["neck"], "start_level": 1, "add_extra_convs": "on_input"},
    bbox_head=dict(
        type="RetinaHead",
        num_classes=_head["num_classes"],
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
        bbox_coder=_shared["rpn_head"]["bbox_coder"],
        loss_cls=dict(type="FocalLoss", use_sigmoid=True, gamma=2.0, alpha=0.25, loss_weight=1.0),
        loss_bbox=dict(type="L1Loss", loss_weight=1.0),
    ),
    train_cfg=dict(
        assigner={**_overlap(0.5), "neg_iou_thr": 0.4, "min_pos_iou": 0, "match_low_quality": True},
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
    type="CascadeRCNN",
    backbone=dict(prior="violin"),
    rpn_head=dict(loss_bbox=dict(type="SmoothL1Loss", beta=1.0 / 9.0)),
    roi_head=dict(
        type="CascadeRoIHead",
        num_stages=3,
        stage_loss_weights=[1, 0.5, 0.25],
        bbox_head=[
            {**_head, "bbox_coder": {**_head["bbox_coder"], "target_stds": [place, place, size, size]}}
            for place, size in ((0.1, 0.2), (0.05, 0.1), (0.033, 0.067))
        ],
    ),
    train_cfg=dict(
        rpn={**_rpn, "allowed_border": 0},
        rpn_proposal={**_regions, "max_per_img": 2000},
        rcnn=[
            {**_stage, "assigner": {**_overlap(threshold), "match_low_quality": False}} for threshold in (0.5, 0.6, 0.7)
        ],
    ),
)
_boxes_alone = dict(metric=["bbox"])  # RetinaNet has no masks
cells = dict(
    retinanet=dict(model=_retinanet, val_evaluator=_boxes_alone, test_evaluator=_boxes_alone),
    cascade_mask_rcnn=dict(model=_cascade),
)
del Config, _shared, _backbone, _rpn, _regions, _stage, _head, _retinanet, _cascade, _boxes_alone
