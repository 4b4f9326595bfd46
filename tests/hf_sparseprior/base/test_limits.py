"""Sizes that a config asks for are refused before memory is taken, and what has been published passes."""

import json
import time
import tracemalloc

import pytest
import torch
from transformers import AutoConfig

import hf_sparseprior as sp
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.base.limits import LIMITS
from hf_sparseprior.models.configuration_sparseprior_vit import PRESETS
from hf_sparseprior.patterns.baselines import count_nonzeros, strided
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.sequences import monomials
from hf_sparseprior.patterns.supports import SUPPORTS, resolve_support
from hf_sparseprior.priors.prior import prior_names
from tests.hf_sparseprior.small import SIZES, SMALL, small

TINY = SMALL["sparseprior_vit"]
# Family and field, too large.
TOO_LARGE = [(name, field) for name, fields in SIZES.items() for field in fields]
# A prior's settings that decide how large a module or a table is.
SETTINGS = [
    ({"predictor": {"name": "sparsifiner", "num_down": 10**9}}, "sparsifiner: num_down=1000000000", "width"),
    ({"predictor": {"name": "sparsifiner", "grid": [10**5, 10**5]}}, "sparsifiner: grid=", "tokens"),
    ({"mixer": {"name": "linformer", "grid": [10**5, 10**5]}}, "linformer: grid=", "tokens"),
    ({"mixer": {"name": "linformer", "projected_tokens": 10**9}}, "linformer: projected_tokens=", "width"),
    ({"mixer": {"name": "efficient", "key_width": 10**9}}, "efficient: key_width=", "width"),
    ({"extras": [{"name": "swin_rpb", "grid": [1, 10**9]}]}, "swin_rpb: grid=", "tokens"),
    ({"extras": [{"name": "localvit", "kernel_size": 10**5 + 1}]}, "localvit: kernel_size=", "tokens"),
    ({"extras": [{"name": "localvit", "squeeze_excitation": 10**9}]}, "localvit: squeeze_excitation=", "width"),
    ({"decay": {"name": "learned_order", "grid": [10**5, 10**5]}}, "learned_order: grid=", "tokens"),
]


@pytest.fixture
def quick():
    """Asserts that hardly any memory and time were taken. A list of 10^6 numbers alone takes 8 MB."""
    tracemalloc.start()
    start = time.process_time()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e6 and time.process_time() - start < 10


def refused(kind):
    setting = f"SPARSEPRIOR_MAX_{kind.upper()}"
    return rf"at most {LIMITS[kind]}; the environment variable {setting} raises this limit$"


def test_every_family_has_a_small_config_and_sizes():
    assert FAMILIES.keys() == SMALL.keys() == SIZES.keys()


