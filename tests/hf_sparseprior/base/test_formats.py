"""Saved files carry the number of their format; a newer number is refused by name, a missing one is read as before."""

import json
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageClassification, ViTConfig, ViTForImageClassification

import hf_sparseprior as sp
from hf_sparseprior.__main__ import main
from hf_sparseprior.base.formats import FORMAT_KEY, check_format
from hf_sparseprior.cli import onnx_operators
from hf_sparseprior.cli.packages import DEPLOYMENT, FILE
from hf_sparseprior.models.pretrained import load_whole_model
from tests.hf_sparseprior.small import VIT as SMALL

ABSENT = "absent"
EXPORTED = Path(__file__).parents[2] / "fixtures" / "exported.zip"


def newer(what, number=2):
    has = f"{FORMAT_KEY}={number}: {what} has format {number}"
    return f"{has}, and hf_sparseprior {sp.__version__} reads formats up to 1: update"


def rewrite(file, **changes):
    """Change keys of a JSON object; ABSENT removes one."""
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value != ABSENT}))


def test_numbers_up_to_the_newest_are_read_and_others_refused():
    for number in (1, 2, 3):
        check_format("the file", number, 3)
    for number in (4, 10**9):
        with pytest.raises(
            ValueError, match=f"=?{number}: the file has format {number}, and .* up to 3: update hf_spar"
        ):
            check_format("the file", number, 3)
    for number in ("1", 0, -1, 1.0, True, [1], None):
        with pytest.raises(ValueError, match=f"{FORMAT_KEY}=.* must be an integer of 1 or more"):
            check_format("the file", number, 3)


