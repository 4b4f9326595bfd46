import copy
from statistics import fmean

import pytest
import torch

import hf_sparseprior as sp
from hf_sparseprior.sparsification.candidates import parse_candidates
from hf_sparseprior.sparsification.sensitivity import (
    LayerChanged,
    dense_outputs,
    losses_of,
    tokens_of,
)
from hf_sparseprior.sparsification.subject import Subject
from tests.each import each
from tests.hf_sparseprior.adapters.stock_models import STOCK
from tests.hf_sparseprior.small import SMALL
from tests.hf_sparseprior.sparsification.fakes import BUILDERS, CANDIDATES, SIZES, images_of, model_of

CPU = torch.device("cpu")


def logits_of(model, pixels):
    with torch.no_grad():
        output = model(pixels)
    return output if isinstance(output, torch.Tensor) else output.logits


def by_hand(kind, layer, spec, pixels):
    """Logits of the model whose layer has another support from the start, and all others none."""
    layers = [{"support": spec} if number == layer else "dense" for number in range(3)]
    model = model_of(kind)
    if kind != "ours":
        return logits_of(sp.apply_prior(model, {"layers": layers}), pixels)
    config = copy.deepcopy(model.config)
    config.prior = {"layers": layers}
    changed = type(model)(config).eval()
    changed.load_state_dict(model.state_dict())
    return logits_of(changed, pixels)


@each("kind", BUILDERS)
@pytest.mark.parametrize("layer", range(3))
def test_losses_are_those_of_the_model_with_the_layer_changed(kind, layer):
    subject, pixels = Subject(model_of(kind), None, CPU), images_of(5)
    batches = [pixels[:3], pixels[3:]]
    candidates = parse_candidates(CANDIDATES)
    priors = [subject.prior_of(subject.layers[layer], own) for own in candidates]
    changed = LayerChanged(subject, layer, batches, dense_outputs(subject, batches))
    assert changed.losses(priors[0], [1]) == changed.losses(priors[0], range(2))[3:]
    found = [fmean(changed.losses(prior, range(2))) for prior in priors]
    dense = logits_of(model_of(kind), pixels).double().softmax(-1)
    for loss, spec in zip(found, CANDIDATES, strict=True):
        other = by_hand(kind, layer, spec, pixels).double().softmax(-1)
        divergence = (dense * (dense / other).log()).sum(-1).mean()
        assert loss == pytest.approx(float(divergence), rel=1e-3, abs=1e-8)
        # Every pattern keeps all pairs of the class token, which is all that the last layer's output is for.
        assert loss > 1e-6 if layer < 2 else loss < 1e-10


@each("kind", [*BUILDERS, "feature maps"])
def test_what_blocks_give_is_kept_where_more_than_the_next_one_reads_it(kind):
    if kind == "feature maps":
        config = sp.SparsePriorViTConfig(**SIZES, out_features=["stage1", "stage3"])
        model = sp.SparsePriorViTBackbone(config).eval()
    else:
        model = model_of(kind)
    subject, batches = Subject(model, None, CPU), [images_of(2)]
    dense, prior = dense_outputs(subject, batches), subject.prior_of(subject.layers[2], parse_candidates(CANDIDATES)[0])
    losses = []
    for asked in (False, None):
        subject.in_sequence, changed = asked, LayerChanged(subject, 2, batches, dense)
        losses.append(changed.losses(prior, [0]))
        kept = {id(tokens_of(output)) for output in changed.before[0]}
        assert subject.in_sequence == (asked is None and kind != "feature maps")
        assert len(changed.before[0]) == 2 and len(kept) == (1 if subject.in_sequence else 2)
    assert losses[0] == losses[1]
    assert torch.equal(subject.outputs(batches[0]), dense[0])  # blocks run again


@each("kind", BUILDERS)
def test_a_layer_changed_alone_is_a_choice_of_one(kind):
    subject, batches = Subject(model_of(kind), None, CPU), [images_of(4)]
    dense = dense_outputs(subject, batches)
    prior = subject.prior_of(subject.layers[1], parse_candidates(CANDIDATES)[0])
    alone = LayerChanged(subject, 1, batches, dense).losses(prior, [0])
    assert len(alone) == 4 and alone == losses_of(subject, [None, prior, None], batches, dense)
    assert losses_of(subject, [None] * 3, batches, dense) == [0.0] * 4
    assert torch.equal(subject.outputs(batches[0]), dense[0])  # the layers have their own pairs again


