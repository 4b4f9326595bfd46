"""Images of class folders, as a classifier's processor takes them. test_deployment.py has their accuracy."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from hf_sparseprior.cli.labelled_images import read_class_folders, read_image

APPLIES, IGNORES = SimpleNamespace(), SimpleNamespace(exif="ignore")
PIXELS = np.arange(2 * 5 * 3, dtype=np.uint8).reshape(2, 5, 3)


def test_files_and_classes_come_in_the_order_of_their_names(tmp_path, capsys):
    for name in ("b/2.png", "b/1.png", "b/.hidden", "a/deeper/3.png", "none.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = read_class_folders(tmp_path, ["b", "c", "a"])
    assert found == [(tmp_path / "a/deeper/3.png", 2), (tmp_path / "b/1.png", 0), (tmp_path / "b/2.png", 0)]
    line = f"left out: 1 hidden ({tmp_path}/b/.hidden), 1 of no class ({tmp_path}/none.png)"
    assert capsys.readouterr().out == f"{line}\n"


def test_channels_and_orientation(tmp_path):
    file, exif = tmp_path / "turned.png", Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    Image.fromarray(PIXELS).save(file, exif=exif)
    assert np.array_equal(np.asarray(read_image(file, IGNORES, 3)), PIXELS)
    assert np.array_equal(np.asarray(read_image(file, APPLIES, 3)), np.rot90(PIXELS, -1))
    assert np.asarray(read_image(file, IGNORES, 1)).shape == (2, 5)


@pytest.mark.parametrize(
    ("channels", "message"), [(3, "deep.png has more than 8 bits a channel"), (4, "1 or 3 channels, .* takes 4")]
)
def test_images_that_would_be_cut_are_refused(tmp_path, channels, message):
    file = tmp_path / "deep.png"
    Image.fromarray(np.full((4, 4), 60_000, dtype=np.uint16)).save(file)
    with pytest.raises(ValueError, match=message):
        read_image(file, APPLIES, channels)
