from tests.hf_sparseprior.classification.conftest import empty_pictures  # noqa: F401  runs of classifiers are here, too
