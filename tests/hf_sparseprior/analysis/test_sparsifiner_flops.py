import pytest
import torch

from hf_sparseprior.priors.layer import PriorAttention
from hf_sparseprior.priors.prior import resolve_prior
from hf_sparseprior.priors.sparsifiner import Sparsifiner
from tasks.analysis.paper_numbers import UP_SHARES, preset_flops, sparsifiner_mhsa
from tests.each import each
from tests.hf_sparseprior.attention.attention_calls import make_request

TABLE_2 = {
    178: 396.8, 158: 360.6, 138: 324.6, 119: 290.3, 99: 254.2, 79: 218.0, 60: 183.6, 40: 147.5, 20: 111.4, 10: 93.3,
    2: 78.9,
}  # fmt: skip


@each("budget", TABLE_2)
def test_every_row_of_table_2_within_a_tenth(budget):
    count = sparsifiner_mhsa(12, 6, 384, 196, budget, UP_SHARES["DeiT-S"]) / 1e6
    assert count == pytest.approx(75.27 + 24 * 196 * 384 * budget / 1e6, abs=0.01)
    assert count == pytest.approx(TABLE_2[budget], abs=0.1)


def test_a_model_counts_the_class_token_and_the_prediction_as_it_is_run():
    flops = preset_flops("deit_small", prior="sparsifiner")
    pairs = 197 + 196 * 51  # the class token sees everything, a patch 50 patches and the class token
    assert flops.attended_pairs == [6 * pairs] * 12
    assert flops.layers[0]["qk"] == flops.layers[0]["av"] == 6 * pairs * 64
    prediction = 32 * 196 * 384 + 196 * 384 * 32 + 6 * 196 * 32 * 196
    assert flops.part("chooser") == 12 * prediction
    fifty = {"predictor": {"name": "sparsifiner", "budget": 50}}
    patches = preset_flops("deit_small", prior=fifty, num_prefix_tokens=0)
    assert patches.attention == sparsifiner_mhsa(12, 6, 384, 196, 50, 1.0)
    dense = preset_flops("deit_small", prior={"predictor": {"name": "sparsifiner", "keep_rate": 1}})
    assert dense.attention == preset_flops("deit_small").attention


def test_share_of_the_up_projection_counts_products_without_a_zero():
    prior = resolve_prior({"predictor": {"name": "sparsifiner", "num_down": 3, "threshold": 0.3}}, 2, (3, 4))
    attention = PriorAttention(2, prior, head_dim=5)
    predictor = attention.predictor
    torch.manual_seed(0)
    with torch.no_grad():
        predictor.w_up.masked_fill_(torch.rand(3, 12) < 0.5, 0.0)
    q, k = torch.randn(2, 2, 2, 13, 5)
    down = predictor.coefficients(make_request(q, k, 1.0, attention.plan((3, 4), 1)))
    used = sum(
        float(coefficient > 0.3) * float(weight != 0)
        for row in down.reshape(-1, 3)
        for r, coefficient in enumerate(row)
        for weight in predictor.w_up[r]
    )
    assert predictor.up_share(down) == pytest.approx(used / (2 * 2 * 12 * 3 * 12), abs=1e-9)
    assert Sparsifiner.up_multiply_adds(prior["predictor"], 2, 12) == 2 * 12 * 3 * 12
