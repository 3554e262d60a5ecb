"""Shards: packed whole, read by timm, and by us with each image exactly once and the labels of the folder."""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_dataset

from tests.toy import configured, make_folder, make_image, trainer_of
from vit3.data import make_data, open_split, preflight
from vit3.data.pack import plan_packing, write_shards
from vit3.data.shard_index import shard_index
from vit3.data.stream import StreamedImages
from vit3.errors import UserError


def pack(root, out, images=4, seed=0):
    data = make_data("folder", str(root), 3, "raise")
    splits = {"train": data.train.reader.samples, "val": data.val.reader.samples}
    packing = plan_packing(
        splits, data.classes, out, name="toy", images_per_shard=images, bytes_per_shard=None, seed=seed
    )
    return write_shards(packing)


@pytest.fixture
def shards(tmp_path):
    pack(make_folder(tmp_path / "folder"), tmp_path / "shards")
    return tmp_path / "shards"


def wds(root, on_bad_image="raise", **options):
    return make_data("wds", str(root), 3, on_bad_image, **options)


def contents(split):
    """How often each picture stands in a split, with its label."""
    return Counter((np.asarray(image).tobytes(), label) for image, label in (split[i] for i in range(len(split))))


def write_tar(path: Path, members: dict[str, bytes], mode: str = "w"):
    with tarfile.open(path, mode) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, BytesIO(data))


def png(value: int) -> bytes:
    file = BytesIO()
    Image.new("RGB", (8, 8), (value, value, value)).save(file, "PNG")
    return file.getvalue()


def test_shards_hold_what_the_folder_holds(shards):
    folder, packed = make_data("folder", str(shards.parent / "folder"), 3, "raise"), wds(shards)
    assert packed.classes == folder.classes
    assert contents(packed.train) == contents(folder.train) and contents(packed.val) == contents(folder.val)
    order = [packed.train[i][1] for i in range(12)]
    assert order != sorted(order)  # shuffled
    preflight(packed)


def test_bytes_are_copied_as_they_are(shards):
    originals = {path.read_bytes() for path in (shards.parent / "folder" / "val").rglob("*.png")}
    reader = wds(shards).val.reader
    assert {reader[i][0].read() for i in range(len(reader))} == originals


def test_timm_reads_the_shards(shards):
    pytest.importorskip("webdataset")
    stream = create_dataset("wds/", root=str(shards), split="train", input_img_mode="RGB")
    assert len(stream) == 12
    assert Counter((np.asarray(image).tobytes(), label) for image, label in stream) == contents(wds(shards).train)


def test_labels_are_translated_by_name(shards):
    stored = ["class2", "more", "class0", "class1"]
    val = open_split("wds", str(shards), "val", 3, "raise", classes=stored)
    mine = wds(shards)
    assert [stored[label] for _, label in val] == [mine.classes[label] for _, label in mine.val]
    with pytest.raises(UserError, match="classes that the network is not trained for: class2"):
        open_split("wds", str(shards), "val", 3, "raise", classes=["class0", "class1"])


def test_packing_goes_on_where_it_stopped(shards):
    kept, gone = shards / "toy-train-000000.tar", shards / "toy-train-000001.tar"
    content, before = gone.read_bytes(), kept.stat().st_mtime_ns
    gone.unlink()
    counts = pack(shards.parent / "folder", shards)
    assert (counts["written"], counts["kept"], counts["images"]) == (1, 4, 18)
    assert gone.read_bytes() == content and kept.stat().st_mtime_ns == before
    assert {path.suffix for path in shards.iterdir()} <= {".tar", ".json"}


def test_another_packing_is_not_mixed_in(shards):
    with pytest.raises(UserError, match="holds shards of other images, sizes or another seed"):
        pack(shards.parent / "folder", shards, seed=1)


