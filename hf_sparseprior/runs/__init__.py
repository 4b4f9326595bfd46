"""A training run from its configuration to results, pictures and a saved model."""
