"""UPerNet with a small ViT on scenes: learns in minutes on two cores.

python -m tasks.common.mm.scenes data/scenes
python -m tasks.segmentation.train --config configs/segmentation/smoke.py
"""

_base_ = ["../mm/runtime.py", "base/scenes.py"]
custom_imports = dict(imports=["tasks.segmentation"])
default_scope = "mmseg"
custom_hooks = [dict(type="SeedSteps"), dict(type="OneLineProgress", metrics=["mIoU"]), dict(type="StopOnSignal")]

steps, width, channels = 1500, 96, 48
norm = dict(type="BN", requires_grad=True)
model = dict(
    type="EncoderDecoder",
    data_preprocessor=dict(
        type="SegDataPreProcessor",
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_val=0,
        seg_pad_val=255,
        size=(128, 128),
        test_cfg=dict(size_divisor=8),
    ),
    backbone=dict(
        type="SparsePriorViT",
        prior="fibottention+violin",
        image_size=128,
        patch_size=8,
        hidden_size=width,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=2 * width,
        stem="convolution",
        stem_channels=16,
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
        out_indices=[1, 2, 3, 4],
    ),
    # Patches of 8 pixels: x2 is stride 4, where UPerNet's finest maps usually lie.
    neck=dict(type="Feature2Pyramid", embed_dim=width, rescales=[2, 1, 0.5, 0.25], norm_cfg=norm),
    decode_head=dict(
        type="UPerHead",
        in_channels=[width] * 4,
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2, 3, 6),
        channels=channels,
        dropout_ratio=0.1,
        num_classes=9,
        norm_cfg=norm,
        align_corners=False,
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=1.0, avg_non_ignore=True),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode="whole"),
)

optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=1e-3, betas=(0.9, 0.999), weight_decay=0.05),
    clip_grad=dict(max_norm=1.0),
    # UPerNet's last layer has few channels and starts near zero; at the others' rate it takes most of the run.
    paramwise_cfg=dict(
        custom_keys={
            "neck": dict(lr_mult=3),
            "decode_head": dict(lr_mult=3),
            "decode_head.conv_seg": dict(lr_mult=30),
            "position_embeddings": dict(decay_mult=0.0),
            "class_token": dict(decay_mult=0.0),
            "layernorm": dict(decay_mult=0.0),
            "decay_bias": dict(decay_mult=0.0),
        }
    ),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=100),
    dict(type="PolyLR", eta_min=0.0, power=1.0, by_epoch=False, begin=100, end=steps),
]
train_cfg = dict(type="IterBasedTrainLoop", max_iters=steps, val_interval=500)
default_hooks = dict(checkpoint=dict(interval=250))
