"""A dense model, images and a time budget: `sp.sparsify` gives each layer the pattern that costs least accuracy."""