@pytest.mark.parametrize(("name", "field"), TOO_LARGE)
def test_sizes_above_their_limit_are_refused_by_name(name, field, tmp_path, quick):
    value, shown, kind = SIZES[name][field]
    message = rf"^{field}={shown}\b.* must be {refused(kind)}"
    with pytest.raises(ValueError, match=message):
        small(name, **{field: value})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, **SMALL[name], field: value}))
    with pytest.raises(ValueError, match=rf"^{tmp_path}/config\.json: {message[1:]}"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(("prior", "field", "kind"), SETTINGS)
def test_settings_of_a_prior_above_their_limit_are_refused_by_name(prior, field, kind, quick):
    with pytest.raises(ValueError, match=rf"{field}.* must be {refused(kind)}"):
        sp.SparsePriorViTConfig(**TINY, prior=prior)


def test_every_whole_number_of_a_prior_is_refused_or_harmless(quick):
    """10^9 in place of each setting in turn: an error in one line, or a config, at once either way."""
    tried = 0
    for name in prior_names():
        config = sp.SparsePriorViTConfig(**{**TINY, "hidden_size": 16}, prior=name)
        for slot, filled in config.prior.items():
            for part in filled if isinstance(filled, list) else [filled] if isinstance(filled, dict) else []:
                for key in part.keys() - {"name"}:
                    changed = {**part, key: [10**9, 10**9] if key == "grid" else 10**9}
                    prior = {**config.prior, slot: [changed] if isinstance(filled, list) else changed}
                    tried += 1
                    try:
                        sp.SparsePriorViTConfig(**{**TINY, "hidden_size": 16}, prior=prior)
                    except ValueError as error:
                        assert key in str(error) and "\n" not in str(error)
    assert tried > len(SUPPORTS) + len(DECAYS)


def test_a_clip_has_as_many_tokens_as_all_its_frames(quick):
    for value in (10**9, 2**16):
        with pytest.raises(ValueError, match=rf"num_frames={value}\b.* must be {refused('tokens')}"):
            sp.SparsePriorTimesformerConfig(**TINY, num_frames=value)


def test_all_weights_together_have_a_limit(quick):
    sizes = {"hidden_size": 65536, "intermediate_size": 65536, "num_hidden_layers": 1000}
    message = f"hidden_size=65536, intermediate_size=65536, num_hidden_layers=1000, .* give .*{refused('weights')}"
    with pytest.raises(ValueError, match=message):
        sp.SparsePriorViTConfig(**{**TINY, **sizes})
    with pytest.raises(ValueError, match=f"image_size=160000, patch_size=160000.*{refused('weights')}"):
        sp.SparsePriorViTConfig(**{**TINY, "image_size": 160_000, "patch_size": 160_000})
    table = {"mixer": {"name": "linformer", "projected_tokens": 131_072, "grid": [256, 256]}}
    with pytest.raises(ValueError, match=f"prior_name=linformer give .*{refused('weights')}"):
        sp.SparsePriorViTConfig(**{**TINY, "num_hidden_layers": 12}, prior=table)


def test_a_setting_raises_each_limit(monkeypatch):
    with pytest.raises(ValueError, match="num_hidden_layers=1100 must be at most 1024"):
        sp.SparsePriorViTConfig(**{**TINY, "num_hidden_layers": 1100})
    monkeypatch.setenv("SPARSEPRIOR_MAX_LAYERS", "1100")
    assert sp.SparsePriorViTConfig(**{**TINY, "num_hidden_layers": 1100}).num_hidden_layers == 1100
    monkeypatch.setenv("SPARSEPRIOR_MAX_TOKENS", "4")
    with pytest.raises(ValueError, match="give 5 tokens, which must be at most 4;"):
        sp.SparsePriorViTConfig(**TINY)
    monkeypatch.setenv("SPARSEPRIOR_MAX_TOKENS", "many")
    with pytest.raises(ValueError, match="SPARSEPRIOR_MAX_TOKENS='many' must be a whole number"):
        sp.SparsePriorViTConfig(**TINY)


def test_what_has_been_published_passes():
    vit_22b = {"hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 48, "num_attention_heads": 48}
    config = sp.SparsePriorViTConfig(**vit_22b, patch_size=14, num_labels=29_593)  # JFT-4B's classes
    assert 21e9 < config.num_weights < 23e9
    large = sp.SparsePriorViTConfig.from_preset("deit3_large", image_size=2048, patch_size=16, prior="fibottention")
    assert large.num_tokens == 16_385
    assert sp.SparsePriorTimesformerConfig(num_frames=96, image_size=448).num_tokens == 1 + 96 * 784
    sp.SparsePriorViTConfig(**TINY, num_labels=21_843)  # ImageNet-21K
    assert sp.SparsePriorViTConfig(image_size=4096, hidden_size=24, num_attention_heads=1).num_tokens == 65_537


# ---- what is counted ------------------------------------------------------------------------------------------------

MODELS = {
    "sparseprior_vit": sp.SparsePriorViTForImageClassification,
    "sparseprior_timesformer": sp.SparsePriorTimesformerForVideoClassification,
}
LARGE_MODULES = [
    {"predictor": {"name": "sparsifiner", "num_down": 3000}},
    {"mixer": {"name": "linformer", "projected_tokens": 3000}},
    {"mixer": {"name": "linformer", "projected_tokens": 3000, "share_key_value": True}},
    {"mixer": {"name": "efficient", "key_width": 500}},
    {"extras": [{"name": "swin_rpb", "grid": [100, 100]}]},
    {"extras": [{"name": "irpe_qkv", "ratio": 30}]},
    {"extras": [{"name": "localvit", "kernel_size": 15, "squeeze_excitation": 300}]},
    {"extras": [{"name": "dynamicvit", "layers": [1, 2]}]},
    {"extras": ["transformer_xl"]},
]


def counted_and_made(config):
    """What the config counts, and the size of all parameters of the model that is made from it."""
    with torch.device("meta"):
        model = MODELS[config.model_type](config)
    return config.num_weights, sum(parameter.numel() for parameter in model.parameters())


def test_the_weights_that_are_counted_are_those_of_the_model():
    small = {"num_hidden_layers": 2, "num_labels": 1000, "hidden_size": 96, "intermediate_size": 384}
    configs = [sp.SparsePriorViTConfig.from_preset(name, **small, num_attention_heads=3) for name in PRESETS]
    configs += [sp.SparsePriorViTConfig(**small, num_attention_heads=3, prior=prior) for prior in LARGE_MODULES]
    configs += [sp.SparsePriorTimesformerConfig(**small, num_attention_heads=3, num_frames=500, image_size=64)]
    for config in configs:
        counted, made = counted_and_made(config)
        assert counted == pytest.approx(made, rel=0.02), (config.prior_name, config.to_dict())


# ---- settings that took long ----------------------------------------------------------------------------------------


def test_the_stride_for_a_ratio_keeps_the_pairs_that_are_nearest(quick):
    for num_tokens, local in ((30, 0), (30, 3), (31, 29), (7, 90)):
        kept = [
            count_nonzeros(sorted({*range(min(local, num_tokens - 1) + 1), *range(0, num_tokens, stride)}), num_tokens)
            for stride in range(1, num_tokens)
        ]
        for ratio in (5.0, 60.0, 91.0):
            found = count_nonzeros(strided(1, num_tokens, local=local, pruning_ratio=ratio)[0], num_tokens)
            wanted = round((1 - ratio / 100) * num_tokens**2)
            assert abs(found - wanted) == min(abs(own - wanted) for own in kept)


def test_settings_that_took_long_do_not(quick):
    assert list(monomials(1, 195, degree=10**15)) == [1]
    assert list(monomials(1, 195, degree=7)) == [1, 128]
    assert list(monomials(1, 9, degree=2)) == [1, 4, 9]
    resolve_support({"name": "strided", "local": 10**9, "pruning_ratio": 50.0}, 1, 4000)
