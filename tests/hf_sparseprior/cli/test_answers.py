"""What commands answer: the version, help of a line each, hints for wrong names, and paths that do not exist."""

import re
import shlex

import pytest
import yaml

import hf_sparseprior as sp
from hf_sparseprior import __main__
from hf_sparseprior.base.other_names import OTHER_KEYS
from hf_sparseprior.classification.command import train_config
from hf_sparseprior.classification.config import field_names
from hf_sparseprior.classification.tuning import TuningConfig
from hf_sparseprior.cli import arguments
from hf_sparseprior.images.augmentation import AugmentationConfig
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.model import model_keys
from hf_sparseprior.images.sections import SECTIONS
from hf_sparseprior.runs.config import trainer_keys
from tests.each import each
from tests.hf_sparseprior.cli.test_arguments import HEAVY, asked
from tests.processes import run_script


def test_the_version_is_answered_without_torch():
    status, out, imported = asked("--version")
    assert (status, out.strip()) == (0, f"sparseprior {sp.__version__}") and not imported & HEAVY


def test_help_has_a_line_for_each_command(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = arguments.make_parser().format_help().splitlines()
    start = lines.index("  COMMAND") + 1
    rows = [line.split(maxsplit=1) for line in lines[start : lines.index("", start)]]
    assert [name for name, _ in rows] == list(__main__.COMMANDS)
    assert all(re.match(r"(print|show|train|write|make|run|turn|check) ", text) for _, text in rows)


def examples_of_train():
    """The values of --set in the help of train, as a shell would split them."""
    help_text = arguments.SECTIONS_OF_TRAIN.partition("\nexample:")[0]
    rows = [line for line in help_text.splitlines() if line.startswith("      ") and "=" in line]
    return [shlex.split(row.strip(), comments=False)[0] for row in rows]


def test_every_example_in_the_help_of_train_is_accepted(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "stock").mkdir()
    model = sp.SparsePriorViTConfig(prior="dense", hidden_size=48, num_attention_heads=2, num_hidden_layers=1)
    model.save_pretrained(tmp_path / "stock")
    examples = examples_of_train()
    assert len(examples) >= 15 and {name.partition(".")[0] for name in examples} >= {*SECTIONS} & {"data", "trainer"}
    (tmp_path / "table.csv").touch()
    for example in examples:
        key, _, value = example.partition("=")
        section, _, name = key.partition(".")
        data = "table.csv" if name == "label_column" else "photos"
        tuning = "lora" if section == "tuning" else "full"
        arguments_of = (str(tmp_path / data), str(tmp_path / "stock"), str(tmp_path / "run"))
        config = train_config(*arguments_of, tuning=tuning, overrides=[example])
        wanted = yaml.safe_load(value)
        if name == "learning_rate":
            wanted = float(wanted)  # YAML 1.1 reads 1e-4 as text
        assert config[section][name] == wanted, example
    sections = re.findall(r"^  (\w+)", arguments.SECTIONS_OF_TRAIN, re.MULTILINE)
    assert {*sections} <= {*SECTIONS, "tuning", "distillation", "token_labels", "compression"}
    with pytest.raises(ValueError):
        train_config(*arguments_of, overrides=["trainer.learning_rat=1"])


@each(
    "wrong, message",
    [
        (lambda: sp.SparsePriorViTConfig.from_preset("vit_smal"), "did you mean 'vit_small'"),
        (lambda: sp.SparsePriorSwinConfig.from_preset("swin_tny"), "did you mean 'swin_tiny'"),
        (lambda: sp.SparsePriorViTConfig(prior="fibotention"), "did you mean 'fibottention'"),
        (
            lambda: sp.SparsePriorViTConfig(prior="fibonacci"),
            "it is a sequence, .*{name: fibottention, sequence: fibon",
        ),
        (lambda: sp.SparsePriorViTConfig(prior="fibonaci"), "did you mean 'fibonacci'. It is a sequence"),
        (lambda: sp.SparsePriorViTConfig(prior="hilbert"), "it is a curve, .*{name: violin, curves: .hilbert.}"),
        (lambda: of_support(sequence="wythof"), "did you mean 'wythoff'"),
        (lambda: of_support(order="hilbrt"), "did you mean 'hilbert'"),
        (lambda: of_support(wmin=3), "did you mean 'w_min'"),
        (lambda: of_decay(name="manhatan"), "did you mean 'manhattan'"),
        (lambda: of_decay(name="violin", curves=["peno"]), "did you mean 'peano'"),
        (lambda: of_decay(name="violin", init="growin"), "did you mean 'growing'"),
        (lambda: sp.curves.curve_rank("snak", (2, 2)), "did you mean 'snake'"),
        (lambda: sp.supports.head_offsets("radil", num_heads=2, num_tokens=16), "did you mean 'radial'"),
        (lambda: sp.ViolinAdapterConfig(decay="manhatan"), "did you mean 'manhattan'"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest_one(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()


def of_support(**settings):
    return sp.SparsePriorViTConfig(prior={"support": {"name": "fibottention", **settings}})


def of_decay(**settings):
    return sp.SparsePriorViTConfig(prior={"decay": settings})


@each(
    "given, message",
    [
        (["lst"], "did you mean list?"),
        (["list", "supprots"], "did you mean 'supports'?"),
        (["explain", "violin", "--gird", "3x3"], "did you mean --grid?"),
        (["train", "x", "--model", "y", "--out", "z", "--lr", "1"], "did you mean --set trainer.learning_rate=...?"),
        (["explain", "fibonacci"], "it is a sequence"),
        (["explain", "violin", "--time", "--model", "vit_smal"], "did you mean 'vit_small'?"),
    ],
)
def test_wrong_words_of_a_command_have_a_hint(given, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = __main__.main(given)
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr().err
    assert status == 2 and message in said.splitlines()[-1]


@each("key, meant", [("lr", "learning_rate"), ("batch_size", "per_device_train_batch_size"), ("epochs", "num_train"),
                     ("wd", "weight_decay"), ("seeed", "seed")])  # fmt: skip
def test_keys_of_a_configuration_have_other_names(key, meant, tmp_path):
    with pytest.raises(ValueError, match=f"section 'trainer' has no key '{key}'; did you mean '{meant}"):
        train_config(str(tmp_path), "vit_tiny", "out", overrides=[f"trainer.{key}=1"])


def test_a_key_without_its_section_is_answered_with_it(tmp_path):
    for key, meant in [("lr", "learning_rate"), ("seed", "seed")]:
        with pytest.raises(ValueError, match=rf"SECTION.KEY=VALUE; did you mean trainer\.{meant}=1"):
            train_config(str(tmp_path), "vit_tiny", "out", overrides=[f"{key}=1"])
    with pytest.raises(ValueError, match=r"has no key 'depth'; did you mean 'num_hidden_layers'"):
        train_config(str(tmp_path), "vit_tiny", "out", overrides=["model.depth=1"])


def test_other_names_name_keys_that_exist():
    known = {*trainer_keys(), *model_keys({"preset": "vit_tiny"})}
    for kind in (DataConfig, AugmentationConfig, TuningConfig):
        known |= {*field_names(kind)}
    for name, keys in OTHER_KEYS.items():
        assert {key for key in keys if key != name} <= known, name


NOWHERE = [
    ["predict", "./nix", ".", "--out", "x.csv"],
    ["predict", "model", "nix.png", "--out", "x.csv"],
    ["export", "nix", "out"],
    ["export", "nix", "out", "--format", "onnx"],
    ["convert", "nix.pth", "out"],
    ["convert", "nix", "out"],
    ["run-package", "nix"],
    ["train", "nix", "--model", "vit_tiny", "--out", "out"],
    ["train", ".", "--model", "./nix", "--out", "out"],
]


@each("given", NOWHERE)
def test_what_does_not_exist_is_named_with_its_path_and_what_to_give(given, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert __main__.main(given) == 2
    error = capsys.readouterr().err.strip()
    missing = next(word for word in given if "nix" in word)
    path = str(tmp_path / missing.removeprefix("./"))
    assert "\n" not in error and f"{missing} does not exist ({path}); give " in error
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_what_is_needed_says_what_lacks(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert __main__.main(["run-package", "empty"]) == 2
    assert "empty holds no exported file: it has no deployment.json" in capsys.readouterr().err
    assert __main__.main(["export", "empty", "out"]) == 2
    assert "empty is no saved model: it has no config.json; give the folder of" in capsys.readouterr().err


def test_the_directory_of_the_package_is_what_is_public(tmp_path):
    assert dir(sp) == sorted({*sp.__all__, "adapters"})
    script = (
        "import sys, hf_sparseprior as sp\n"
        "before = set(sys.modules)\n"
        "names = dir(sp)\n"
        "assert set(sys.modules) == before\n"
        "assert not [name for name in names if name.startswith('_') and name != '__version__']\n"
        "assert {'ViolinAdapterConfig', 'heads', 'predict', 'adapters'} <= set(names) and 'peft' not in sys.modules\n"
        "print(all(hasattr(sp, name) for name in names))\n"
    )
    assert run_script(script, folder=tmp_path, package=True).stdout.strip().endswith("True")
