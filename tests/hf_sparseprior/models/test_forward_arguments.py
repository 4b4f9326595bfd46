"""Models take the arguments of the stock classes that they stand in for."""

import inspect

import peft
import pytest
import torch
import transformers
from torch.nn import functional as F

from hf_sparseprior.base.families import FAMILIES
from tests.hf_sparseprior.small import noise, scatter, small

STOCK = {
    "sparseprior_vit": ("ViT", "DeiT", "Dinov2"),
    "sparseprior_swin": ("Swin",),
    "sparseprior_timesformer": ("Timesformer",),
}
ENDINGS = {
    "AutoModel": "Model",
    "AutoModelForImageClassification": "ForImageClassification",
    "AutoModelForVideoClassification": "ForVideoClassification",
    "AutoBackbone": "Backbone",
}
MODELS = [(name, auto_class) for name, family in FAMILIES.items() for auto_class in family.models]
MASKED = {"sparseprior_vit": transformers.ViTModel, "sparseprior_swin": transformers.SwinModel}
every_model = pytest.mark.parametrize(("name", "auto_class"), MODELS)


def make(name, auto_class="AutoModel", model_options=None, **options):
    torch.manual_seed(0)
    return scatter(FAMILIES[name].models[auto_class](small(name, **options), **(model_options or {})))


def batch(name, side=None):
    config = small(name)
    frames = (config.num_frames,) if FAMILIES[name].takes == "clips" else ()
    side = config.image_size if side is None else side
    return noise(2, *frames, 3, side, side)


@every_model
def test_every_argument_of_the_stock_class_is_taken_and_what_would_have_no_effect_is_refused(name, auto_class):
    model, pixels = make(name, auto_class), batch(name)
    with torch.no_grad():
        plain = model(pixels)
    for kind in STOCK.get(name, ()):
        stock = getattr(transformers, kind + ENDINGS[auto_class], None)
        given = [] if stock is None else list(inspect.signature(stock.forward).parameters)[2:]
        nothing = {argument: None for argument in given if argument != "kwargs"}
        with torch.no_grad():
            assert (
                model(pixels, **nothing)[0].equal(plain[0])
                if auto_class != "AutoBackbone"
                else model(pixels, **nothing)
            )
    # What peft passes to whatever it wraps, and transformers' own pipelines.
    names = ("input_ids", "attention_mask", "inputs_embeds", "position_ids", "token_type_ids")
    with torch.no_grad():
        again = model(pixel_values=pixels, **dict.fromkeys(names), interpolate_pos_encoding=True)
    assert torch.equal(again.to_tuple()[0][0], plain.to_tuple()[0][0])
    with pytest.raises(TypeError, match=rf"{type(model.base_model).__name__}.*unexpected keyword argument 'input_ids'"):
        model(pixels, input_ids=torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="attention_mask must be None"):
        model(pixels, attention_mask=torch.ones(2, 5))


@every_model
def test_positions_are_interpolated_unless_that_is_refused(name, auto_class):
    """As in transformers, by the same kind of error. Where there are no learned positions nothing is interpolated."""
    model, side = make(name, auto_class), 2 * small(name).image_size
    model(batch(name), interpolate_pos_encoding=False)
    if getattr(model.base_model.embeddings, "position_embeddings", None) is None:
        model(batch(name, side), interpolate_pos_encoding=False)
        return
    with pytest.raises(
        ValueError, match=rf"interpolate_pos_encoding=False needs images of image_size=.*, got \({side}, "
    ):
        model(batch(name, side), interpolate_pos_encoding=False)
    for asked in ({}, {"interpolate_pos_encoding": True}):
        model(batch(name, side), **asked)


