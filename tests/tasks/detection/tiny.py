"""configs/detection/smoke.py made small enough for tests, for the images of shapes.py."""

from tests.tasks.common.mm.shapes import CATEGORIES, PARTS

CLASSES = list(CATEGORIES)
SMALL = {
    "image_size": 32, "patch_size": 8, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 48,
}  # fmt: skip
OVERRIDES = [
    *(f"model.backbone.{key}={value}" for key, value in {**SMALL, "stem_channels": 4, "drop_path_rate": 0.2}.items()),
    "model.backbone.out_indices=[2]", "model.neck.in_channels=24",
    "model.roi_head.bbox_head.num_classes=2", "model.roi_head.mask_head.num_classes=2",
    "train_dataloader.batch_size=2", "test_dataloader.batch_size=3", "val_dataloader.batch_size=3",
    "train_cfg.max_iters=6", "train_cfg.val_interval=6", "default_hooks.checkpoint.interval=3",
    *(f"{part}_dataloader.dataset.metainfo.classes={CLASSES}".replace(" ", "") for part in PARTS),
]  # fmt: skip
