"""What a saved folder contains, that it loads without the package, and what is refused."""

import json
import pickle
import shutil
import sys

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    pipeline,
)
from transformers.dynamic_module_utils import get_imports, get_relative_imports

from hf_sparseprior import (
    SparsePriorViTBackbone,
    SparsePriorViTConfig,
    SparsePriorViTForImageClassification,
    SparsePriorViTModel,
)
from hf_sparseprior.attention import compiled_kernels
from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.priors.low_rank import MIXERS
from hf_sparseprior.priors.predictor import PREDICTORS
from hf_sparseprior.saving.card import model_card
from tests.each import each
from tests.hf_sparseprior.attention.attention_cases import SHIPPED_SUPPORTS
from tests.hf_sparseprior.small import noise, scatter
from tests.processes import run_script
from tests.remote import check_remote_code

CLASSES = {
    "AutoConfig": SparsePriorViTConfig,
    "AutoModel": SparsePriorViTModel,
    "AutoModelForImageClassification": SparsePriorViTForImageClassification,
    "AutoBackbone": SparsePriorViTBackbone,
}
MODELS = [SparsePriorViTModel, SparsePriorViTForImageClassification, SparsePriorViTBackbone]


def tiny(prior="fibottention+violin", **settings):
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return SparsePriorViTConfig(
        prior=prior, **{**sizes, "image_size": 32, "patch_size": 4, "num_labels": 3, **settings}
    )


def make(cls=SparsePriorViTForImageClassification, **settings):
    torch.manual_seed(0)
    return cls(tiny(**settings)).eval()


