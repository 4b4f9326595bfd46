"""`sparseprior train`: what its arguments mean, and a run from photographs to a model."""

import json
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score
from transformers import (
    AutoModelForImageClassification,
    BeitConfig,
    BeitForImageClassification,
    DeiTConfig,
    DeiTForImageClassification,
    TimesformerConfig,
    TimesformerForVideoClassification,
)

import hf_sparseprior as sp
from hf_sparseprior.__main__ import main
from hf_sparseprior.adapters.stock_attention import stock_priors
from hf_sparseprior.analysis.decays import learned_decays
from hf_sparseprior.base import own_files
from hf_sparseprior.classification import command
from hf_sparseprior.classification.command import RECIPE, data_section, model_section, train_config
from hf_sparseprior.classification.tuning import METHODS
from hf_sparseprior.cli import arguments
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.data import load_data
from hf_sparseprior.images.model import build_model, check_pretrained
from hf_sparseprior.runs.labels import LABELS
from tasks.classification.evaluate import main as evaluate_main
from tests.each import each
from tests.processes import ROOT, run_script

SMALL = {"image_size": 16, "patch_size": 4, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
QUICK = ["trainer.use_cpu=true", "trainer.dataloader_num_workers=0", "trainer.disable_tqdm=true"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """120 digits in class folders without splits."""
    folder = tmp_path_factory.mktemp("photos")
    digits = load_digits()
    for number in range(120):
        file = folder / ("even", "odd")[digits.target[number] % 2] / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray((16 * digits.images[number]).clip(0, 255).astype(np.uint8)).convert("RGB").save(file)
    return folder


@pytest.fixture(scope="module")
def deit(tmp_path_factory):
    """A small DeiT of transformers."""
    folder = tmp_path_factory.mktemp("stock") / "deit"
    DeiTForImageClassification(DeiTConfig(**SMALL, intermediate_size=48, num_labels=3)).save_pretrained(folder)
    return folder


def run(photos, model, out, *options):
    given = ["train", str(photos), "--model", str(model), "--out", str(out), *options, "--set", *QUICK]
    return main(given)


@pytest.mark.slow
def test_from_photographs_and_a_stock_model_to_ours(photos, deit, tmp_path, capsys):
    out = tmp_path / "run"
    options = ["--prior", "fibottention+violin", "--tuning", "lora", "--epochs", "1"]
    assert run(photos, deit, out, *options) == 0
    said = capsys.readouterr().out
    assert "trains on 72 images of 2 classes ['even', 'odd']" in said and f"sparseprior predict {out}" in said
    results = json.loads((out / "results.json").read_text())
    assert results["prior"] == "fibottention+violin" and results["method"] == "lora" and results["steps"] == 3
    assert results["trainable_parameters"] < results["parameters"] and (out / "report.md").is_file()
    model = AutoModelForImageClassification.from_pretrained(out / "model")
    assert isinstance(model, sp.SparsePriorViTForImageClassification) and model.config.id2label == {0: "even", 1: "odd"}
    start = DeiTForImageClassification.from_pretrained(deit).state_dict()["deit.embeddings.position_embeddings"]
    assert (model.vit.embeddings.position_embeddings == start).all()  # LoRA leaves it
    time = (out / "results.json").stat().st_mtime_ns
    assert run(photos, deit, out, *options) == 0 and (out / "results.json").stat().st_mtime_ns == time
    assert run(photos, deit, out, "--epochs", "1") == 2
    assert "belongs to another run" in capsys.readouterr().err
    again = tmp_path / "again"
    assert run(photos, out, again, "--epochs", "1") == 0  # of a finished run
    assert json.loads((again / "run_config.json").read_text())["model"]["pretrained"] == str(out / "model")


@pytest.mark.slow
def test_a_table_of_several_labels(tmp_path):
    """What `predict` finds in the test images gives the results' number."""
    digits = load_digits()
    labels = [[name for name, own in (("even", n % 2 == 0), ("large", n > 4)) if own] for n in digits.target[:120]]
    images = [Image.fromarray((16 * own).clip(0, 255).astype(np.uint8)) for own in digits.images[:120]]
    types = datasets.Features({"image": datasets.Image(), "labels": datasets.List(datasets.Value("string"))})
    table = datasets.Dataset.from_dict({"image": images, "labels": labels}, types)
    table.to_parquet(tmp_path / "digits.parquet")
    small = [f"model.{name}={value}" for name, value in {**SMALL, "intermediate_size": 48}.items()]
    options = ["--labels", "several", "--epochs", "1", "--prior", "violin", "--set", *small]
    assert run(tmp_path / "digits.parquet", "vit_tiny", tmp_path / "run", *options) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    test = load_data(DataConfig(**results["config"]["data"])).splits["test"]
    for index in range(len(test)):
        test.read(index).save(tmp_path / f"{index:02}.png")
    files = [tmp_path / f"{index:02}.png" for index in range(len(test))]
    sp.predict(tmp_path / "run", files, tmp_path / "found.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    found = np.array([[row["probabilities"][row["labels"].index(name)] for name in ("even", "large")] for row in rows])
    expected = average_precision_score(test.labels, found)
    assert len(rows) == 24 and results["metrics"]["test_mean_average_precision"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_train_low_run_high(photos, deit, tmp_path):
    """The stock model learned at 16 pixels. With a learning rate of 0 its positions stay what they became."""
    out = tmp_path / "run"
    settings = ["model.image_size=32", "trainer.progressive_sizes=[16,24,32]", "trainer.gradient_checkpointing=true"]
    settings += ["trainer.learning_rate=0", "augmentation.mixup=0.5"]
    assert run(photos, deit, out, "--prior", "fibottention", "--epochs", "1", "--set", *settings) == 0
    model = AutoModelForImageClassification.from_pretrained(out / "model")
    start = DeiTForImageClassification.from_pretrained(deit).state_dict()["deit.embeddings.position_embeddings"]
    patches = start[:, 2:].mT.unflatten(2, (4, 4))
    patches = torch.nn.functional.interpolate(patches, size=(8, 8), mode="bicubic").flatten(2).mT
    assert model.vit.embeddings.position_embeddings.equal(torch.cat([start[:, :2], patches], 1))
    assert model.config.image_size == 32 and model.config.prior["support"]["w_max"] is None
    processor = json.loads((out / "model" / "preprocessor_config.json").read_text())
    assert processor["crop_size"] == {"height": 32, "width": 32}


@pytest.mark.slow
def test_a_support_of_the_users(photos, deit, own_file, tmp_path, capsys):
    """Train, go on, predict, and evaluate by the code in the model's folder."""
    out, options = tmp_path / "run", ["--prior", "cross+columns", "--epochs", "1"]
    assert run(photos, deit, out, *options) == 2 and "'cross'" in capsys.readouterr().err and not out.exists()
    imports = ["--import", str(own_file)]
    assert run(photos, deit, out, *options, *imports) == 0
    assert json.loads((out / "results.json").read_text())["prior"] == "cross+columns"
    (out / "results.json").unlink()  # as if it had ended after its last checkpoint
    shutil.rmtree(out / "model")
    assert run(photos, deit, out, *options, *imports) == 0
    assert json.loads((out / "results.json").read_text())["resumed_from"] == "checkpoint-3"
    image = next(photos.rglob("*.png"))
    assert main(["predict", str(out), str(image), "--out", str(tmp_path / "found.csv"), *imports]) == 0
    assert (tmp_path / "found.csv").read_text().count(image.name) == 1
    script = """
import sys, transformers
model = transformers.AutoModelForImageClassification.from_pretrained(sys.argv[1], trust_remote_code=True)
assert model.config.prior["support"]["name"] == "cross" and model.config.prior["decay"]["name"] == "columns"
"""
    run_script(script, str(out / "model"), folder=tmp_path)


@pytest.mark.slow
def test_the_commands_of_the_page_about_own_supports(photos, own_file, monkeypatch):
    page = (ROOT / "docs" / "how-to" / "own-support.md").read_text()
    block = page.partition("```python\n")[2].partition("```")[0]
    own_file.write_text(block.partition("\nconfig =")[0])
    monkeypatch.chdir(own_file.parent)
    Path("photos").symlink_to(photos)
    commands = page.partition("```sh\n")[2].partition("```")[0].splitlines()
    assert [line.split()[1] for line in commands] == ["explain", "train", "predict", "export"]
    for line in commands:
        quick = ["--set", *QUICK, "trainer.max_steps=1", "model.image_size=32"] if " train " in line else []
        assert main([*line.split()[1:], *quick]) == 0, line
        sp.supports.SUPPORTS.pop("cross")  # each is a process of its own
        own_files.IMPORTED.clear()
    assert Path("labels.csv").read_text().count(".png") == 120 and Path("ready/own_cross.py").is_file()


def test_a_stock_model_computes_the_same_as_ours(deit):
    classes = [f"LABEL_{number}" for number in range(3)]
    built = build_model({"pretrained": str(deit)}, classes).eval()
    stock = DeiTForImageClassification.from_pretrained(deit).eval()
    assert isinstance(built.config, sp.SparsePriorViTConfig)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(built(images).logits, stock(images).logits, atol=1e-5)


@pytest.fixture(scope="module")
def beit(tmp_path_factory):
    """A small BEiT of transformers; no family of ours is its counterpart."""
    folder = tmp_path_factory.mktemp("stock") / "beit"
    BeitForImageClassification(BeitConfig(**SMALL, intermediate_size=48, num_labels=3)).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.25] * 3}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("tuning", ["lora", "violin"])
def test_a_model_without_a_counterpart_stays_what_it_is_and_gets_a_prior(tuning, photos, beit, tmp_path, capsys):
    out = tmp_path / "run"
    assert run(photos, beit, out, "--prior", "fibottention+violin", "--tuning", tuning, "--epochs", "1") == 0
    results = json.loads((out / "results.json").read_text())
    assert results["prior"] == "fibottention+violin" and results["steps"] == 3 and results["pruning_ratio"] is None
    model = AutoModelForImageClassification.from_pretrained(out / "model")
    assert isinstance(model, BeitForImageClassification) and model.config.id2label == {0: "even", 1: "odd"}
    assert len(stock_priors(model)) == 2
    lowest = min(decay.mask_row(patch).min().item() for decay in learned_decays(model) for patch in range(16))
    assert results["max_decay_change"] == pytest.approx(1 - lowest, abs=1e-12)
    assert json.loads((out / "model" / "preprocessor_config.json").read_text())["image_std"] == [0.25] * 3
    before = BeitForImageClassification.from_pretrained(beit).state_dict()
    changed = {name for name, value in model.state_dict().items() if name in before and not value.equal(before[name])}
    touched = {"lora": ("classifier", "q_proj", "v_proj"), "violin": ("classifier",)}[tuning]
    assert changed and all(any(part in name for part in touched) for name in changed)
    assert evaluate_main([str(out / "model"), "--out", str(tmp_path / "evaluation")]) == 0
    measured = json.loads((tmp_path / "evaluation" / "results_test.json").read_text())["metrics"]
    assert measured == pytest.approx({name: results["metrics"][name] for name in measured}, abs=1e-6)
    assert main(["predict", str(out), str(photos), "--out", str(tmp_path / "found.csv")]) == 0
    assert main(["export", str(out), str(tmp_path / "exported")]) == 0
    exported = AutoModelForImageClassification.from_pretrained(tmp_path / "exported")
    assert len(stock_priors(exported)) == 2
    assert main(["export", str(out), str(tmp_path / "licensed"), "--license", "mit"]) == 2
    assert main(["export", str(beit), str(tmp_path / "plain")]) == 2
    said = capsys.readouterr().err
    assert "--license mit is for cards of our models" in said and "without a prior; upload it itself" in said
    assert not (tmp_path / "licensed").exists() and not (tmp_path / "plain").exists()


def test_what_a_model_without_a_counterpart_refuses(beit, tmp_path):
    for changes, message in (
        (["model.prior=fibonacci"], "fibonacci"),
        (["model.hidden_sizes=3"], "section 'model' has no key 'hidden_sizes'; did you mean 'hidden_size'"),
        (["model.family=sparseprior_vit"], "are of no known source"),
    ):
        with pytest.raises(ValueError, match=message):
            config = train_config(str(tmp_path), str(beit), "out", overrides=changes)
            check_pretrained(config["model"])
    with pytest.raises(ValueError, match="has no weights for"):
        build_model({"pretrained": str(beit), "num_hidden_layers": 3}, ["a", "b"])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "vit_tinny",
            r"vit_tinny must be a preset, a folder of a model, or OWNER/NAME .*; did you mean vit_tiny",
        ),
        ("nothing", "presets: .*vit_small"),
    ],
)
def test_unknown_models_are_named(model, message):
    with pytest.raises(OSError, match=message):
        model_section(model)


