"""configs/segmentation/smoke.py made small enough for tests, for the images of shapes.py."""

SMALL = {
    "image_size": 32, "patch_size": 8, "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
    "intermediate_size": 48,
}  # fmt: skip
OVERRIDES = [
    *(f"model.backbone.{key}={value}" for key, value in SMALL.items()),
    "model.backbone.prior=fibottention+violin", "model.backbone.drop_path_rate=0.2",
    "model.backbone.stem=patch", "model.backbone.stem_channels=64",
    "model.data_preprocessor.size=(32,32)", "model.neck.embed_dim=24", "model.decode_head.channels=8",
    "model.decode_head.in_channels=[24,24,24,24]", "model.decode_head.num_classes=3",
    "train_dataloader.batch_size=3", "test_dataloader.batch_size=3", "val_dataloader.batch_size=3",
    "train_cfg.max_iters=8", "train_cfg.val_interval=4", "default_hooks.checkpoint.interval=3",
    *(f"{part}_dataloader.dataset.pipeline.{place}.num_classes=3" for part, place in
      (("train", 2), ("val", 1), ("test", 1))),
]  # fmt: skip
