"""Images with labels: sources, splits, augmentation, data sets for torch."""
