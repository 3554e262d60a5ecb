"""Cached latents: by number, from any process, mirrored as asked and repeatably; a folder that is not whole says so."""

from __future__ import annotations

import json
import pickle
from functools import partial

import pytest
import torch

from tests.toy import compose_config
from vit3.build import build_data, build_eval_loader, build_train_loader
from vit3.config import TrainConfig, typed
from vit3.data import (
    BatchPlan,
    CachedLatents,
    make_data,
    make_latent_eval_loader,
    make_latent_train_loader,
    open_split,
)
from vit3.data.latent_shards import (
    INDEX_NAME,
    checked_finite,
    finish_cache,
    plan_shards,
    read_index,
    start_cache,
    write_shard,
)
from vit3.engine.distributed import Processes
from vit3.errors import UserError

CPU = torch.device("cpu")
COUNTS, SIZE = {"train": 11, "val": 5}, 4
FACTS = dict(scale=0.5, shift=0.0, channels=2, latent_size=[2, 3], img_size=[4, 6], flips=True, dtype="float16")
CLASSES = ("ant", "bee", "cat")


def moments_of(split: str, index: int) -> torch.Tensor:
    """What image ``index`` has: its number in every entry, negative in validation."""
    return torch.full((4, 2, 3), float(index + 1) * (1 if split == "train" else -1))


def write(root, *, flips=True, finish=True, settings=(("flips", True),)):
    """A folder of latents of 11 and 5 images; mirrored ones are 100 larger."""
    start_cache(root, dict(settings), FACTS | dict(flips=flips), CLASSES)
    shards = plan_shards(COUNTS, SIZE)
    for shard in shards:
        moments = torch.stack([moments_of(shard.split, i) for i in shard.images]).half()
        labels = torch.tensor([i % 3 for i in shard.images])
        write_shard(root / shard.name, moments, moments + 100 if flips else None, labels)
    if finish:
        assert finish_cache(root, shards) == COUNTS
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write(tmp_path_factory.mktemp("latents") / "cache")


def train_loader(data, workers=0, hflip=0.5, **plan):
    plan = BatchPlan(len(data), **{"batch": 4, "drop_last": False, **plan})
    return make_latent_train_loader(data, plan, 0, hflip=hflip, workers=workers, device=CPU)


def batches(loader, epoch=0, position=0):
    return [(share.images, moments.clone(), labels) for share, moments, labels in loader.epoch(epoch, position)]


def test_files_have_so_many_images_in_order():
    shards = plan_shards(COUNTS, SIZE)
    assert [(s.name, list(s.images)) for s in shards][2:4] == [
        ("train-00002.safetensors", [8, 9, 10]), ("val-00000.safetensors", [0, 1, 2, 3]),
    ]  # fmt: skip


def test_moments_and_labels_by_number(root):
    for split, count in COUNTS.items():
        data = CachedLatents(root, split)
        assert len(data) == count and data.classes == CLASSES and data.facts["scale"] == 0.5
        for i in (*range(count), 0):
            moments, label = data[i]
            assert moments.dtype == torch.float32 and torch.equal(moments, moments_of(split, i)) and label == i % 3
        for outside in (count, -1):
            with pytest.raises(IndexError):
                data[outside]


def test_labels_are_places_in_the_class_map_that_is_given(root):
    data = CachedLatents(root, "val", classes=("cat", "dog", "bee", "ant"))
    assert [data[i][1] for i in range(3)] == [3, 2, 0]
    with pytest.raises(UserError, match="not trained for: cat"):
        CachedLatents(root, "val", classes=("ant", "bee"))


def test_other_processes_map_the_files_themselves(root):
    data = CachedLatents(root, "train")
    data[0]
    assert torch.equal(pickle.loads(pickle.dumps(data))[9][0], moments_of("train", 9))
    loader = torch.utils.data.DataLoader(data, 4, num_workers=2)  # forked with a file open
    assert torch.cat([moments[:, 0, 0, 0] for moments, _ in loader]).tolist() == [i + 1 for i in range(11)]


