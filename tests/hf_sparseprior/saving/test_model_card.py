"""Model cards as the hub reads them: metrics in its own format, and a card that is uploaded with its model."""

import json

import pytest
import torch
import yaml
from huggingface_hub import EvalResult, HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.repocard_data import eval_results_to_model_index
from transformers import AutoModelForImageClassification

import hf_sparseprior as sp
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.saving.card import TAGS, model_card
from tests.hf_sparseprior.adapters.stock_models import STOCK
from tests.hf_sparseprior.small import small

RESULTS = {
    "metrics": {
        "test_accuracy": 0.875, "test_top5_accuracy": 1, "validation_accuracy": 0.5, "validation_loss": float("nan"),
        "test_kind": "none", "seconds": 3.0, "test_good": True, "test_none": None,
    },
    "data": "parquet in /home/somebody/cats: \"tabby\", ü # 7 images",
    "config": {"data": {"source": "parquet", "path": "/home/somebody/cats"}},
}  # fmt: skip


def header(card: str):
    """The header of a card, as YAML reads it."""
    return yaml.safe_load(card.split("---\n")[1])


def make(family="sparseprior_vit", **settings):
    torch.manual_seed(0)
    return FAMILIES[family].classifier(small(family, **settings))


@pytest.mark.parametrize("family", FAMILIES)
def test_metrics_are_in_the_hubs_own_format(family):
    config = make(family).config
    config.architectures = [FAMILIES[family].classifier.__name__]
    text = model_card(config, RESULTS)
    card = ModelCard(text)
    task = {"images": "image-classification", "clips": "video-classification"}[FAMILIES[family].takes]

    def result(split, metric, value):
        data = {"dataset_type": "cats", "dataset_name": 'parquet in cats: "tabby", ü # 7 images'}
        name = f"{split}_{metric}"
        return EvalResult(task, **data, dataset_split=split, metric_type=metric, metric_value=value, metric_name=name)

    expected = [result("test", "accuracy", 0.875), result("test", "top5_accuracy", 1)]
    expected.append(result("validation", "accuracy", 0.5))
    assert card.data.eval_results == expected
    # What the hub's library makes of these results is what stands in the card, and the card comes back as it was.
    assert header(text)["model-index"] == eval_results_to_model_index(card.data.model_name, expected)
    again = ModelCard(str(card))
    assert again.data.eval_results == expected and again.text == card.text
    assert card.data.pipeline_tag == task and "/home/somebody" not in text


def test_a_data_set_of_the_hub_has_its_name_there():
    config = make().config
    data = {"source": "hub", "path": "uoft-cs/cifar10"}
    (found,) = ModelCard(
        model_card(config, {"metrics": {"test_accuracy": 0.5}, "config": {"data": data}})
    ).data.eval_results
    assert found.dataset_type == "uoft-cs/cifar10" and found.dataset_name == "not recorded"


@pytest.mark.parametrize("results", [None, {}, {"metrics": {}}, {"metrics": {"seconds": 1.0, "test_x": float("inf")}}])
def test_without_metrics_there_is_no_index(results):
    card = ModelCard(model_card(make().config, results))
    assert card.data.eval_results is None and "model-index" not in str(card) and card.data.tags == list(TAGS)


@pytest.mark.parametrize(
    ("started_from", "by_run", "base", "row"),
    [
        ("facebook/deit-small", False, "facebook/deit-small", "facebook/deit-small"),
        ("runs/first", True, None, "first"),  # of a run it is a folder, which may be gone
        ("/home/me/hub/models--google--vit-base/snapshots/0a1b/", True, "google/vit-base", "google/vit-base"),
        ("/home/me/hub/models--google--vit-base/snapshots/0a1b", False, "google/vit-base", "google/vit-base"),
        ("/home/me/runs/first/model", True, None, "model"),
        ("/home/me/runs/first/model", False, None, None),
        ("", True, None, None),
        ("", False, None, None),
    ],
)
def test_a_card_names_the_base_model(started_from, by_run, base, row):
    config = make(prior="violin").config
    results = {"config": {"model": {"pretrained": started_from or None}}} if by_run else None
    if not by_run:
        config._name_or_path = started_from
    text = model_card(config, results)
    assert header(text).get("base_model") == base and ModelCard(text).data.base_model == base
    rows = [line for line in text.splitlines() if line.startswith("| base model")]
    assert rows == ([] if row is None else [f"| base model | {row} |"])
    assert "/home/me" not in text and "prior: violin" in text


# ---- uploading ------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """A hub of one repository: the files of its last commit, by name. Nothing leaves this machine."""
    files = {}

    class Repository:
        repo_id = "somebody/model"

    def create_commit(self, repo_id, operations, **options):
        assert repo_id == Repository.repo_id
        for operation in operations:
            with operation.as_file() as file:
                files[operation.path_in_repo] = file.read()

    def load(repo_id, **options):
        if "README.md" not in files:
            raise EntryNotFoundError("no README.md")
        return ModelCard(files["README.md"].decode())

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **options: Repository)
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    monkeypatch.setattr(ModelCard, "load", staticmethod(load))
    return files


def test_the_card_is_uploaded_with_its_model(hub, tmp_path):
    model = make()
    model.push_to_hub("model", tags=["cats", "two words: a tag"])
    card = ModelCard(hub["README.md"].decode())
    assert "prior: " + model.config.prior_name in card.text and "More Information Needed" not in card.text
    assert card.data.tags == [*TAGS, "cats", "two words: a tag"] and card.data.library_name == "transformers"
    assert "preprocessor_config.json" in hub and "modeling_sparseprior_vit.py" in hub
    for name, content in hub.items():
        (tmp_path / name).write_bytes(content)
    again = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())


def test_an_uploaded_card_follows_the_model_until_somebody_edits_it(hub):
    first, second = make(prior="dense"), make(prior="violin")
    first.push_to_hub("model")
    assert ", prior: dense" in hub["README.md"].decode()
    second.push_to_hub("model")
    assert ", prior: violin" in hub["README.md"].decode()
    hub["README.md"] = b"---\nlicense: mit\n---\nmine\n"
    first.push_to_hub("model")
    text = hub["README.md"].decode()
    assert "license: mit" in text and "mine" in text and "prior: " not in text


def test_saving_with_an_upload_uploads_all_of_it(hub, tmp_path):
    model = make()
    model.save_pretrained(tmp_path / "model", push_to_hub=True)
    assert set(hub) == {path.name for path in (tmp_path / "model").iterdir()}
    assert {"README.md", "preprocessor_config.json", "model.safetensors"} <= set(hub)
    assert ", prior: " in hub["README.md"].decode()


def test_a_stock_model_with_a_prior_says_what_it_needs_on_the_hub_too(hub):
    model = sp.apply_prior(STOCK["vit"].build(), "violin")
    model.push_to_hub("model")
    text = hub["README.md"].decode()
    assert "needs the Python package hf_sparseprior" in text and "sparse_prior.safetensors" in hub
    assert 'AutoModel.from_pretrained("PATH_OR_NAME_OF_THIS_MODEL", trust_remote_code=True)' in text
    named = {name.partition(".")[0] for name in json.loads(hub["config.json"])["auto_map"].values()}
    assert named == {"modeling_stock_prior"} and "modeling_stock_prior.py" in hub and "adapters.py" in hub
    model.push_to_hub("model")
    assert hub["README.md"].decode().count("needs the Python package") == 1
    sp.remove_prior(model)
    assert "_upload_modified_files" not in model.__dict__ and "save_pretrained" not in model.__dict__
