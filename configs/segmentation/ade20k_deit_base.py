"""VIOLIN Table 8 (left): UPerNet, DeiT-B of ImageNet, ADE20K, 80k steps with batches of 16; a cell for each prior.

The paper names mmsegmentation, DeiT-B, the steps and the batch, and its baseline, 45.24, is that of mmsegmentation's
vit_deit-b16_upernet_8xb2-80k, whose maps all have the size of the patch grid: no neck rescales them. The rest is that
recipe. Four processes of 4 images make the batch. The weights, in one folder:
python -m hf_sparseprior convert deit_base_patch16_224.pth checkpoints/deit_base
"""

_base_ = ["../mm/runtime.py", "base/ade20k.py", "base/upernet.py"]
custom_imports = dict(imports=["tasks.segmentation"])
default_scope = "mmseg"

model = dict(backbone=dict(pretrained="checkpoints/deit_base", drop_path_rate=0.1), neck=None)
cells = dict(
    dense=dict(model=dict(backbone=dict(prior="dense"))),
    # On the weights of the dense model; alpha and beta as the paper starts them there: a mask near 1.
    violin=dict(model=dict(backbone=dict(prior=dict(decay=dict(name="violin", init="finetune"))))),
    # Its offsets laid out on the 32x32 grid of the crops; in no paper's table.
    fibottention=dict(model=dict(backbone=dict(prior="fibottention"))),
)
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=6e-5, betas=(0.9, 0.999), weight_decay=0.01),
    paramwise_cfg=dict(
        custom_keys={
            "position_embeddings": dict(decay_mult=0.0),
            "class_token": dict(decay_mult=0.0),
            "layernorm": dict(decay_mult=0.0),
            "decay_bias": dict(decay_mult=0.0),
        }
    ),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-6, by_epoch=False, begin=0, end=1500),
    dict(type="PolyLR", eta_min=0.0, power=1.0, by_epoch=False, begin=1500, end=80000),
]
train_cfg = dict(type="IterBasedTrainLoop", max_iters=80000, val_interval=8000)
custom_hooks = [dict(type="SeedSteps"), dict(type="OneLineProgress", metrics=["mIoU"]), dict(type="StopOnSignal")]
# The last norm has no part in maps that are taken before it.
find_unused_parameters = True
