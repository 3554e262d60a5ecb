"""The generated patterns: repeatable, balanced, labelled as documented, and fair to no single disc."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.toy import configured
from vit3.build import build_data
from vit3.data import make_data, open_split
from vit3.data.patterns import CLASSES, IMAGES, KINDS, Patterns, arrange
from vit3.errors import UserError

SIZE = (32, 32)


@pytest.fixture(scope="module")
def scenes():
    labels = np.arange(24_000) % len(CLASSES)
    return labels, arrange(labels, np.random.default_rng(5).random((len(labels), 16)))


def of(labels, *names):
    return np.isin(labels, [CLASSES.index(name) for name in names])


def test_repeatable_and_a_function_of_the_index():
    whole, few = Patterns("val", SIZE, 3, count=600), Patterns("val", SIZE, 3, count=40)
    assert np.array_equal(whole.images[:40], few.images)
    other = [Patterns("train", SIZE, 3, count=40), Patterns("val", SIZE, 3, seed=1, count=40)]
    assert all(np.abs(few.images.astype(float) - split.images).mean() > 20 for split in other)


def test_balanced_and_distinct():
    train, val = Patterns("train", SIZE, 1), Patterns("val", SIZE, 1)
    for split, name in ((train, "train"), (val, "val")):
        assert len(split) == IMAGES[name] and len(set(np.bincount(split.labels))) == 1
    seen = {image.tobytes() for image in train.images}
    assert not any(image.tobytes() in seen for image in val.images)


@pytest.mark.parametrize("size,in_chans,mode", [((32, 32), 1, "L"), ((64, 48), 3, "RGB")])
def test_sizes_and_channels(size, in_chans, mode):
    split = Patterns("val", size, in_chans, count=13)
    image, label = split[12]
    assert (image.size, image.mode, label) == ((size[1], size[0]), mode, 0)
    assert split.images.shape == (13, *size, in_chans)


def test_the_same_scene_at_every_size():
    small, large = (Patterns("val", (side, side), 1, count=36).images[..., 0].astype(float) for side in (32, 64))
    shrunk = large.reshape(36, 32, 2, 32, 2).mean((2, 4))
    plain = [i for i in range(36) if "plain" in CLASSES[i % 12]]
    assert all(np.corrcoef(small[i].ravel(), shrunk[i].ravel())[0, 1] > 0.5 for i in plain)


def test_textures_vary_along_their_own_axis():
    split = Patterns("val", SIZE, 1, count=360)
    down, across = (np.abs(np.diff(split.images[..., 0].astype(float), axis=axis)).mean((1, 2)) for axis in (1, 2))
    ratio = down / across
    assert (ratio[split.labels == 0] > 1).all() and (ratio[split.labels == 1] < 1).all()
    assert np.median(np.abs(np.log(ratio[split.labels == 2]))) < 0.2


def test_places(scenes):
    labels, s = scenes
    for name, low, high in (("left", 0.15, 0.3), ("middle", 0.4, 0.6), ("right", 0.7, 0.85)):
        x = s.x[of(labels, f"place_{name}"), 0]
        assert low < x.min() and x.max() < high
    assert (s.radius[of(labels, "place_left"), 1] == 0).all()


def test_relations_are_as_named(scenes):
    labels, s = scenes
    kind = np.array(KINDS)[s.kind]
    assert set(kind[of(labels, "plain_alike", "plain_unlike")].ravel()) == {"bright", "dark"}
    assert set(kind[of(labels, "match_alike", "match_unlike")].ravel()) == {"level", "upright"}
    alike = kind[:, 0] == kind[:, 1]
    assert alike[of(labels, "plain_alike", "match_alike")].all()
    assert not alike[of(labels, "plain_unlike", "match_unlike")].any()
    kept = {("bright", "level"), ("dark", "upright")}
    cues = of(labels, "cue_kept", "cue_broken")
    assert [tuple(pair) in kept for pair in kind[cues]] == list(of(labels, "cue_kept")[cues])
    assert (s.quarter.sum(1) == 1).all()  # diagonally opposite


@pytest.mark.parametrize("family", ["plain", "match", "cue"])
def test_no_single_disc_tells_a_relation(scenes, family):
    """Kind and quarter of each disc are as frequent in both classes; with both discs the class is certain."""
    labels, s = scenes
    pair = [of(labels, name) for name in CLASSES if name.startswith(family)]
    for disc in range(2):
        code = 4 * s.kind[:, disc] + 2 * s.quarter[:, disc, 0] + s.quarter[:, disc, 1]
        shares = [np.bincount(code[chosen], minlength=20) / chosen.sum() for chosen in pair]
        assert np.abs(shares[0] - shares[1]).max() < 0.04 and np.count_nonzero(shares[0]) == 8


def test_mean_picture_tells_nothing_of_a_relation():
    """What any sum over pixels is built of."""
    split = Patterns("train", SIZE, 1)
    pixels = split.images[..., 0].astype(float)
    for first in (6, 8, 10):
        means = [pixels[split.labels == label].mean(0) for label in (first, first + 1)]
        error = pixels[split.labels == first].std(0) * (2 / (len(split) / 12)) ** 0.5
        assert (np.abs(means[0] - means[1]) / error).mean() < 1.2  # 0.8 is expected
    left, right = (pixels[split.labels == label].mean(0) for label in (3, 5))
    assert np.abs(left - right).max() > 40


def test_from_the_configuration():
    data = build_data(configured("data=patterns", "data.img_size=[32,40]", "data.in_chans=3"))
    assert data.classes == CLASSES and data.train[0][0].size == (40, 32)


def test_workers_see_the_same():
    split = Patterns("val", SIZE, 1, count=24)
    split.transform = lambda image: torch.from_numpy(np.array(image))
    alone, shared = (
        [x for batch, _ in torch.utils.data.DataLoader(split, 8, num_workers=n) for x in batch] for n in (0, 2)
    )
    assert all(map(torch.equal, alone, shared))


def test_wrong_arguments():
    for size in ((16, 32), (32, 65)):
        with pytest.raises(
            UserError, match=r"data.img_size=.* is not possible for patterns; use two sides of 32 to 64"
        ):
            make_data("patterns", None, 3, "raise", img_size=size)
    with pytest.raises(UserError, match="data.in_chans=2 is not possible for patterns"):
        Patterns("val", SIZE, 2)
    with pytest.raises(UserError, match="the patterns have other classes than the network"):
        open_split("patterns", None, "val", 1, "raise", classes=("a", "b"), img_size=SIZE)