def test_a_video_model_is_refused(tmp_path):
    small = {**SMALL, "intermediate_size": 48, "num_frames": 2}
    TimesformerForVideoClassification(TimesformerConfig(**small)).save_pretrained(tmp_path / "clips")
    with pytest.raises(ValueError, match="takes clips, not images"):
        train_config(str(tmp_path), str(tmp_path / "clips"), "out")


def test_data_is_known_by_its_form(tmp_path):
    (tmp_path / "table.csv").touch()
    assert data_section(str(tmp_path / "table.csv")) == {"source": "csv", "path": str(tmp_path / "table.csv")}
    assert data_section(str(tmp_path))["source"] == "csv"
    (tmp_path / "other.parquet").touch()
    with pytest.raises(ValueError, match="tables of several kinds, csv, parquet; name one file"):
        data_section(str(tmp_path))
    (tmp_path / "photo.jpg").touch()
    wanted = {"source": "parquet", "path": str(tmp_path / "other.parquet")}
    assert data_section(str(tmp_path / "other.parquet")) == wanted
    with pytest.raises(ValueError, match=r"photo.jpg must be a folder of images or of tables, or one table \(.csv, .p"):
        data_section(str(tmp_path / "photo.jpg"))
    with pytest.raises(OSError, match="nowhere does not exist"):
        data_section(str(tmp_path / "nowhere"))
    (tmp_path / "images").mkdir()
    assert data_section(str(tmp_path / "images"))["source"] == "imagefolder"


