from tests.hf_sparseprior.classification.conftest import empty_pictures  # noqa: F401  runs of that task are compared here too