# ---- models ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours")
    sp.SparsePriorViTForImageClassification(sp.SparsePriorViTConfig(**SMALL, prior="violin")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stock")
    model = ViTForImageClassification(ViTConfig(**SMALL))
    sp.apply_prior(model, "violin").save_pretrained(folder)
    return folder


@pytest.fixture(params=["ours", "stock"])
def saved(request):
    """A folder, of which a test may change config.json."""
    folder = request.getfixturevalue(request.param)
    written = (folder / "config.json").read_text()
    yield folder
    (folder / "config.json").write_text(written)


def loaders(folder):
    """Every way to load a folder."""
    yield lambda: AutoModelForImageClassification.from_pretrained(folder)
    yield lambda: load_whole_model(folder, AutoModelForImageClassification)
    if json.loads((folder / "config.json").read_text())["model_type"] == "vit":
        yield lambda: sp.from_pretrained(AutoModelForImageClassification, folder)
        yield lambda: sp.load_prior(ViTForImageClassification(ViTConfig(**SMALL)), folder)
    else:
        yield lambda: AutoConfig.from_pretrained(folder)
        yield lambda: sp.SparsePriorViTConfig.from_pretrained(folder)


def test_models_carry_the_number_and_a_newer_one_is_refused(saved, capsys, tmp_path):
    assert json.loads((saved / "config.json").read_text())[FORMAT_KEY] == 1
    rewrite(saved / "config.json", **{FORMAT_KEY: 2})
    for load in loaders(saved):
        with pytest.raises(ValueError) as error:
            load()
        message = str(error.value)
        assert newer("the model") in message and "config.json: " in message and "\n" not in message
    assert main(["convert", str(saved), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert newer("the model") in line


def test_models_without_a_number_are_read_and_saved_with_one(saved, tmp_path):
    rewrite(saved / "config.json", **{FORMAT_KEY: ABSENT})
    model = AutoModelForImageClassification.from_pretrained(saved)
    assert not hasattr(model.config, FORMAT_KEY)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())[FORMAT_KEY] == 1


def test_a_stock_model_that_loses_its_prior_has_no_number(stock, tmp_path):
    model = AutoModelForImageClassification.from_pretrained(stock)
    assert not hasattr(model.config, FORMAT_KEY)
    sp.remove_prior(model).save_pretrained(tmp_path)
    assert FORMAT_KEY not in (tmp_path / "config.json").read_text()


def test_the_number_is_no_field_that_one_sets():
    config = sp.SparsePriorViTConfig(**SMALL)
    assert sp.SparsePriorViTConfig(**config.to_dict()).to_dict() == config.to_dict()
    assert FORMAT_KEY not in vars(config) and config.to_dict()[FORMAT_KEY] == 1
    with pytest.raises(ValueError, match=newer("the model", 7)):
        sp.SparsePriorViTConfig(**SMALL, **{FORMAT_KEY: 7})


# ---- adapters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["violin", "lora"])
def test_adapters_carry_the_number_and_a_newer_one_is_refused(kind, tmp_path):
    peft = pytest.importorskip("peft")
    from hf_sparseprior.adapters import lora_config
    from hf_sparseprior.adapters.saved_adapter import load_adapter

    def base():
        return sp.SparsePriorViTForImageClassification(sp.SparsePriorViTConfig(**SMALL))

    config = sp.ViolinAdapterConfig() if kind == "violin" else sp.LoraViolinConfig.from_lora(lora_config(base(), 2))
    peft.get_peft_model(base(), config).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    assert json.loads(file.read_text())[FORMAT_KEY] == 1
    for number in (ABSENT, 2):
        rewrite(file, **{FORMAT_KEY: number})
        for load in (peft.PeftModel.from_pretrained, load_adapter):
            if number == ABSENT:
                assert load(base(), tmp_path).peft_config["default"].sparse_prior_format == 1
                continue
            with pytest.raises(ValueError) as error:
                load(base(), tmp_path)
            assert str(error.value) == f"{file}: {newer('the adapter')} hf_sparseprior"
    with pytest.raises(ValueError, match=newer("the adapter")):
        type(config)(sparse_prior_format=2)


# ---- exported files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({FORMAT_KEY: 2}, newer("the exported file")),
        ({"kernels": {"operators": 2}}, "kernels.operators=2: the set of operators has format 2, and hf_sparseprior"),
        ({"kernels": {"operators": "new"}}, "kernels.operators='new' must be an integer of 1 or more"),
    ],
)
def test_exported_files_of_a_newer_number_are_refused(changes, message, tmp_path, capsys):
    about = {FORMAT_KEY: 1, "format": "aoti", "file": FILE, "kernels": {"operators": onnx_operators.VERSION}}
    (tmp_path / DEPLOYMENT).write_text(json.dumps({**about, **changes}))
    assert main(["run-package", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path / DEPLOYMENT}: {message}" in line


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    with zipfile.ZipFile(EXPORTED) as archive:
        archive.extractall(folder)
    return folder / "violin"


def test_onnx_files_carry_the_version_of_the_operators_and_an_unknown_operator_is_refused(exported, tmp_path):
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    model = onnx.load(exported / "onnx" / "model.onnx")
    versions = {part.domain: part.version for part in model.opset_import}
    assert versions[onnx_operators.DOMAIN] == onnx_operators.VERSION
    for node in model.graph.node:
        if node.domain == onnx_operators.DOMAIN:
            node.op_type += "2"
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(Exception, match=r"hf_sparseprior:DecayedAttention2.* is not a registered function/op"):
        runtime.InferenceSession(tmp_path / "model.onnx", sp.onnx_session_options(1))


def test_openvino_files_with_an_unknown_operator_are_refused(exported, tmp_path):
    pytest.importorskip("openvino")
    from hf_sparseprior.cli.runtimes import FORMATS

    text = (exported / "openvino" / "model.xml").read_text()
    assert 'type="DecayedAttention" version="hf_sparseprior"' in text
    (tmp_path / "model.xml").write_text(text.replace('type="DecayedAttention"', 'type="DecayedAttention2"'))
    (tmp_path / "model.bin").write_bytes((exported / "openvino" / "model.bin").read_bytes())
    with pytest.raises(RuntimeError, match="DecayedAttention2"):
        FORMATS["openvino"].load(tmp_path / "model.xml", 1)


def test_torch_files_with_an_unknown_operator_are_refused(exported, tmp_path, caplog):
    onnx_operators.operator("decayed_forward")
    with zipfile.ZipFile(exported / "torch" / "model.pt2") as old, zipfile.ZipFile(tmp_path / "model.pt2", "w") as new:
        for name in old.namelist():
            new.writestr(
                name, old.read(name).replace(b"hf_sparseprior.decayed_forward", b"hf_sparseprior.decayed_forward2")
            )
    with pytest.raises(RuntimeError, match="Please check the warnings above"):
        torch.export.load(tmp_path / "model.pt2")
    assert "torch.ops.hf_sparseprior.decayed_forward2.default" in caplog.text