def images():
    return noise(2, 3, 32, 32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    make().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """One to change."""
    return shutil.copytree(saved, tmp_path / "model")


# ---- contents of a folder -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", MODELS)
def test_auto_map_names_all_four_classes_and_their_code_is_flat_and_complete(cls, tmp_path):
    make(cls).save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert set(auto_map) == set(CLASSES)
    for auto_class, reference in auto_map.items():
        module, name = reference.split(".")
        assert name == CLASSES[auto_class].__name__
        assert f"class {name}(" in (tmp_path / f"{module}.py").read_text()
    assert all(path.is_file() for path in tmp_path.iterdir())
    files = {path.stem: path for path in tmp_path.glob("*.py")}
    assert {"configuration_sparseprior_vit", "modeling_sparseprior_vit"} <= set(files)
    for path in files.values():
        # transformers reads a file like this: a line of a docstring counts as an import, too.
        assert set(get_relative_imports(path)) <= set(files), path.name
        imported = {name.split(".")[0] for name in get_imports(path)} - sys.stdlib_module_names
        assert imported <= {"numpy", "safetensors", "torch", "transformers"}, path.name


def test_weights_are_safetensors_only(folder):
    assert [path.name for path in folder.iterdir() if path.suffix not in (".py", ".json", ".md")] == [
        "model.safetensors"
    ]
    assert not list(folder.glob("*.partial"))
    assert set(load_file(folder / "model.safetensors")) == set(make().state_dict())


def test_processor_fits_the_model(tmp_path):
    config = {"image_size": (32, 48), "image_mean": (0.1, 0.2, 0.3), "image_std": (0.4, 0.5, 0.6)}
    make(**config).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert written["size"] == {"height": 32, "width": 48}
    assert written["image_mean"] == [0.1, 0.2, 0.3] and written["image_std"] == [0.4, 0.5, 0.6]
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    # A plain grey image: resizing leaves it alone, so the normalisation can be done by hand.
    pixels = processor(Image.new("RGB", (50, 40), (51, 51, 51)), return_tensors="pt")["pixel_values"]
    expected = (0.2 - torch.tensor([0.1, 0.2, 0.3])) / torch.tensor([0.4, 0.5, 0.6])
    assert pixels.shape == (1, 3, 32, 48)
    torch.testing.assert_close(pixels[0].mean((1, 2)), expected)
    # An image with an alpha channel is one with three channels for this model.
    assert processor(Image.new("RGBA", (50, 40)), return_tensors="pt")["pixel_values"].shape == (1, 3, 32, 48)


@pytest.mark.parametrize(
    ("cls", "prior"),
    [(MODELS[0], "dense"), (MODELS[1], "fibottention"), (MODELS[2], "violin"), (MODELS[1], "fibottention+violin")],
)
def test_card_says_what_the_model_is(cls, prior, tmp_path):
    model = make(cls, prior=prior)
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert f"prior: {prior}" in card and json.dumps(model.config.prior) in card
    assert f"{model.config.pruning_ratio:.2f} %" in card and "8x8 patches" in card
    code = card.split("```python\n")[1].split("```")[0].strip().splitlines()
    assert len(code) == 3
    compile("\n".join(code), "card", "exec")
    assert "trust_remote_code=True" in card


def test_card_takes_the_results_of_a_run():
    results = {"data": "CIFAR-10", "metrics": {"accuracy": 0.91}, "command": "python -m tasks.classification x.yaml"}
    card = model_card(tiny(), results, license_name="mit")
    assert "| data | CIFAR-10 |" in card and "| accuracy | 0.91 |" in card
    assert "python -m tasks.classification x.yaml" in card and "license: mit" in card


def test_the_card_says_what_a_mixer_saves():
    assert "% of query-key pairs left out" in model_card(tiny("topk"))
    assert "% of dense attention's multiply-adds over query-key pairs saved" in model_card(tiny("linformer"))


def test_existing_processor_and_card_are_kept(tmp_path):
    (tmp_path / "README.md").write_text("my card\n")
    (tmp_path / "preprocessor_config.json").write_text('{"mine": true}\n')
    make().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "my card\n"
    assert (tmp_path / "preprocessor_config.json").read_text() == '{"mine": true}\n'


def test_other_processes_write_neither_card_nor_weights(tmp_path):
    make().save_pretrained(tmp_path, is_main_process=False)
    assert not {path.name for path in tmp_path.iterdir()} & {"README.md", "model.safetensors", "config.json"}


def test_saving_twice_into_one_folder(folder):
    model = SparsePriorViTForImageClassification.from_pretrained(folder)
    expected = model(images()).logits
    model.save_pretrained(folder)
    again = SparsePriorViTForImageClassification.from_pretrained(folder)
    assert torch.equal(again(images()).logits, expected)


def test_shards(tmp_path):
    model = make()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    loaded = SparsePriorViTForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(loaded(images()).logits, model(images()).logits)
    shards[-1].unlink()
    with pytest.raises(OSError, match="safetensors"):
        SparsePriorViTForImageClassification.from_pretrained(tmp_path)


# ---- with the package -----------------------------------------------------------------------------------------------


def test_with_the_package_no_remote_code_is_needed(folder):
    expected = SparsePriorViTForImageClassification.from_pretrained(folder)(images()).logits
    assert type(AutoConfig.from_pretrained(folder)) is SparsePriorViTConfig
    assert type(AutoModel.from_pretrained(folder)) is SparsePriorViTModel
    model = AutoModelForImageClassification.from_pretrained(folder)
    assert type(model) is SparsePriorViTForImageClassification
    assert torch.equal(model(images()).logits, expected)
    classify = pipeline("image-classification", model=str(folder))
    assert type(classify.model) is SparsePriorViTForImageClassification
    assert len(classify(Image.new("RGB", (40, 40)))) == 3


def test_labels_are_kept(tmp_path):
    names = {0: "cat", 1: "dog", 2: "horse"}
    make(id2label=names, label2id={name: number for number, name in names.items()}).save_pretrained(tmp_path)
    classify = pipeline("image-classification", model=str(tmp_path))
    assert {result["label"] for result in classify(Image.new("RGB", (32, 32)))} == set(names.values())


# ---- without the package --------------------------------------------------------------------------------------------

# Runs where `import hf_sparseprior` fails; {folders} hold one model each. Prints where the classes came from.
REMOTE = """
import json
import sys
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoBackbone, AutoConfig, AutoModel, AutoModelForImageClassification, pipeline

pixels = load_file("pixels.safetensors")["pixels"]
base = AutoModel.from_pretrained("base", trust_remote_code=True)
classifier = AutoModelForImageClassification.from_pretrained("classifier", trust_remote_code=True)
config = AutoConfig.from_pretrained("backbone", trust_remote_code=True)
backbone = AutoBackbone.from_config(config, trust_remote_code=True)
loaded_backbone = type(backbone).from_pretrained("backbone")
other_prior = AutoModel.from_pretrained("base", trust_remote_code=True, prior="dense")
classify = pipeline("image-classification", model="classifier", trust_remote_code=True)
scores = classify(Image.open("image.png"), top_k=3)
card = open("classifier/README.md").read().split("```python")[1].split("```")[0]
variables = {}
exec(card.replace("PATH_OR_NAME_OF_THIS_MODEL", "classifier"), variables)
classifier.save_pretrained("classifier again")
base.save_pretrained("base again")
again = AutoModelForImageClassification.from_pretrained("classifier again", trust_remote_code=True)
outputs = {
    "base": base(pixels).last_hidden_state,
    "classifier": classifier(pixels).logits,
    "backbone": loaded_backbone(pixels).feature_maps[0],
    "again": again(pixels).logits,
}
save_file({name: tensor.detach().contiguous() for name, tensor in outputs.items()}, "outputs.safetensors")
with open("report.json", "w") as file:
    json.dump(
        {
            "modules": [type(model).__module__ for model in (base, classifier, backbone, again, classify.model)],
            "card": variables["classify"]("image.png") == scores,
            "priors": [model.config.prior_name for model in (base, classifier, backbone, again, other_prior)],
            "scores": {result["label"]: result["score"] for result in scores},
            "package": [name for name in sys.modules if name.partition(".")[0] == "hf_sparseprior"],
        },
        file,
    )
"""


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    """Models that are saved here, and then loaded, run and saved again by a process without the package."""
    folder = tmp_path_factory.mktemp("remote")
    models = {"base": make(SparsePriorViTModel), "classifier": make(), "backbone": make(SparsePriorViTBackbone)}
    for name, model in models.items():
        model.save_pretrained(folder / name)
    save_file({"pixels": images()}, folder / "pixels.safetensors")
    Image.new("RGB", (50, 40), (200, 10, 90)).save(folder / "image.png")
    run_script(REMOTE, folder=folder)
    report = json.loads((folder / "report.json").read_text())
    return folder, models, report, load_file(folder / "outputs.safetensors")


HUB = """
from safetensors.torch import load_file, save_file
from transformers import AutoModel

model = AutoModel.from_pretrained("somebody/a-model", trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules.")
save_file({"output": model(load_file("pixels.safetensors")["pixels"]).last_hidden_state}, "output.safetensors")
"""


@pytest.mark.slow
def test_a_model_of_the_hub_brings_its_code(tmp_path, monkeypatch):
    """Unlike a folder's, files of a name on the hub are fetched one by one, as each is found to import the next."""
    commit, model = "0" * 40, make(SparsePriorViTModel)
    repository = tmp_path / "home" / "hub" / "models--somebody--a-model"
    model.save_pretrained(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    save_file({"pixels": images()}, tmp_path / "pixels.safetensors")
    run_script(HUB, folder=tmp_path)
    monkeypatch.setattr(compiled_kernels, "INSTALLED_VERSION", None)  # without the package there is no compiled kernel
    assert torch.equal(load_file(tmp_path / "output.safetensors")["output"], model(images()).last_hidden_state)


@pytest.mark.slow
def test_every_kind_of_prior_comes_back_by_remote_code(tmp_path):
    names = [*SHIPPED_SUPPORTS, *PREDICTORS, *MIXERS, "fibottention+evit", "sparsifiner+dynamicvit", "tome"]
    decay = {"name": "learned_order", "placement": "multiply_after"}
    extras = {"decay": decay, "extras": [name for name in EXTRAS if EXTRAS[name].place != "model"]}
    priors = {name: name for name in names} | {"extras": extras}
    # Weights far from the small initial values, so that the prior matters.
    check_remote_code({name: (scatter(make(prior=own)), images()) for name, own in priors.items()}, tmp_path)


@pytest.mark.slow
def test_remote_code_runs_without_the_package_and_gives_the_same_bits(remote, monkeypatch):
    report = remote[2]
    assert report["package"] == [] and report["card"]
    assert all(module.startswith("transformers_modules.") for module in report["modules"])
    assert report["priors"] == ["fibottention+violin"] * 4 + ["dense"]
    monkeypatch.setattr(compiled_kernels, "INSTALLED_VERSION", None)  # without the package there is no compiled kernel
    _, models, _, outputs = remote
    with torch.no_grad():
        assert torch.equal(outputs["base"], models["base"](images()).last_hidden_state)
        assert torch.equal(outputs["classifier"], models["classifier"](images()).logits)
        assert torch.equal(outputs["backbone"], models["backbone"](images()).feature_maps[0])
        assert torch.equal(outputs["again"], models["classifier"](images()).logits)


def test_remote_pipeline_gives_the_same_scores(remote):
    folder, _, report, _ = remote
    classify = pipeline("image-classification", model=str(folder / "classifier"))
    own = {result["label"]: result["score"] for result in classify(str(folder / "image.png"), top_k=3)}
    assert report["scores"] == pytest.approx(own, abs=1e-6)


def test_a_model_saved_by_remote_code_is_complete(remote):
    folder, models, _, _ = remote
    for name in ("base", "classifier"):
        first, second = folder / name, folder / f"{name} again"
        assert len(list(first.glob("*.py"))) == 8
        assert {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()}
        assert all((second / path.name).read_text() == path.read_text() for path in first.glob("*.py"))
        written = json.loads((second / "config.json").read_text())["auto_map"]
        assert written == json.loads((first / "config.json").read_text())["auto_map"]
    again = SparsePriorViTForImageClassification.from_pretrained(folder / "classifier again")
    assert torch.equal(again(images()).logits, models["classifier"](images()).logits)


# ---- hostile and damaged folders ------------------------------------------------------------------------------------


class Trap:
    """Unpickling an instance creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def set_trap(folder, name="pytorch_model.bin"):
    """Replace the weights of a folder by a pickle that leaves a trace. Returns the path of the trace."""
    trace = folder / "trace"
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    torch.save({"classifier.bias": Trap(trace)}, folder / name)
    return trace


def test_the_trap_works(tmp_path):
    trace = tmp_path / "trace"
    pickle.loads(pickle.dumps(Trap(trace))).close()
    assert trace.exists()


LOADERS = {
    "class": lambda folder, **kw: SparsePriorViTForImageClassification.from_pretrained(folder, **kw),
    "auto class": lambda folder, **kw: AutoModelForImageClassification.from_pretrained(folder, **kw),
    "base": lambda folder, **kw: SparsePriorViTModel.from_pretrained(str(folder), **kw),
    "backbone": lambda folder, **kw: SparsePriorViTBackbone.from_pretrained(folder, **kw),
}


@each("loader", LOADERS)
def test_a_pickled_checkpoint_is_refused_and_never_opened(loader, folder):
    trace = set_trap(folder)
    for settings in ({}, {"weights_only": False}, {"use_safetensors": True}, {"use_safetensors": None}):
        with pytest.raises(OSError, match="safetensors") as caught:
            LOADERS[loader](folder, **settings)
        assert str(folder) in str(caught.value), settings
    with pytest.raises(ValueError, match="use_safetensors=False is refused"):
        LOADERS[loader](folder, use_safetensors=False, weights_only=False)
    assert not trace.exists()


def test_no_word_on_safetensors_is_the_default(saved):
    """`use_safetensors=None` is what transformers' own signature says for "not given"."""
    SparsePriorViTForImageClassification.from_pretrained(saved, use_safetensors=None)


@pytest.mark.parametrize("hostile", [False, True])
def test_a_pickle_behind_a_safetensors_index_is_refused(folder, hostile):
    weights = load_file(folder / "model.safetensors")
    trace = set_trap(folder)
    if not hostile:
        torch.save(weights, folder / "pytorch_model.bin")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights, "pytorch_model.bin")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for settings in ({}, {"weights_only": False}):
        with pytest.raises(OSError, match=r"pytorch_model\.bin"):
            SparsePriorViTForImageClassification.from_pretrained(folder, **settings)
    assert not trace.exists()


def test_a_pickle_named_safetensors_is_never_opened(folder):
    trace = set_trap(folder, "model.safetensors")
    for settings in ({}, {"weights_only": False}):
        with pytest.raises(OSError, match="damaged or cut off") as caught:
            SparsePriorViTForImageClassification.from_pretrained(folder, **settings)
        assert str(folder) in str(caught.value) and not trace.exists()


def test_a_pickle_beside_safetensors_is_never_opened(folder):
    weights = (folder / "model.safetensors").read_bytes()
    trace = set_trap(folder)
    (folder / "model.safetensors").write_bytes(weights)
    SparsePriorViTForImageClassification.from_pretrained(folder)
    assert not trace.exists()


@pytest.mark.parametrize("loader", ["class", "auto class"])
def test_truncated_weights_give_one_error_that_names_the_folder(loader, folder):
    """Cut inside the length of the header, inside the header, after it, inside the data, one byte before the end."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for keep in (0, 4, 100, 8 + int.from_bytes(data[:8], "little"), len(data) // 2, len(data) - 1):
        path.write_bytes(data[:keep])
        with pytest.raises(OSError) as caught:
            LOADERS[loader](folder)
        message = str(caught.value)
        assert str(folder) in message and "damaged or cut off" in message and "\n" not in message, keep


def test_a_damaged_or_missing_config_is_named(folder):
    """Otherwise the result would be a ViT-B with random weights."""
    for content in ("", "{", '{"model_type": "sparseprior_vit"'):
        (folder / "config.json").write_text(content)
        with pytest.raises((OSError, ValueError), match=r"config\.json"):
            SparsePriorViTForImageClassification.from_pretrained(folder)
    (folder / "config.json").unlink()
    for settings in ({}, {"ignore_mismatched_sizes": True}):
        with pytest.raises(OSError, match=r"config\.json") as caught:
            SparsePriorViTForImageClassification.from_pretrained(folder, **settings)
        assert str(folder) in str(caught.value)
    with pytest.raises((OSError, ValueError), match=r"config\.json") as caught:
        AutoModelForImageClassification.from_pretrained(folder)
    assert str(folder) in str(caught.value)


def test_what_the_caller_gives_replaces_the_files(folder):
    source = make()
    expected = source(images()).logits
    (folder / "config.json").unlink()
    weights = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    for place, given in ((folder, {}), (None, {"state_dict": weights})):
        model = SparsePriorViTForImageClassification.from_pretrained(place, config=tiny(), **given)
        assert torch.equal(model(images()).logits, expected)


def test_missing_weights_are_named(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors") as caught:
        SparsePriorViTForImageClassification.from_pretrained(folder)
    assert str(folder) in str(caught.value)


def test_a_bad_prior_in_a_saved_config_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    for prior, name in (("violn", "violn"), ({"support": {"name": "fibottention", "w_min": -1}}, "w_min=-1")):
        (folder / "config.json").write_text(json.dumps({**config, "prior": prior}))
        with pytest.raises(ValueError, match=name):
            SparsePriorViTForImageClassification.from_pretrained(folder)


def test_weights_of_another_size_are_refused(folder):
    """By the error that transformers' own classes raise, in one line."""
    ours, stock = SparsePriorViTForImageClassification, ViTForImageClassification
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    stock(ViTConfig(**sizes)).save_pretrained(folder / "stock")
    for kind, place, change in ((stock, folder / "stock", {"num_labels": 7}), (ours, folder, {"num_labels": 7})):
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes") as caught:
            kind.from_pretrained(place, **change)
    assert str(caught.value).startswith(f"{folder} lacks weights that fit its config: classifier.bias (3,")
    with pytest.raises(RuntimeError, match=r"model lacks weights that fit its config: classifier\.weight .* in all"):
        ours.from_pretrained(folder, hidden_size=48)
    # A fresh head for other classes is what transformers offers for this.
    model = SparsePriorViTForImageClassification.from_pretrained(folder, num_labels=7, ignore_mismatched_sizes=True)
    assert model(images()).logits.shape == (2, 7) and model.classifier.weight.std() < 0.05
