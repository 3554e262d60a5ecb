"""COCO-format data: labels, boxes and masks as the file means them, in every epoch's augmentation too."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from tests.detection.toy import SIZES, edit, make_coco
from vit3.data.coco import CocoImages, make_coco_eval_loader, make_coco_train_loader, make_transform
from vit3.data.plan import BatchPlan
from vit3.errors import UserError

CPU = torch.device("cpu")


@pytest.fixture
def root(tmp_path):
    return make_coco(tmp_path / "coco")


def opened(root, split="train", **options):
    return CocoImages(root / "annotations" / f"instances_{split}2017.json", root / f"{split}2017", **options)


def loader_of(data, seed=0, hflip=0.5, crop=0.5, batch=2):
    plan = BatchPlan(len(data), batch, seed=seed)
    return make_coco_train_loader(data, plan, 0, workers=0, device=CPU, hflip=hflip, crop=crop)


def test_labels_follow_the_order_of_ids_and_crowds_are_left_out(root):
    data = opened(root)
    assert data.classes == ("square", "disc") and data.category_ids == (3, 7)
    image, target = data[0]
    assert image.shape == (3, 97, 131) and image.dtype == torch.uint8
    assert target["labels"].tolist() == [2, 1] and target["image_id"] == 10
    assert target["boxes"].tolist() == [[5, 8, 27, 30], [40, 28, 62, 50]]
    for mask, (left, top, right, bottom) in zip(target["masks"], target["boxes"].int().tolist()):
        assert mask[top:bottom, left:right].all() and mask.sum() == (bottom - top) * (right - left)
    for channel, mask in enumerate(target["masks"]):
        assert image[channel][mask.bool()].eq(230).all()


def test_an_image_without_anything_belongs_to_the_data(root):
    data = opened(root)
    image, target = data[2]
    assert len(data) == len(SIZES)
    assert target["boxes"].shape == (0, 4) and target["labels"].shape == (0,)
    assert target["masks"].shape == (0, *image.shape[1:])


def test_boxes_are_cut_at_the_border_and_slivers_left_out(root):
    def change(content):
        content["annotations"][0]["bbox"] = [-5, 90, 20, 30]
        content["annotations"][1]["bbox"] = [130.5, 5, 20, 30]

    edit(root, "train", change)
    assert opened(root)[0][1]["boxes"].tolist() == [[0, 90, 15, 97]]


def test_validation_is_matched_by_name(root):
    def change(content):
        content["categories"] = [{"id": 1, "name": "disc"}]
        content["annotations"] = [a | {"category_id": 1} for a in content["annotations"] if a["category_id"] == 7]

    classes = opened(root).classes
    edit(root, "val", change)
    data = opened(root, "val", classes=classes)
    assert data.category_ids == (None, 1) and data[0][1]["labels"].tolist() == [2]
    assert data.absent() == ["square"] and opened(root).absent() == []
    with pytest.raises(UserError, match="the category disc is none of the 1 classes of the training"):
        opened(root, classes=("square",))


def test_flips_move_boxes_and_masks_together(root):
    data = opened(root)
    plain = data[0][1]
    data.transform = make_transform(hflip=1.0)
    image, target = data[0]
    assert image.dtype == torch.float32 and image.max() == pytest.approx(230 / 255)
    assert type(image) is torch.Tensor and all(type(value) is torch.Tensor for value in target.values())
    left, top, right, bottom = plain["boxes"].unbind(1)
    assert torch.equal(
        target["boxes"], torch.stack([131 - right, top, 131 - left, bottom], 1).as_subclass(torch.Tensor)
    )
    assert torch.equal(target["masks"], plain["masks"].flip(-1).as_subclass(torch.Tensor))


def test_crops_keep_boxes_around_their_masks(root):
    data = opened(root)
    data.transform = make_transform(crop=1.0)
    seen, kept = set(), []
    for index in (0, 1, 3) * 4:
        image, target = data[index]
        seen.add(tuple(image.shape[1:]))
        assert max(image.shape[1:]) <= 600 and len(target["boxes"]) == len(target["labels"]) == len(target["masks"])
        kept.append(len(target["labels"]))
        for box, mask in zip(target["boxes"], target["masks"]):
            rows, columns = mask.nonzero(as_tuple=True)
            around = torch.tensor([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
            assert (box - around).abs().max() <= 1.5
    assert len(seen) > 6 and {1, 2} <= set(kept)


def test_batches_depend_on_seed_epoch_and_image_alone(root):
    """A share read again, or an epoch begun in the middle, gives the same bits."""

    def content(loader, epoch, position=0):
        return [(share.images, images, targets) for share, images, targets in loader.epoch(epoch, position)]

    loader = loader_of(opened(root))
    first, again = content(loader, 1), content(loader_of(opened(root)), 1, 2)
    assert [share for share, *_ in first[1:]] == [share for share, *_ in again]
    for (_, images, targets), (_, others, same) in zip(first[1:], again):
        assert all(torch.equal(a, b) for a, b in zip(images, others))
        assert all(torch.equal(a[k], b[k]) for a, b in zip(targets, same) for k in a)
    share = next(loader.plan.shares(1, 0))
    images, _ = loader.load(1, share)
    assert all(torch.equal(a, b) for a, b in zip(images, first[0][1]))
    other = content(loader, 2)
    assert sorted(i for share, *_ in other for i in share) == list(range(len(SIZES)))


@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_reads_every_image_once_and_no_target(root, world_size):
    data = opened(root, "val")
    found = []
    for rank in range(world_size):
        loader = make_coco_eval_loader(data, 2, rank=rank, world_size=world_size, workers=0, device=CPU)
        targets = [target for _, part in loader for target in part]
        assert all(target.keys() == {"image_id"} for target in targets)
        found += [int(target["image_id"]) for target in targets[: loader.sampler.num_valid_samples]]
    assert sorted(found) == [10, 11, 12, 13]


def test_mistakes_are_sentences(root):
    def change(content):
        content["images"][0]["height"] = 50
        content["images"][1]["file_name"] = "gone.png"

    (root / "train2017" / "000000000003.png").write_bytes(b"no image")
    edit(root, "train", change)
    data = opened(root)
    for index, sentence in ((0, "is 97x131 and in .* 50x131"), (1, "gone.png is in"), (3, "cannot be decoded")):
        with pytest.raises(UserError, match=sentence):
            data[index]
    with pytest.raises(UserError, match="no such annotation file; check data_root"):
        opened(root, "test")
    edit(root, "train", lambda content: content["categories"].append({"id": 8, "name": "disc"}))
    with pytest.raises(UserError, match="the category disc stands twice"):
        opened(root)
    edit(root, "train", lambda content: content.pop("categories"))
    with pytest.raises(UserError, match="it has no 'categories'"):
        opened(root)


def test_grey_images_are_read_in_three_channels(root):
    Image.new("L", (131, 97), 7).save(root / "train2017" / "000000000000.png")
    assert opened(root).pixels(0).shape == (97, 131, 3)


def test_what_own_data_often_lacks(root):
    """COCOeval reads area and iscrowd; ids that are words cannot be put into tensors."""

    def lacking(content):
        for annotation in content["annotations"]:
            del annotation["area"], annotation["iscrowd"]

    edit(root, "val", lacking)
    coco = opened(root, "val").coco
    assert all(a["iscrowd"] == 0 and a["area"] == a["bbox"][2] * a["bbox"][3] > 0 for a in coco.anns.values())
    edit(root, "val", lambda content: content["categories"][0].pop("name"))
    with pytest.raises(UserError, match="a category has no 'name'"):
        opened(root, "val")
    edit(root, "train", lambda content: content["images"][0].update(id="a"))
    with pytest.raises(UserError, match="has the id 'a'; ids of images and categories must be whole numbers"):
        opened(root, "train")