def test_shards_by_size(tmp_path):
    samples = {"train": [(str(p), 0) for p in sorted(make_folder(tmp_path).rglob("*.png"))]}
    packing = plan_packing(
        samples, ["a"], tmp_path / "o", name="n", images_per_shard=None, bytes_per_shard=3000, seed=0
    )
    sizes = [sum(path.stat().st_size for path, _, _ in shard.images) for shard in packing.shards]
    assert len(sizes) > 2 and all(3000 <= size < 6000 for size in sizes[:-1])
    with pytest.raises(UserError, match="give one of them, at least 1"):
        plan_packing(samples, ["a"], tmp_path, name="n", images_per_shard=0, bytes_per_shard=None, seed=0)


def test_the_index_is_kept_and_made_anew_when_the_shard_changes(shards):
    shard = shards / "toy-val-000000.tar"
    first = shard_index(shard)
    kept = shard.with_name("toy-val-000000.tar.index.npz")
    before = kept.stat().st_mtime_ns
    assert np.array_equal(shard_index(shard), first) and kept.stat().st_mtime_ns == before
    write_tar(shard, {"a.png": png(1), "a.cls": b"2"})
    assert shard_index(shard)[:, 2].tolist() == [2]
    kept.write_bytes(b"nothing")
    assert shard_index(shard)[:, 2].tolist() == [2]


@pytest.fixture
def spoilt(tmp_path):
    """Shards with a truncated JPEG in the training and an empty file in the validation split."""
    root = make_folder(tmp_path / "folder")
    make_image(root / "train" / "class1" / "cut.jpg", 1, (64, 64))
    whole = (root / "train" / "class1" / "cut.jpg").read_bytes()
    (root / "train" / "class1" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "val" / "class2" / "0.png").write_bytes(b"")
    pack(root, tmp_path / "shards")
    return tmp_path / "shards"


def test_bad_images_in_shards(spoilt):
    with pytest.raises(UserError, match=r"toy-train-00000..tar:class1/000000..-cut\.jpg cannot be decoded"):
        preflight(wds(spoilt))
    data = wds(spoilt, "skip")
    own = data.train.reader.members[:, 2].tolist()
    (bad,) = [i for i in range(13) if "cut" in data.train.reader.filename(i)]
    assert [data.train[i][1] for i in range(13)] == [own[(i + 1) % 13 if i == bad else i] for i in range(13)]
    assert data.bad_images == 1
    labels = [data.val[i][1] for i in range(6)]
    assert sorted(labels) == [-1, 0, 0, 1, 1, 2] and data.bad_images == 2


def test_a_copy_that_stopped_is_said(shards):
    shard = shards / "toy-val-000000.tar"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:1600])
    with pytest.raises(UserError, match="toy-val-000000.tar is no whole uncompressed tar file"):
        wds(shards)
    shard.write_bytes(whole[:3072])  # at the boundary of a member
    with pytest.raises(UserError, match="toy-val-000000.tar (is no whole|holds . images, its info file says 4)"):
        wds(shards)
    shard.unlink()
    with pytest.raises(UserError, match="toy-val-000000.tar cannot be read .No such file"):
        wds(shards)


def test_shards_of_others_without_names(tmp_path, caplog):
    for name, count in (("set-train-0.tar", 3), ("set-validation-0.tar", 2)):
        members = {}
        for i in range(count):
            members |= {f"d.x/{i}.seg.png": png(9), f"d.x/{i}.PNG": png(i), f"d.x/{i}.cls": str(i).encode()}
        write_tar(tmp_path / name, members)
    data = wds(tmp_path)
    assert data.classes == ("0", "1", "2") and [data.val[i][1] for i in range(2)] == [0, 1]
    assert np.asarray(data.train[1][0]).max() == 1  # of two images in a sample, the one that has the plain ending
    assert "has no image of 1 of 3 classes" in caplog.text
    assert len(wds(tmp_path, train_split="set-v*.tar").train) == 2
    with pytest.raises(UserError, match="has no shards of split other .*data.val_split"):
        wds(tmp_path, val_split="other")


