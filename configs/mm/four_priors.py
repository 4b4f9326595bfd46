"""Rows of a comparison of priors over seeds."""

seeds = [0, 1, 2, 3, 4]
cells = dict(
    dense=dict(model=dict(backbone=dict(prior="dense"))),
    fibottention=dict(model=dict(backbone=dict(prior="fibottention"))),
    violin=dict(model=dict(backbone=dict(prior="violin"))),
    both=dict(model=dict(backbone=dict(prior="fibottention+violin"))),
)
