"""Other heads of mmsegmentation with the data and recipe of ade20k_deit_base.py: FCN and SegFormer's on Swin-T, DPT on
DeiT-B, whose class tokens it reads. Another prior: model.backbone.prior=NAME.
"""

_base_ = ["ade20k_deit_base.py"]
_norm = dict(type="SyncBN", requires_grad=True)
_swin = dict(
    _delete_=True,
    type="SparsePriorSwin",
    preset="swin_tiny",
    pretrained=None,
    prior="violin",
    out_indices=[1, 2, 3, 4],
    drop_path_rate=0.3,
)
_head = dict(
    _delete_=True,
    channels=256,
    dropout_ratio=0.1,
    num_classes=150,
    norm_cfg=_norm,
    align_corners=False,
    loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=1.0),
)
_pyramid = dict(in_channels=[96, 192, 384, 768], in_index=[0, 1, 2, 3])
cells = dict(
    fcn=dict(
        model=dict(
            backbone=_swin,
            neck=None,
            decode_head=dict(
                **_head, type="FCNHead", in_channels=768, in_index=3, num_convs=2, kernel_size=3, concat_input=True
            ),
            auxiliary_head=dict(in_channels=384, in_index=2),
        )
    ),
    segformer=dict(
        model=dict(
            backbone=_swin,
            neck=None,
            decode_head=dict(**_head, **_pyramid, type="SegformerHead"),
            auxiliary_head=None,
        )
    ),
    dpt=dict(
        model=dict(
            backbone=dict(prior="violin", output_cls_token=True),
            neck=None,
            decode_head=dict(
                **_head,
                type="DPTHead",
                in_channels=[768] * 4,
                in_index=[0, 1, 2, 3],
                input_transform="multiple_select",
                embed_dims=768,
                post_process_channels=[96, 192, 384, 768],
                readout_type="project",
            ),
            auxiliary_head=None,
        )
    ),
)
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={"bias_table": dict(decay_mult=0.0), "norm": dict(decay_mult=0.0)}))
del _norm, _swin, _head, _pyramid