@pytest.mark.parametrize("name", MASKED)
def test_masked_patches_are_the_mask_token(name):
    """Their pixels have no influence, the others' have; a mask of zeros changes nothing."""
    model = make(name, model_options={"use_mask_token": True}, prior="fibottention")
    pixels = batch(name)
    patches = model.embeddings(pixels)
    number = (
        (patches[0].shape[1] - model.config.num_prefix_tokens)
        if name == "sparseprior_vit"
        else patches[0, ..., 0].numel()
    )
    masked = torch.zeros(2, number, dtype=torch.bool)
    with torch.no_grad():
        assert model(pixels, bool_masked_pos=masked)[0].equal(model(pixels)[0])
        masked[:, 0] = True
        patch = model.embeddings.patch_size[0]
        other = pixels.clone()
        other[..., :patch, :patch] += 1.0  # the first patch
        assert model(other, bool_masked_pos=masked)[0].equal(model(pixels, bool_masked_pos=masked)[0])
        assert not model(other)[0].allclose(model(pixels)[0], atol=1e-3)
        embedded = model.embeddings(pixels, bool_masked_pos=masked)
    if name == "sparseprior_vit":
        place = model.config.num_prefix_tokens
        first = model.embeddings.mask_token[0, 0] + model.embeddings.patch_positions(model.config.grid)[0, 0]
        torch.testing.assert_close(embedded[0][0, place], first)
    else:
        torch.testing.assert_close(embedded[0, 0, 0], model.embeddings.mask_token[0, 0])
    for wrong in (masked[:, 1:], masked[:1]):
        with pytest.raises(ValueError, match=r"bool_masked_pos of shape .* must be \(batch, patches\)"):
            model(pixels, bool_masked_pos=wrong)
    with pytest.raises(ValueError, match="use_mask_token=True"):
        make(name)(pixels, bool_masked_pos=masked)


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_token_starts_at_zero_and_is_saved(name, tmp_path):
    torch.manual_seed(0)
    model = FAMILIES[name].base(small(name), use_mask_token=True)
    assert not model.embeddings.mask_token.any()
    with torch.no_grad():
        model.embeddings.mask_token.fill_(0.5)
    model.save_pretrained(tmp_path)
    again = FAMILIES[name].base.from_pretrained(tmp_path, use_mask_token=True)
    assert again.embeddings.mask_token.eq(0.5).all()
    without = FAMILIES[name].base.from_pretrained(tmp_path)  # as stock models, it leaves the token out
    assert without.embeddings.mask_token is None


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.classifier is not None])
def test_a_loss_over_the_items_of_accumulated_batches(name):
    """`num_items_in_batch`, as the Trainer passes it to models that take it; it does not ask ours for theirs."""
    auto_class = next(auto for auto in FAMILIES[name].models if auto.endswith("Classification"))
    model, labels = make(name, auto_class, num_labels=3), torch.tensor([0, 2])
    with torch.no_grad():
        output = model(batch(name), labels=labels, num_items_in_batch=8)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, labels, reduction="sum") / 8)
    assert model.accepts_loss_kwargs is False


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.takes == "images"])
def test_peft_wraps_the_bare_model_for_features(name):
    model, pixels = make(name), batch(name)
    with torch.no_grad():
        plain = model(pixels).last_hidden_state
    projection = FAMILIES[name].projections.query_value[0].rpartition(".")[2]
    config = peft.LoraConfig(task_type="FEATURE_EXTRACTION", target_modules=[projection])
    wrapped = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        torch.testing.assert_close(wrapped(pixel_values=pixels).last_hidden_state, plain)


@pytest.mark.parametrize("name", MASKED)
def test_a_model_without_pooling(name, tmp_path):
    model, pixels = make(name), batch(name)
    model.save_pretrained(tmp_path)
    without = FAMILIES[name].base.from_pretrained(tmp_path, add_pooling_layer=False)
    with torch.no_grad():
        output, whole = without(pixels), model(pixels)
        assert output.pooler_output is None and output.last_hidden_state.equal(whole.last_hidden_state)
        assert len(without(pixels, return_dict=False)) == len(model(pixels, return_dict=False)) - 1
