"""Sets of images: what is read of each kind of place, and what is refused in words."""

import numpy as np
import pytest
import torch
from PIL import Image

from vit3.data import open_split
from vit3.errors import UserError
from vit3.generation.image_sets import open_images

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 6, 4, 3), dtype=np.uint8)


def write_folder(folder, images=PIXELS):
    """One PNG per image, the last in a folder below; returns the folder."""
    for i, image in enumerate(images):
        path = folder / "z" / f"{i}.png" if i == len(images) - 1 else folder / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return folder


def pixels_of(place, batch_size=2):
    images = open_images(str(place), "reference")
    batches = list(images.batches(batch_size))
    assert all(batch.dtype == torch.uint8 for batch in batches)
    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert images.n == sum(map(len, batches)) and (*images.size, 3) == tuple(batches[0].shape[1:])
    return torch.cat(batches).numpy()


@pytest.mark.parametrize("batch_size", [1, 2, 5, 9])
def test_folder_at_any_depth(tmp_path, batch_size):
    np.testing.assert_array_equal(pixels_of(write_folder(tmp_path), batch_size), PIXELS)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("batch_size", [2, 9])
def test_archive(tmp_path, save, batch_size):
    save(tmp_path / "a.npz", PIXELS)
    np.testing.assert_array_equal(pixels_of(tmp_path / "a.npz", batch_size), PIXELS)


@pytest.mark.parametrize("grey", [PIXELS[..., 0], PIXELS[..., :1]])
def test_grey_archive_has_equal_channels(tmp_path, grey):
    np.savez(tmp_path / "a.npz", grey)
    found = pixels_of(tmp_path / "a.npz")
    np.testing.assert_array_equal(found, np.repeat(PIXELS[..., :1], 3, axis=-1))


@pytest.mark.parametrize(("place", "split", "n"), [("digits", "train", 1437), ("digits:val", "val", 360)])
def test_digits(place, split, n):
    found = pixels_of(place, 100)
    assert found.shape == (n, 8, 8, 3)
    np.testing.assert_array_equal(found[..., 1], open_split("digits", None, split, 1, "raise").images)


def refused(place, text):
    with pytest.raises(UserError, match=text):
        open_images(str(place), "reference")


def test_refused_folders(tmp_path):
    refused(tmp_path / "no", "reference=.*no: no such folder; give a folder of images, a file.npz or digits")
    refused("digits:test", "reference=digits:test: the digits have the splits train and val")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no image is there")
    refused(write_folder(tmp_path / "one", PIXELS[:1]), "one holds 1 image; a set needs at least 2")
    mixed = write_folder(tmp_path / "mixed")
    Image.fromarray(PIXELS[0, :3]).save(mixed / "odd.png")
    refused(mixed, r"5 images are 6x4 and 1 are not \(as .*odd.png\); bring all to one size")


def test_unreadable_files_are_counted_and_named(tmp_path):
    folder = write_folder(tmp_path)
    whole = (folder / "1.png").read_bytes()
    (folder / "1.png").write_bytes(whole[:-20])  # its header is whole
    (folder / "3.png").write_bytes(b"no image")
    refused(folder, r"2 of 5 images cannot be read \(.*1.png, .*3.png\); replace or remove them")


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (dict(other=PIXELS), "holds no images: there is no arr_0 in it"),
        (dict(arr_0=PIXELS / 255), r"arr_0 is float64 \(5, 6, 4, 3\); images are uint8"),
        (dict(arr_0=PIXELS[..., :2]), r"arr_0 is uint8 \(5, 6, 4, 2\)"),
        (dict(arr_0=PIXELS[:1]), "holds 1 image; a set needs at least 2"),
    ],
)
def test_refused_archives(tmp_path, arrays, text):
    np.savez(tmp_path / "a.npz", **arrays)
    refused(tmp_path / "a.npz", text)


def test_damaged_archives(tmp_path):
    refused(tmp_path / "a.npz", "a.npz: no such file")
    (tmp_path / "a.npz").write_bytes(b"no archive")
    refused(tmp_path / "a.npz", "a.npz cannot be read")
    np.savez(tmp_path / "b.npz", np.zeros((100, 20, 20, 3), np.uint8))
    data = bytearray((tmp_path / "b.npz").read_bytes())
    data[len(data) // 2] ^= 1  # far behind the header
    (tmp_path / "b.npz").write_bytes(data)
    with pytest.raises(UserError, match="b.npz is damaged"):
        list(open_images(str(tmp_path / "b.npz"), "samples").batches(2))


def test_objects_are_never_unpickled(tmp_path):
    np.savez(tmp_path / "a.npz", np.array([{}, {}], dtype=object))
    refused(tmp_path / "a.npz", r"arr_0 is object \(2,\)")
