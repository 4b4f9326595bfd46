"""What every run of segmentation and detection has: draws that repeat, one line of progress, SIGTERM saves."""

default_hooks = dict(
    runtime_info=dict(type="RuntimeInfoHook"),
    timer=dict(type="IterTimerHook"),
    logger=dict(type="LoggerHook", interval=50, log_metric_by_epoch=False),
    param_scheduler=dict(type="ParamSchedulerHook"),
    checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=2000, max_keep_ckpts=2),
    sampler_seed=dict(type="DistSamplerSeedHook"),
)
custom_hooks = [dict(type="SeedSteps"), dict(type="OneLineProgress"), dict(type="StopOnSignal")]
env_cfg = dict(
    cudnn_benchmark=False,
    mp_cfg=dict(mp_start_method="fork", opencv_num_threads=0),
    dist_cfg=dict(backend="nccl"),
)
log_processor = dict(by_epoch=False)
log_level = "INFO"
randomness = dict(seed=0)
