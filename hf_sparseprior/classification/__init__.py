"""Classifiers of images: what a configuration says, how they are trained and evaluated."""