@each("kind", BUILDERS)
def test_what_is_built_is_what_was_tried(kind):
    subject, pixels = Subject(model_of(kind), None, CPU), images_of(4)
    candidates = parse_candidates(CANDIDATES)
    priors = [None, *(subject.prior_of(layer, own) for layer, own in zip(subject.layers[1:], candidates, strict=False))]
    with torch.no_grad():
        with subject.changed(priors):
            tried = subject.outputs(pixels)
        built = subject.outputs(pixels, subject.built(priors))
    torch.testing.assert_close(built, tried, rtol=1e-4, atol=1e-5)


@each("kind", ["ours", "transformers"])
def test_other_image_sizes(kind):
    """What is built at another size is what was tried at it, also where patterns go beyond the configured grid."""
    subject = Subject(model_of(kind), (48, 64), CPU)
    assert {layer.grid for layer in subject.layers} == {(12, 16)}
    wide = parse_candidates([{"name": "fibottention", "w_max": 150}, {"name": "neighborhood", "window": [11, 15]}])
    priors = [None, *(subject.prior_of(subject.layers[1], own) for own in wide)]
    pixels = subject.images(2)
    with torch.no_grad():
        with subject.changed(priors):
            tried = subject.outputs(pixels)
        built = subject.outputs(pixels, subject.built(priors))
    torch.testing.assert_close(built, tried, rtol=1e-4, atol=1e-5)


def test_backbones_are_judged_by_their_maps():
    torch.manual_seed(0)
    subject = Subject(sp.SparsePriorViTBackbone(sp.SparsePriorViTConfig(**SIZES)), None, CPU)
    assert subject.outputs(subject.images(2)).shape == (2, 24 * 64) and not subject.classifies


def _maps_of(features):
    return sp.SparsePriorViTBackbone(sp.SparsePriorViTConfig(**SIZES, out_features=features))


@each("features", [["stage1", "stage3"], ["stage2"], ["stem", "stage1", "stage2", "stage3"]])
def test_losses_of_backbones_with_several_maps(features):
    """Maps of the blocks before a layer are those of the dense model."""
    torch.manual_seed(0)
    subject, batches = Subject(_maps_of(features), None, CPU), [images_of(3)]
    dense, window = dense_outputs(subject, batches), parse_candidates(CANDIDATES)[0]
    for number, layer in enumerate(subject.layers):
        prior = subject.prior_of(layer, window)
        alone = LayerChanged(subject, number, batches, dense).losses(prior, [0])
        choice = [prior if other is layer else None for other in subject.layers]
        assert alone == losses_of(subject, choice, batches, dense)


def test_a_model_without_classifier_is_judged_by_its_features():
    subject = Subject(STOCK["dinov2"].build(), None, CPU)
    assert not subject.classifies
    dense, other = torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 5.0]])
    assert subject.loss(other, dense).tolist() == [1 / 25]


@each("family", ["sparseprior_swin", "sparseprior_convit", "sparseprior_iformer"])
def test_families_of_several_stages_can_be_changed(family):
    cls = sp.base.families.FAMILIES[family].classifier
    torch.manual_seed(0)
    subject = Subject(cls(cls.config_class(**SMALL[family], num_labels=3)), None, CPU)
    pixels = [subject.images(2)]
    dense = dense_outputs(subject, pixels)
    window = parse_candidates([{"name": "window", "w": 1}])[0]
    for number, layer in enumerate(subject.layers):
        if layer.takes_support:
            changed = LayerChanged(subject, number, pixels, dense)
            assert len(changed.losses(subject.prior_of(layer, window), [0])) == 2


@each("name", ["beit", "clip", "swin", "dinov3", "deit"])
def test_stock_families_can_be_changed(name):
    subject = Subject(STOCK[name].build(), None, CPU)
    pixels = [subject.images(2)]
    dense = dense_outputs(subject, pixels)
    prior = subject.prior_of(subject.layers[-1], parse_candidates([{"name": "window", "w": 1}])[0])
    losses = LayerChanged(subject, len(subject.layers) - 1, pixels, dense).losses(prior, [0])
    assert min(losses) > 0


def _with(prior):
    return sp.SparsePriorViTModel(sp.SparsePriorViTConfig(**SIZES, prior=prior))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: sp.apply_prior(model_of("transformers"), "fibottention"), "must have no prior"),
        (lambda: _with("fibottention"), "'fibottention' leaves pairs out already"),
        (lambda: _with("evit"), "'evit' leaves pairs out already"),
        (lambda: _with("linformer"), "'linformer' leaves pairs out already"),
        (lambda: STOCK["vivit"].build(), "takes clips"),
        (lambda: torch.nn.Linear(2, 2), "must be a model of hf_sparseprior, transformers or timm"),
    ],
)
def test_other_models_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        Subject(build(), None, CPU)
