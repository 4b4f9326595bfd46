"""VIOLIN Table 8 (left): VIOLIN's decay, initialised anew, on the weights of the dense model."""

_base_ = "ade20k_deit_base_dense.py"
# alpha and beta as the paper starts them on trained weights: a mask near 1.
model = dict(backbone=dict(prior=dict(_delete_=True, decay=dict(name="violin", init="finetune"))))
