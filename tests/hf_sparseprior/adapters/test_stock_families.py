"""The table of stock families: every row is tested, and a new family needs only a row."""

import peft
import pytest
import torch
from transformers import ViTConfig, ViTModel
from transformers.models.vit.modeling_vit import ViTAttention, ViTEmbeddings

import hf_sparseprior as sp
from hf_sparseprior.adapters.lora import lora_config
from hf_sparseprior.adapters.stock_encoder import find_encoder
from hf_sparseprior.adapters.stock_families import STOCK_FAMILIES, StockFamily, register_stock_family
from tests.hf_sparseprior.adapters.stock_models import STOCK, TINY


class ToyEmbeddings(ViTEmbeddings):
    """Embeddings of a family that is made here."""


class ToyAttention(ViTAttention):
    """Its attention."""


class ToyConfig(ViTConfig):
    """Its config."""

    model_type = "toy_vit"


class ToyModel(ViTModel):
    """Its model."""

    config_class = ToyConfig

    def __init__(self, config):
        super().__init__(config)
        self.embeddings.__class__ = ToyEmbeddings
        for layer in self.layers:
            layer.attention.__class__ = ToyAttention


def test_every_family_is_tested():
    families = {find_encoder(case.build()).family.name for case in STOCK.values()}
    assert families == {family.name for family in STOCK_FAMILIES.values()}


@pytest.mark.parametrize("row", [("ViTEmbeddings", ("toy",)), ("ToyEmbeddings", ("toy", "swin"))])
def test_a_family_is_registered_once(row):
    before = dict(STOCK_FAMILIES)
    with pytest.raises(ValueError, match="registered already"):
        register_stock_family(StockFamily("Toy", row[0], "ToyAttention", row[1]))
    assert before == STOCK_FAMILIES


def test_a_row_is_all_that_a_family_needs(monkeypatch):
    model = ToyModel(ToyConfig(**TINY)).eval()
    with pytest.raises(ValueError, match=r"ToyModel cannot take a prior: the token layout of .* is not known here"):
        sp.apply_prior(model, "fibottention")
    monkeypatch.setitem(STOCK_FAMILIES, "ToyEmbeddings", None)
    del STOCK_FAMILIES["ToyEmbeddings"]  # monkeypatch removes the row after the test
    register_stock_family(StockFamily("Toy", "ToyEmbeddings", "ToyAttention", ("toy_vit",)))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
        before = model(images).last_hidden_state
        assert not torch.allclose(sp.apply_prior(model, "fibottention")(images).last_hidden_state, before, atol=1e-3)
        assert torch.equal(sp.remove_prior(model)(images).last_hidden_state, before)
    adapted = peft.get_peft_model(model, lora_config(model, rank=2))
    assert len(adapted.peft_config["default"].target_modules) == 2 * 3
    peft.get_peft_model(ToyModel(ToyConfig(**TINY)), sp.ViolinAdapterConfig())