def test_arguments_become_a_configuration(tmp_path):
    whole = train_config(str(tmp_path), "vit_tiny", "out")
    assert whole["trainer"]["num_train_epochs"] == 20 and whole["trainer"]["layer_decay"] == 1.0
    assert whole["model"]["preset"] == "vit_tiny" and whole["tuning"] == {"method": "full"}
    timed = train_config(
        str(tmp_path), "vit_tiny", "out", length={"minutes": 3}, overrides=["trainer.learning_rate=1e-4"]
    )
    assert timed["trainer"]["minutes"] == 3 and timed["trainer"]["learning_rate"] == 1e-4
    assert "num_train_epochs" not in timed["trainer"]
    with pytest.raises(ValueError, match=r"tuning\.method=lora changes a part of a saved model"):
        train_config(str(tmp_path), "vit_tiny", "out", tuning="lora")
    with pytest.raises(ValueError, match="section 'trainer' has no key 'lr'"):
        train_config(str(tmp_path), "vit_tiny", "out", overrides=["trainer.lr=1"])


def test_the_recipe_is_that_of_the_file():
    file = yaml.safe_load((ROOT / "configs" / "recipes" / "finetune.yaml").read_text())
    del file["data"]
    file["trainer"]["learning_rate"] = float(file["trainer"]["learning_rate"])  # 5e-4 is text in YAML 1.1
    assert file == RECIPE
    ways = yaml.safe_load((ROOT / "configs" / "classification" / "tuning.yaml").read_text())["matrix"]["method"]
    part = {name: ways["lora"][name] for name in ("model", "trainer")}
    part["trainer"]["learning_rate"] = float(part["trainer"]["learning_rate"])
    assert part == command.PART


