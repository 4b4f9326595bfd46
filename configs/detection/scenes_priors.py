"""Four priors on the scenes, over seeds, at a budget of about a minute a run on one core: smoke.py's model,
150 steps.

python -m tasks.common.mm.scenes data/scenes
python -m tasks.detection.compare --config configs/detection/scenes_priors.py
"""

_base_ = ["smoke.py", "../mm/four_priors.py"]
steps, warmup = 150, 20
optim_wrapper = dict(optimizer=dict(lr=2e-3))
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=warmup),
    dict(type="CosineAnnealingLR", by_epoch=False, begin=warmup, end=steps, eta_min=1e-5),
]
# The last step counts; nothing is chosen on the validation scenes.
train_cfg = dict(max_iters=steps, val_interval=steps)
default_hooks = dict(checkpoint=dict(interval=50, max_keep_ckpts=1))
