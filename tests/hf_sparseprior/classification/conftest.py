"""A run draws its two pictures here, and leaves empty files: to lay them out takes a second, more than many a run here.
test_run.py has runs that write them."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def empty_pictures():
    from hf_sparseprior.analysis.pictures import pyplot
    from hf_sparseprior.runs import plots

    def save(figure, path):
        pyplot().close(figure)
        Path(path).touch()
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "save", save)
        yield
