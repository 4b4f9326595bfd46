"""Segmentation with mmsegmentation; importing it registers what the configs name (mm's `custom_imports`)."""

from mmseg.registry import MODELS

from tasks.dense.backbone import SparsePriorViT

MODELS.register_module(module=SparsePriorViT, force=True)
