"""UPerNet (Xiao et al. 2018) on the rescaled maps of a plain ViT, with an auxiliary head, as in mmsegmentation."""

norm = dict(type="SyncBN", requires_grad=True)
loss = dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=1.0)
model = dict(
    type="EncoderDecoder",
    data_preprocessor=dict(
        type="SegDataPreProcessor",
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_val=0,
        seg_pad_val=255,
        size=(512, 512),
        test_cfg=dict(size_divisor=16),
    ),
    backbone=dict(type="SparsePriorViT", preset="deit_base", out_indices=[3, 6, 9, 12], apply_layernorm=False),
    neck=dict(type="Feature2Pyramid", embed_dim=768, rescales=[4, 2, 1, 0.5], norm_cfg=norm),
    decode_head=dict(
        type="UPerHead",
        in_channels=[768, 768, 768, 768],
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2, 3, 6),
        channels=512,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg=norm,
        align_corners=False,
        loss_decode=loss,
    ),
    auxiliary_head=dict(
        type="FCNHead",
        in_channels=768,
        in_index=3,
        channels=256,
        num_convs=1,
        concat_input=False,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg=norm,
        align_corners=False,
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=0.4),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode="whole"),
)