def test_mirrored_ones_are_drawn_by_image_and_epoch_alone(root):
    data = CachedLatents(root, "train")
    alone = batches(train_loader(data))
    for other in (batches(train_loader(data, workers=2)), batches(train_loader(data))):
        for (images, moments, labels), (images2, moments2, labels2) in zip(alone, other, strict=True):
            assert images == images2 and torch.equal(moments, moments2) and torch.equal(labels, labels2)
    later = batches(train_loader(data), 0, 8)
    assert len(later) == 1 and torch.equal(later[0][1], alone[2][1])
    for images, moments, labels in alone:
        plain = torch.stack([moments_of("train", i) for i in images])
        assert ((moments == plain) | (moments == plain + 100)).all() and labels.tolist() == [i % 3 for i in images]


@pytest.mark.parametrize(("hflip", "share"), [(0.0, 0.0), (1.0, 1.0), (0.25, 0.25)])
def test_as_many_are_mirrored_as_asked(root, hflip, share):
    loader = train_loader(CachedLatents(root, "train"), hflip=hflip)
    values = torch.cat([m[:, 0, 0, 0] for epoch in range(40) for _, m, _ in batches(loader, epoch)])
    assert (values > 100).float().mean().item() == pytest.approx(share, abs=0.08 if 0 < share < 1 else 0)


def test_evaluation_is_in_order_and_never_mirrored(root):
    data = CachedLatents(root, "val")
    make_latent_train_loader(data, BatchPlan(5, 4), 0, hflip=1.0, workers=0, device=CPU)
    parts = [
        make_latent_eval_loader(data, 2, rank=rank, world_size=2, workers=0, device=CPU) for rank in (0, 1)
    ]  # fmt: skip
    read = [torch.cat([m[:, 0, 0, 0] for m, _ in part]).tolist() for part in parts]
    assert read == [[-1, -3, -5], [-2, -4, -1]] and len(parts[0].dataset) == 5


def test_a_share_can_be_read_again(root):
    loader = train_loader(CachedLatents(root, "train"))
    for share, moments, labels in loader.epoch(2):
        again, same = loader.load(2, share)
        assert torch.equal(moments, again) and torch.equal(labels, same)


def test_mirroring_needs_mirrored_latents(tmp_path):
    data = CachedLatents(write(tmp_path / "cache", flips=False), "train")
    assert len(batches(train_loader(data, hflip=0.0))) == 3
    with pytest.raises(UserError, match="augment.hflip=0.5 needs latents of mirrored images.*flips=true"):
        train_loader(data)


def test_sizes_must_agree(root):
    options = dict(on_bad_image="raise", img_size=[2, 3])
    data = make_data("latents", str(root), 2, **options)
    assert (len(data.train), len(data.val), data.classes) == (11, 5, CLASSES)
    with pytest.raises(UserError, match=r"data.in_chans=3, but data.root=.* holds latents of 2x2x3 .*data.in_chans=2"):
        make_data("latents", str(root), 3, **options)
    with pytest.raises(UserError, match=r"data.img_size=\[3, 2\], but root=.*; set data.img_size=\[2, 3\]"):
        open_split("latents", str(root), "val", 2, "raise", "root", img_size=(3, 2))
    with pytest.raises(UserError, match="data.stream=True means nothing to data=latents"):
        make_data("latents", str(root), 2, **options, stream=True)
    with pytest.raises(UserError, match="has no split dev; it has: train, val"):
        make_data("latents", str(root), 2, **options, val_split="dev")


