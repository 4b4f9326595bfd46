"""A configuration of tasks.heads that trains in seconds."""

DETR = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 6,
}  # fmt: skip
RT_DETR = {**DETR, "encoder_hidden_dim": 32, "decoder_in_channels": [32, 32, 32], "num_denoising": 4}
HEAD_OPTIONS = {
    "upernet": {"hidden_size": 32, "auxiliary_channels": 8},
    "mask2former": {
        "feature_size": 64, "mask_feature_size": 64, "hidden_dim": 64, "encoder_feedforward_dim": 32,
        "dim_feedforward": 32, "encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "num_queries": 6,
        "train_num_points": 64,
    },
    "maskformer": {
        "fpn_feature_size": 64, "mask_feature_size": 64, "decoder_config": {"model_type": "detr", **DETR},
    },
    "detr": DETR, "conditional_detr": DETR, "deformable_detr": {**DETR, "d_model": 64},
    "dab_detr": {**{key: value for key, value in DETR.items() if key != "d_model"}, "hidden_size": 32},
    "rt_detr": RT_DETR, "rt_detr_v2": RT_DETR, "d_fine": RT_DETR,
}  # fmt: skip


def tiny_config(shapes, head, **trainer):
    """Sections of a run on `write_shapes`' folder; the model drops paths, so that the order of all draws matters."""
    return {
        "data": {"path": str(shapes), "horizontal_flip": 0.5},
        "model": {
            "prior": "fibottention+violin", "image_size": 32, "patch_size": 4, "hidden_size": 24,
            "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 48, "drop_path_rate": 0.1,
        },
        "head": {"name": head, **HEAD_OPTIONS[head]},
        "trainer": {
            "per_device_train_batch_size": 7, "learning_rate": 3e-3, "seed": 3, "use_cpu": True, "disable_tqdm": True,
            "logging_strategy": "steps", "logging_steps": 2, "eval_strategy": "no", "save_strategy": "no", **trainer,
        },
    }  # fmt: skip
