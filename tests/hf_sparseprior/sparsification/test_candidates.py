import pytest

import hf_sparseprior as sp
from hf_sparseprior.patterns.supports import SUPPORTS
from hf_sparseprior.sparsification.candidates import Candidate, default_candidates, parse_candidates
from tests.each import each


def test_every_support_of_images_is_a_candidate():
    names = {own.support["name"] for own in default_candidates(196) if own.support is not None}
    assert names == {name for name, known in SUPPORTS.items() if not known.sees_time} - {"dense"}


@each("grid", [(14, 14), (4, 4), (2, 2), (64, 64), (3, 17)])
def test_every_default_is_a_prior_on_every_grid(grid):
    candidates = default_candidates(grid[0] * grid[1])
    assert len({own.name for own in candidates}) == len(candidates)
    for own in candidates:
        slots = {name: value for name, value in vars(own).items() if name != "name" and value is not None}
        sp.resolve_prior(slots, 4, grid)


def test_candidates_are_named_by_what_is_given():
    given = ["window", {"name": "window", "pruning_ratio": 90}, '{"name": "topk", "keys": 9}']
    assert parse_candidates(given) == [
        Candidate("window", {"name": "window"}),
        Candidate("window pruning_ratio=90", {"name": "window", "pruning_ratio": 90}),
        Candidate("topk keys=9", None, {"name": "topk", "keys": 9}),
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], r"candidates=\[\] must be a list of supports"),
        ("window", "candidates='window' must be a list"),
        (["windows"], "'windows' is no prior; did you mean 'window'"),
        (["dense"], "'dense' is dense, which each layer may be anyway"),
        (["violin"], "fills the slot 'decay'"),
        (["sparsifiner"], "predictor 'sparsifiner' is learned and has not been trained here"),
        (["linformer"], "fills the slot 'mixer'"),
        (["window", "window"], "'window' is listed twice"),
        (["{window}"], "is no JSON object"),
        ([{"name": "window", "width": 3}], "has no setting 'width'"),
    ],
)
def test_bad_candidates_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        for own in parse_candidates(given):
            sp.resolve_prior({"support": own.support, "predictor": own.predictor}, 2, (4, 4))
