"""Batch arithmetic: the same images in every update for any number of processes and forward passes, none lost."""

from __future__ import annotations

import pytest

from vit3.data.plan import BatchPlan, accumulation_for
from vit3.errors import UserError


def updates(plan: BatchPlan, epoch: int = 0, position: int = 0) -> list[dict[int, float]]:
    """For each update the images with the weight that they get in the mean gradient of all processes."""
    result: list[dict[int, float]] = []
    for rank in range(plan.world_size):
        number = -1
        for share in plan.shares(epoch, rank, position):
            number += share.first
            if number == len(result):
                result.append({})
            for image in share.images:
                weight = share.weight / len(share.images) / plan.world_size
                result[number][image] = result[number].get(image, 0) + weight
    return result


@pytest.mark.parametrize("images", [64, 70, 101])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (2, 1), (1, 4), (4, 2), (3, 1), (5, 3)])
def test_every_image_of_an_update_weighs_the_same(images, drop_last, world_size, accumulation):
    alone = updates(BatchPlan(images, 16, drop_last=drop_last))
    many = updates(BatchPlan(images, 16, world_size, accumulation, drop_last=drop_last))
    assert len(many) == len(alone) == BatchPlan(images, 16, drop_last=drop_last).updates
    for one, other in zip(alone, many):
        weighing = {image: weight for image, weight in other.items() if weight}
        assert weighing.keys() == one.keys()
        assert all(weight == pytest.approx(1 / len(one)) for weight in weighing.values())
    used = [image for update in alone for image in update]
    assert len(used) == len(set(used)) == (images // 16 * 16 if drop_last else images)


def test_epochs_have_orders_of_their_own():
    plan = BatchPlan(100, 10)
    orders = [tuple(plan.order(epoch)) for epoch in (0, 1)] + [tuple(BatchPlan(100, 10, seed=1).order(0))]
    assert len(set(orders)) == 3 and all(sorted(order) == list(range(100)) for order in orders)


@pytest.mark.parametrize(("world_size", "batch"), [(1, 16), (3, 16), (2, 12)])
def test_going_on_with_other_processes_or_batches_loses_no_image(world_size, batch):
    first = updates(BatchPlan(100, 16, 2, drop_last=False))[:3]
    rest = updates(BatchPlan(100, batch, world_size, drop_last=False), position=48)
    used = [image for update in first + rest for image, weight in update.items() if weight]
    assert sorted(used) == list(range(100))
    assert len(rest) == BatchPlan(100, batch, world_size, drop_last=False).updates_from(48)


def test_a_partial_batch_takes_as_few_passes_as_it_needs():
    """R11: 10 samples, batch 2, accumulation 4: windows of 4 and of 1; 20 on two processes likewise."""
    for world_size in (1, 2):
        plan = BatchPlan(10 * world_size, 8 * world_size, world_size, 4, drop_last=False)
        for rank in range(world_size):
            shares = list(plan.shares(0, rank))
            assert [share.last for share in shares] == [False, False, False, True, True]
            assert [len(share.images) for share in shares] == [2] * 5
            assert [share.weight for share in shares] == [0.25] * 4 + [1.0]


def test_pairs_stay_together():
    plan = BatchPlan(101, 32, 3, 2, drop_last=False, unit=2)
    for rank in range(3):
        assert all(len(share.images) % 2 == 0 for share in plan.shares(0, rank))
    assert sum(len(update) for update in updates(plan)) == 100


def test_a_process_without_images_takes_part_with_weight_zero():
    plan = BatchPlan(5, 4, 3, drop_last=False)
    last = [list(plan.shares(0, rank))[-1] for rank in range(3)]
    assert sorted(share.weight for share in last) == [0, 0, 3]
    assert all(len(share.images) == 1 for share in last)


@pytest.mark.parametrize(
    ("batch", "world_size", "limit", "passes", "largest"),
    [(4096, 8, None, 1, 512), (4096, 8, 128, 4, 128), (4096, 1, 100, 41, 100), (64, 3, 8, 3, 8), (96, 1, 7, 16, 6)],
)
def test_forward_passes_follow_from_the_limit(batch, world_size, limit, passes, largest):
    assert accumulation_for(batch, world_size, limit, unit=2) == passes
    plan = BatchPlan(batch, batch, world_size, passes, unit=2)
    assert max(len(share.images) for rank in range(world_size) for share in plan.shares(0, rank)) == largest


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((7, 1, None, 2), "engine.batch_size=7 must be even"),
        ((8, 5, None, 2), "less than 2 for each of the 5 processes; use at least 10"),
        ((8, 1, 1, 2), "engine.max_per_process=1 must be at least 2"),
    ],
)
def test_impossible_batches_are_refused(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        accumulation_for(*arguments)
