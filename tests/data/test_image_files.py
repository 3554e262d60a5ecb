"""Image files as a user names them: found, read, left out."""

import numpy as np
import pytest
from PIL import Image

from vit3.data.image_files import image_files, named_images, read_rgb, readable
from vit3.errors import UserError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    Image.new("L", (5, 4), 9).save(tmp_path / "sub" / "b.PNG")
    Image.new("RGB", (5, 4), (1, 2, 3)).save(tmp_path / "a.png")
    (tmp_path / "c.jpg").write_bytes(b"no image")
    (tmp_path / "notes.txt").write_text("not an image")
    return tmp_path


def test_files(folder):
    assert [path.name for path in image_files(str(folder))] == ["a.png", "c.jpg", "b.PNG"]
    assert image_files(str(folder / "a.png")) == [folder / "a.png"]


@pytest.mark.parametrize("images", [None, "missing", "."])
def test_nothing_there(tmp_path, monkeypatch, images):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="images"):
        image_files(images)


def test_names_of_several_kinds_name_each_file_once(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "x[1].png").write_bytes((folder / "a.png").read_bytes())
    wanted = ["x[1].png", "sub/b.PNG", "a.png", "c.jpg"]  # a name that is there is no pattern
    assert [str(path) for path in named_images(["x[1].png", "sub", "*.png", "."])] == wanted
    assert [str(path) for path in named_images(["**/*.PNG", "s*"])] == ["sub/b.PNG"]
    for words, sentence in (([], "names no image"), (["a.png", "b*.png"], "no file, folder or match of b")):
        with pytest.raises(UserError, match=sentence):
            named_images(words)


def test_damaged_files_are_left_out_and_named(folder, caplog):
    found = {path.name: pixels for path, pixels in readable(image_files(str(folder)))}
    assert found.keys() == {"a.png", "b.PNG"}
    assert found["a.png"].shape == (4, 5, 3) and (found["a.png"] == [1, 2, 3]).all() and (found["b.PNG"] == 9).all()
    assert "c.jpg cannot be decoded" in caplog.text
    with pytest.raises(UserError, match="c.jpg cannot be decoded"):
        read_rgb(folder / "c.jpg")


def test_turned_as_the_camera_says(tmp_path):
    image = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(4, 6))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned to the right
    image.save(tmp_path / "a.png", exif=exif)
    assert read_rgb(tmp_path / "a.png").shape == (4, 6, 3)
    assert np.array_equal(read_rgb(tmp_path / "a.png", upright=True)[..., 0], np.rot90(np.asarray(image), -1))


def test_sixteen_bits_are_scaled_and_endless_images_are_a_sentence(tmp_path, monkeypatch):
    """Pillow would clip the first to white; the second is its own kind of error."""
    Image.fromarray(np.full((4, 6), 40_000, np.uint16)).save(tmp_path / "a.png")
    assert (read_rgb(tmp_path / "a.png") == 40_000 >> 8).all()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(UserError, match="a.png cannot be decoded"):
        read_rgb(tmp_path / "a.png")
