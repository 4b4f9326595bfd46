"""VIOLIN Table 8 (left): VIOLIN's decay, initialised anew, on the weights of the dense model."""

_base_ = "ade20k_deit_base_dense.py"
model = dict(backbone=dict(prior="violin"))
