"""Fibottention's offsets laid out on the 32x32 grid of the crops; in no paper's table."""

_base_ = "ade20k_deit_base_dense.py"
model = dict(backbone=dict(prior="fibottention"))
