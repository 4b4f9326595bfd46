"""Settings that a family refuses: the error names the field, its value and what is allowed."""

import pytest

from hf_sparseprior.priors.low_rank import MIXERS
from tests.each import each
from tests.hf_sparseprior.small import shipped_families, small

CLIP_AXES = {"support": "fibottention", "time": "axes"}
# Of a family (fields, message); SparsePriorViT's are in test_configuration_sparseprior_vit.py.
BAD = {
    "sparseprior_swin": [
        ({"depths": 2}, "depths=2 must be a list with a number for each stage"),
        ({"depths": []}, "must be a list with a number for each stage"),
        ({"depths": [2]}, r"depths=\[2\] and num_heads=\[2, 2\] must have a number for each stage"),
        ({"num_heads": [2, 3]}, r"num_heads=\[2, 3\] must divide the widths of the stages, \[8, 16\]"),
        ({"window_size": 0}, "window_size=0 must be an integer of 1 or more"),
        ({"mlp_ratio": "4"}, "mlp_ratio='4' must be a number"),
        ({"mlp_ratio": 0.01}, "width of the MLP=0 must be an integer of 1"),
        ({"embed_dim": 2.5}, "embed_dim=2.5 must be an integer"),
        ({"qkv_bias": 1}, "qkv_bias=1 must be True or False"),
        ({"image_size": 33}, "image_size=33 must be a multiple of patch_size=4"),
        ({"prior": "linformer"}, "'linformer' is for a whole image"),
        ({"prior": "sparsifiner"}, "'sparsifiner' is for a whole image"),
        ({"prior": "evit"}, "evit"),
        ({"prior": "dynamicvit"}, "dynamicvit"),
        ({"prior": "swin_rpb"}, "'swin_rpb' is part of a SparsePriorSwin already"),
        ({"prior": ["dense"]}, "a list of 1 must have one for each of 2 stages"),
    ],
    "sparseprior_convit": [
        ({"num_local_layers": 2}, "num_local_layers=2 must be below num_hidden_layers=2: the class token joins"),
        ({"num_local_layers": -1}, "num_local_layers=-1 must be an integer of 0 or more"),
        ({"num_local_layers": 1.5}, "num_local_layers=1.5 must be an integer"),
        ({"locality_strength": -1}, r"locality_strength=-1 must be a number in \[0, inf\)"),
        ({"locality_strength": "1"}, "locality_strength='1' must be a number"),
        ({"num_attention_heads": 3}, "hidden_size=8 must be a multiple of num_attention_heads=3"),
        ({"pooling": "max"}, "pooling='max' must be one of class_token, mean"),
        ({"position_embedding": "rotary"}, "position_embedding='rotary' must be one of learned, none"),
        ({"qkv_bias": 1}, "qkv_bias=1 must be True or False"),
        ({"image_size": 33}, "image_size=33 must be a multiple of patch_size=4"),
        ({"local_up_to_layer": 2}, "'local_up_to_layer' is no field .* did you mean 'num_local_layers'"),
        ({"prior": "evit"}, "'evit' drops tokens, and the gated layers of a ConViT need all patches"),
        ({"prior": "dynamicvit"}, "'dynamicvit' drops tokens, and the gated layers"),
        ({"prior": ["dense", "violin"]}, "a list of 2 must have one for each of 1 stages"),
    ],
    "sparseprior_iformer": [
        ({"hidden_sizes": 48}, "hidden_sizes=48 must be a list with a number for each stage"),
        ({"hidden_sizes": [5, 8]}, r"hidden_sizes=\[5, 8\] must begin with an even number"),
        ({"conv_depths": [1]}, r"and conv_depths=\[1\] must have a number for each stage"),
        ({"attention_depths": [0, 0]}, r"attention_depths=\[0, 0\] must have at least one layer"),
        (
            {"attention_depths": [0, 1], "key_reduction": [2, 2]},
            r"key_reduction=\[2, 2\] must be 1 in a stage without attention",
        ),
        ({"key_reduction": [1, 3]}, r"key_reduction=\[1, 3\] must divide hidden_sizes=\[4, 8\]"),
        ({"kernel_size": 4}, "kernel_size=4 must be odd"),
        ({"conv_ratio": 2.5}, "conv_ratio=2.5 must be an integer of 1"),
        ({"batch_norm_eps": -1}, "batch_norm_eps=-1 must be a number"),
        ({"layer_scale_init_value": None}, "layer_scale_init_value=None must be a number"),
        ({"drop_path_rate": 2}, "drop_path_rate=2 must be a number in"),
        ({"use_distillation_classifier": 1}, "use_distillation_classifier=1 must be True or False"),
        ({"image_size": 33}, "image_size=33 must be a multiple of patch_size=4"),
        ({"patch_size": 4}, "patch_size"),
        *(({"prior": name}, f"'{name}' is for values as wide as queries") for name in MIXERS if name != "softmax"),
        ({"prior": "irpe_qkv"}, "'irpe_qkv' is for values as wide as queries"),
        ({"prior": "evit"}, "'evit' drops tokens, and iFormer's convolutions need all of them"),
        ({"prior": "dynamicvit"}, "'dynamicvit' drops tokens"),
        ({"prior": ["dense"]}, "a list of 1 must have one for each of 2 stages"),
    ],
    "sparseprior_timesformer": [
        ({"num_frames": 0}, "num_frames=0"),
        ({"num_frames": 2.5}, "num_frames=2.5"),
        ({"time_initializer_range": -1}, "time_initializer_range=-1 must be"),
        (
            {"time_initializer_range": 0.1, "attention_type": "space_only"},
            "time_initializer_range=0.1 is of time embeddings",
        ),
        ({"attention_type": "joint"}, "='joint' must be one of divided_space_time, joint_space_time, space_only"),
        ({"frame_average": "norm"}, "frame_average='norm' must be one of after_norm, before_norm"),
        (
            {"frame_average": "before_norm"},
            "frame_average='before_norm' is of attention_type='space_only'; with 'divided_space_time'",
        ),
        ({"prior": "violin+clip"}, "time='clip' needs attention_type='joint_space_time'; with 'divided_space_time'"),
        (
            {"prior": CLIP_AXES, "attention_type": "space_only"},
            "time='axes' needs attention_type='joint_space_time'; with 'space_only'",
        ),
        ({"use_distillation_token": True}, "use_distillation_token=True must be False"),
        ({"token_classifier": True}, "token_classifier=True must be False"),
        ({"prior": "evit"}, "prior 'evit' drops tokens"),
        ({"num_frame": 4}, "'num_frame' is no field of SparsePriorTimesformerConfig; did you mean 'num_frames'"),
        ({"prior": "fibotention"}, "'fibotention' is no prior"),
    ],
}


@each("family, fields, message", [(family, *case) for family, cases in BAD.items() for case in cases])
def test_bad_settings_are_named(family, fields, message):
    with pytest.raises(ValueError, match=message):
        small(family, **fields)


def test_every_family_is_here():
    assert {*BAD, "sparseprior_vit"} == {*shipped_families()}
