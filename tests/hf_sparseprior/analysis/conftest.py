"""What tests of several files need."""

import pytest

from hf_sparseprior.analysis import image_maps, pictures


@pytest.fixture
def figures(monkeypatch):
    """The figures that were written, still open."""
    drawn = []

    def keep(figure, path):
        drawn.append(figure)
        figure.savefig(path, dpi=40)
        return path

    monkeypatch.setattr(pictures, "save", keep)
    monkeypatch.setattr(image_maps, "save", keep)
    yield drawn
    for figure in drawn:
        pictures.pyplot().close(figure)
