"""Training batches: the same from any position, whatever the loader processes and what was drawn before."""

from __future__ import annotations

import random

import pytest
import torch

from tests.toy import make_folder
from vit3.data import BatchPlan, make_data, make_train_loader


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data("folder", str(make_folder(tmp_path_factory.mktemp("images"), train=5)), 3, "raise")


def loader(data, workers=0, rank=0, **plan):
    plan = BatchPlan(len(data.train), **{"batch": 4, "drop_last": False, **plan})
    return make_train_loader(
        data.train, plan, rank, img_size=(16, 16), in_chans=3, mean=(0.5,) * 3, std=(0.5,) * 3, workers=workers,
        interpolation="random", device=torch.device("cpu"), erase_prob=0.5, auto_augment="rand-m9-mstd0.5-inc1",
        scale=(0.2, 1.0), color_jitter=0.4,
    )  # fmt: skip


def batches(loader, epoch=0, position=0):
    return [(share, images.clone(), target) for share, images, target in loader.epoch(epoch, position)]


def same(some, others):
    assert len(some) == len(others) > 0
    for (a, images_a, target_a), (b, images_b, target_b) in zip(some, others):
        assert a.images == b.images and torch.equal(images_a, images_b) and torch.equal(target_a, target_b)


def test_loader_processes_change_nothing(data):
    random.seed(1)
    alone = batches(loader(data))
    random.seed(2)
    same(alone, batches(loader(data, workers=2)))


def test_any_position_of_any_epoch(data):
    workers = loader(data, workers=1)
    whole = batches(workers, 3)
    same(whole[2:], batches(loader(data), 3, 8))
    same(whole, batches(workers, 3))
    assert not torch.equal(whole[0][1], batches(workers, 4)[0][1])


def test_a_share_can_be_read_again(data):
    reader = loader(data)
    for share, images, target in batches(reader, 2):
        again, labels = reader.load(2, share)
        assert torch.equal(images, again) and torch.equal(target, labels)


def test_erasing_is_there_and_differs_between_batches(data):
    plain = make_train_loader(
        data.train, BatchPlan(15, 4), 0, img_size=(16, 16), in_chans=3, mean=(0.5,) * 3, std=(0.5,) * 3, workers=0,
        interpolation="bilinear", device=torch.device("cpu"), erase_prob=1.0, scale=(1.0, 1.0), hflip=0.0,
        color_jitter=None,
    )  # fmt: skip
    images = torch.cat([images for _, images, _ in batches(plain)])
    erased = images.abs().amax(1) > 1.01  # normal noise leaves the range of pixels
    assert erased.flatten(1).any(1).all()
    assert len({tuple(mask.flatten().tolist()) for mask in erased}) == len(images)


def test_processes_read_different_images_and_the_same_epoch(data):
    parts = [batches(loader(data, rank=rank, world_size=2)) for rank in (0, 1)]
    whole = {i for share, *_ in batches(loader(data)) for i in share.images}
    read = [i for part in parts for share, *_ in part if share.weight for i in share.images]
    assert sorted(read) == sorted(whole)
