"""Other heads of mmsegmentation with the data and recipe of ade20k_deit_base.py: FCN and SegFormer's on Swin-T, DPT on
DeiT-B, whose class tokens it reads. SETR (PUP) on DeiT-B and Mask2Former on Swin-T have heads, optimizer and steps of
mmsegmentation's own files. Another prior: model.backbone.prior=NAME.
"""

from importlib.util import find_spec

from mmengine.config import Config

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
_theirs = {
    name: Config.fromfile(f"{find_spec('mmseg').submodule_search_locations[0]}/.mim/configs/{name}.py").to_dict()
    for name in (
        "setr/setr_vit-l_pup_8xb2-160k_ade20k-512x512",
        "mask2former/mask2former_r50_8xb2-160k_ade20k-512x512",
    )
}
_setr, _mask2former = _theirs.values()


def _recipe(theirs, **undecayed):
    optimizer = {**theirs["optim_wrapper"], "_delete_": True}
    keys = {**optimizer["paramwise_cfg"]["custom_keys"], **undecayed}
    optimizer["paramwise_cfg"] = {**optimizer["paramwise_cfg"], "custom_keys": keys}
    schedule = {name: theirs[name] for name in ("param_scheduler", "train_cfg")}
    return {**schedule, "optim_wrapper": optimizer}


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
    setr=dict(
        **_recipe(_setr),
        model=dict(
            backbone=dict(prior="violin"),
            neck=None,
            decode_head={**_setr["model"]["decode_head"], "_delete_": True, "in_channels": 768},
            auxiliary_head=[{**head, "in_channels": 768} for head in _setr["model"]["auxiliary_head"]],
        ),
    ),
    mask2former=dict(
        **_recipe(_mask2former, bias_table=dict(decay_mult=0.0)),
        model=dict(
            backbone=_swin,
            neck=None,
            decode_head={
                **_mask2former["model"]["decode_head"],
                "_delete_": True,
                "in_channels": _pyramid["in_channels"],
            },
            auxiliary_head=None,
            data_preprocessor=dict(test_cfg=dict(size_divisor=32)),
        ),
    ),
)
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={"bias_table": dict(decay_mult=0.0), "norm": dict(decay_mult=0.0)}))
del Config, find_spec, _norm, _swin, _head, _pyramid, _theirs, _setr, _mask2former