def test_labels_from_json_and_labels_that_are_none(tmp_path):
    for split in ("train", "val"):
        write_tar(tmp_path / f"{split}.tar", {"a.png": png(1), "a.json": b'{"y": 1}', "b.png": png(2), "b.cls": b"0"})
    with pytest.raises(UserError, match="sample a cannot be read .it has no .cls member"):
        wds(tmp_path)
    with pytest.raises(UserError, match="sample b cannot be read .it has no .json member"):
        wds(tmp_path, target_key="y")
    for split in ("train", "val"):
        write_tar(tmp_path / f"{split}.tar", {"a.png": png(1), "a.json": b'{"y": 1}'})
    assert wds(tmp_path, target_key="y").train[0][1] == 1
    with pytest.raises(UserError, match="hold no image; set data.input_key"):
        wds(tmp_path, input_key="jpg")


def test_compressed_shards_are_refused(tmp_path):
    write_tar(tmp_path / "train.tar", {"a.png": png(1), "a.cls": b"0"}, mode="w:gz")
    with pytest.raises(UserError, match="no whole uncompressed tar file"):
        wds(tmp_path)


def test_a_stream_gives_each_image_and_counts_them(shards):
    pytest.importorskip("webdataset")
    data = wds(shards, stream=True)
    assert isinstance(data.train, torch.utils.data.IterableDataset) and len(data.train) == 12
    assert data.train.classes == ("class0", "class1", "class2")
    seen = Counter((np.asarray(image).tobytes(), label) for image, label in data.train)
    assert seen == contents(wds(shards).train)
    preflight(data)


def test_a_stream_is_shuffled_by_epoch(shards):
    pytest.importorskip("webdataset")
    orders = []
    for epoch in (0, 1, 0):
        stream = StreamedImages(str(shards), 3, "raise")
        stream.set_epoch(epoch)
        orders.append([label for _, label in stream])
    assert orders[0] == orders[2] != orders[1]


def test_bad_images_in_a_stream(spoilt):
    pytest.importorskip("webdataset")
    with pytest.raises(UserError, match=r"toy-train-00000..tar:class1.*-cut cannot be decoded"):
        list(StreamedImages(str(spoilt), 3, "raise"))
    skipping = StreamedImages(str(spoilt), 3, "skip")
    assert len(list(skipping)) == 13 and skipping.bad_images.value >= 1  # another image fills the epoch


def test_a_stream_needs_a_shard_for_each_process(shards):
    pytest.importorskip("webdataset")
    stream = StreamedImages(str(shards), 3, "raise")
    stream.transform = lambda image: torch.zeros(1)
    assert sum(len(labels) for _, labels in torch.utils.data.DataLoader(stream, num_workers=2)) == 12
    stream = StreamedImages(str(shards), 3, "raise")
    stream.set_loader_cfg(num_workers=4)
    with pytest.raises(UserError, match="has 3 shards for 4 loader processes"):
        iter(stream)


def test_a_stream_shorter_than_a_batch_is_said(shards):
    """Every loader process fills batches of its own: where none gets one full, reading would begin again for ever."""
    pytest.importorskip("webdataset")
    cfg = configured(
        "data=wds", f"data.root={shards}", "data.stream=true", "data.workers=2", "data.img_size=[16,16]",
        "engine.batch_size=10", "engine.device=cpu", "optim.warmup_epochs=0",
    )  # fmt: skip
    with pytest.raises(UserError, match="less than one batch for a loader process; lower data.workers or engine.batch"):
        next(trainer_of(cfg).batches.epoch(0))


def test_a_stream_needs_names_and_a_package(shards, monkeypatch):
    pytest.importorskip("webdataset")
    info = json.loads((shards / "info.json").read_text())
    (shards / "info.json").write_text(json.dumps({"splits": info["splits"]}))
    with pytest.raises(UserError, match="the info file names no classes"):
        StreamedImages(str(shards), 3, "raise")
    monkeypatch.setitem(__import__("sys").modules, "webdataset", None)
    with pytest.raises(UserError, match="pip install webdataset"):
        StreamedImages(str(shards), 3, "raise")


def test_a_pipe_is_a_stream(shards):
    pytest.importorskip("webdataset")
    stream = open_split("wds", f"pipe:cat {shards}", "train", 3, "raise")
    assert len(list(stream)) == 12
    with pytest.raises(UserError, match="read at random.*data.val_split"):
        wds(f"pipe:cat {shards}")
    assert len(wds(f"pipe:cat {shards}", val_split=f"{shards}/toy-val-*.tar").val) == 6
