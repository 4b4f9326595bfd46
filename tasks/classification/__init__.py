"""Image classification on transformers' Trainer."""
