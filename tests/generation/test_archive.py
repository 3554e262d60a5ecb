"""All images in one .npz: as numpy reads it, grey as colours, same bytes again, never half a file."""

from __future__ import annotations

import numpy as np
import pytest

from tests.generation.stub import Stub
from vit3.errors import UserError
from vit3.generation.archive import archive_length, write_archive


def images(channels, n=4):
    return [Stub(channels).image(0, i).numpy() for i in range(n)]


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_content(tmp_path, channels):
    write_archive(tmp_path / "a.npz", iter(images(channels)), [2, 0, 2, 0])
    with np.load(tmp_path / "a.npz", allow_pickle=False) as archive:
        assert archive.files == ["arr_0", "arr_1"] and archive["arr_0"].dtype == np.uint8
        expected = np.stack(images(channels))
        assert np.array_equal(archive["arr_0"], expected.repeat(3, axis=3) if channels == 1 else expected)
        assert archive["arr_1"].tolist() == [2, 0, 2, 0] and archive["arr_1"].dtype == np.int64
    assert archive_length(tmp_path / "a.npz") == 4


def test_same_bytes(tmp_path):
    for name in "ab":
        write_archive(tmp_path / name, images(3), range(4))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_slices_of_a_larger_array(tmp_path):
    """Images need not be contiguous."""
    write_archive(tmp_path / "a.npz", (image[:, ::-1] for image in images(3)), range(4))
    assert np.array_equal(np.load(tmp_path / "a.npz")["arr_0"], np.stack(images(3))[:, :, ::-1])


def test_an_old_archive_stays_where_the_new_one_fails(tmp_path):
    write_archive(tmp_path / "a.npz", images(3, 2), range(2))
    with pytest.raises(UserError, match=r"image 2 is \(4, 4, 3\), and those before are \(5, 7, 3\)"):
        write_archive(tmp_path / "a.npz", [*images(3, 2), np.zeros((4, 4, 3), np.uint8)], range(3))
    assert archive_length(tmp_path / "a.npz") == 2 and [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_length_of_what_is_no_archive(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK")
    np.savez(tmp_path / "b.npz", other=np.zeros(3))
    assert [archive_length(tmp_path / name) for name in ("a.npz", "b.npz", "none.npz")] == [0, 0, 0]