def test_the_parser_knows_all_choices():
    assert arguments.TUNING == METHODS and arguments.LABELS == LABELS


def test_nothing_is_written_for_a_bad_value(photos, tmp_path, capsys):
    assert run(photos, "vit_tiny", tmp_path / "run", "--epochs", "-1") == 2
    assert "trainer.num_train_epochs=-1.0 must be 0 or more" in capsys.readouterr().err
    assert run(Path(photos, "even"), "vit_tiny", tmp_path / "run") == 2
    assert not (tmp_path / "run").exists()


VIOLIN = {"name": "violin", "init": "growing"}


@each(
    "prior, saved, wanted",
    [
        ("violin", None, {"decay": VIOLIN}),
        ("fibottention+violin", "fibottention", {"support": "fibottention", "decay": VIOLIN}),
        ("violin+clip+localvit", "dense", {"decay": VIOLIN, "extras": ["localvit"], "time": "clip"}),
        ("fibottention", None, "fibottention"),
        ("violin", "violin", "violin"),  # keeps the scalars that the model has learned
        ("violin", {"support": None, "decay": {"name": "violin"}}, "violin"),
        ("manhattan", [{"decay": {"name": "violin"}}, {"decay": None}], "manhattan"),
    ],
)
def test_a_decay_that_a_saved_model_lacks_starts_at_none_and_moves(prior, saved, wanted, tmp_path):
    ours, stock = {} if saved is None else {"prior": saved}, {} if saved is None else {"sparse_prior": {"prior": saved}}
    for config in (ours, stock):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert command.prior_for_saved(prior, str(tmp_path)) == wanted


def test_a_prior_by_name_on_a_stock_model_starts_as_that_model(deit, tmp_path):
    (tmp_path / "photos").mkdir()
    model = train_config(str(tmp_path / "photos"), str(deit), "out", prior="violin")["model"]
    assert model["prior"] == {"decay": VIOLIN}
    built = build_model({key: model[key] for key in ("pretrained", "prior")}, list("abc")).eval()
    stock = DeiTForImageClassification.from_pretrained(deit).eval()
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(built(images).logits, stock(images).logits, atol=1e-5)
    fresh = train_config(str(tmp_path / "photos"), "vit_tiny", "out", prior="violin")
    assert fresh["model"]["prior"] == "violin"