def test_folders_that_are_not_whole(tmp_path, root):
    opened = partial(CachedLatents, split="train")
    with pytest.raises(UserError, match=f"data.root={tmp_path} has no {INDEX_NAME}; give the output folder"):
        opened(tmp_path)
    with pytest.raises(UserError, match="caching has not ended; the same tools/cache_latents.py command"):
        opened(write(tmp_path / "begun", finish=False))
    whole = write(tmp_path / "whole")
    (whole / "train-00001.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="train-00001.safetensors cannot be read .*; remove it and run the same"):
        opened(whole)[5]
    (whole / "train-00001.safetensors").unlink()
    with pytest.raises(UserError, match="lacks 1 of its 3 files .train-00001.safetensors."):
        opened(whole)
    with pytest.raises(UserError, match="train-00001.safetensors cannot be read"):
        finish_cache(whole, plan_shards(COUNTS, SIZE))
    for content in ("{", "[]", "{}"):
        (whole / INDEX_NAME).write_text(content)
        with pytest.raises(UserError, match="latents.json cannot be read .*; cache the latents again"):
            read_index(whole)


def test_a_folder_is_gone_on_with_by_the_same_settings_alone(tmp_path):
    settings = (("flips", True), ("data.img_size", (4, 6)))
    folder = write(tmp_path / "cache", settings=settings)
    before = (folder / INDEX_NAME).read_text()
    start_cache(folder, dict(settings), FACTS, CLASSES)
    assert (folder / INDEX_NAME).read_text() == before and json.loads(before)["complete"]
    with pytest.raises(UserError, match=r"was cached with data.img_size=\[4, 6\], not \[6, 4\]; choose"):
        start_cache(folder, dict(settings) | {"data.img_size": [6, 4]}, FACTS, CLASSES)
    with pytest.raises(UserError, match="was cached with amp=null, not float16"):
        start_cache(folder, dict(settings) | {"amp": "float16"}, FACTS, CLASSES)
    with pytest.raises(UserError, match="was cached with other classes"):
        start_cache(folder, dict(settings), FACTS, CLASSES[:2])
    (folder / INDEX_NAME).unlink()
    with pytest.raises(UserError, match="holds .safetensors files and no latents.json"):
        start_cache(folder, dict(settings), FACTS, CLASSES)
    with pytest.raises(UserError, match="cannot be made"):
        start_cache(folder / "train-00000.safetensors" / "x", {}, FACTS, CLASSES)


def test_latents_that_are_no_numbers_are_refused():
    good = torch.zeros(1, 2, 2, 2)
    assert checked_finite(good, None) is good
    with pytest.raises(UserError, match="not finite with amp=float16 and dtype=float16; use amp=null or bfloat16"):
        checked_finite(torch.full((1, 2, 2, 2), 1e6).half(), "float16")


def configured(root, *overrides):
    places = ("data=latents", f"data.root={root}", "data.img_size=[2,3]", "data.in_chans=2", "data.workers=0")
    values = ("data.mean=[0,0]", "data.std=[1,1]", "task=diffusion", "diffusion=ddpm", "augment=none")
    return typed(compose_config(*places, *values, *overrides), TrainConfig)


def test_a_run_reads_them(root):
    cfg = configured(root, "augment.hflip=1.0")
    data = build_data(cfg)
    train = build_train_loader(cfg, data.train, BatchPlan(11, 4), Processes(CPU))
    assert all((moments > 100).all() and labels.dtype == torch.int64 for _, moments, labels in train.epoch(0))
    moments, labels = next(iter(build_eval_loader(cfg, data.val, Processes(CPU), 3)))
    assert moments[:, 0, 0, 0].tolist() == [-1, -2, -3] and labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("diffusion=none", "data=latents is for generators; add task=diffusion"),
        ("augment=deit", r"augment.scale=.* cannot act on cached latents.*add augment=none"),
        ("augment.mixup=0.8", "augment.mixup=0.8 cannot act on cached latents"),
        ("augment.erase_prob=0.1", "augment.erase_prob=0.1 cannot act on cached latents"),
    ],
)
def test_what_latents_cannot_do(root, override, sentence):
    cfg = configured(root, override)
    with pytest.raises(UserError, match=sentence):
        build_train_loader(cfg, build_data(cfg).train, BatchPlan(11, 4), Processes(CPU))
