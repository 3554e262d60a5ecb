"""tools/cache_latents.py: what it writes, alone, by two processes and after a stop; what it refuses; R20's scales."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from safetensors.torch import load_file
from vit3.tools import cache_latents as tool

from tests.diffusion.toy import tiny_autoencoder
from tests.processes import run_processes
from tests.toy import compose_config, make_folder, make_image, updates_of
from vit3.build import build_data, build_eval_loader, build_network, build_plan, build_train_loader, build_trainer
from vit3.config import TrainConfig, typed
from vit3.data import BatchPlan, CachedLatents
from vit3.data.latent_shards import INDEX_NAME, read_index
from vit3.diffusion.codec import Moments, load_autoencoder
from vit3.engine.distributed import Processes
from vit3.errors import UserError

CPU = Processes(torch.device("cpu"))
SIZE = "data.img_size=[16,24]"


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    return tiny_autoencoder(tmp_path_factory.mktemp("vae") / "vae", shift=0.1)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """17 training and 6 test images, of 20x24 pixels and one of another shape."""
    root = make_folder(tmp_path_factory.mktemp("images"), classes=3, train=5, val=2)
    make_image(root / "train" / "class1" / "wide.png", 1, (30, 70))
    make_image(root / "train" / "class2" / "high.jpg", 2, (50, 20))
    return root


def cache(images, vae, output, *overrides):
    tool.cache_latents(
        compose_config(
            "data=folder",
            f"data.root={images}",
            "data.workers=0",
            SIZE,
            f"autoencoder={vae}",
            f"output={output}",
            "batch_size=4",
            "shard_size=6",
            "dtype=float32",
            "device=cpu",
            *overrides,
            root="cache_latents",
        )  # fmt: skip
    )
    return output


@pytest.fixture(scope="module")
def cached(images, vae, tmp_path_factory):
    return cache(images, vae, tmp_path_factory.mktemp("cache") / "a")


def tensors(folder):
    return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name, file in a.items():
        assert file.keys() == b[name].keys() and all(torch.equal(file[key], b[name][key]) for key in file)


def train_cfg(*overrides):
    return typed(compose_config("task=diffusion", "diffusion=ddpm", "augment=none", *overrides), TrainConfig)


def images_cfg(images, *overrides):
    half = ("data.mean=[0.5,0.5,0.5]", "data.std=[0.5,0.5,0.5]", "data.crop_pct=1.0", "data.workers=0", SIZE)
    return train_cfg("data=folder", f"data.root={images}", *half, *overrides)


def latents_cfg(cached, *overrides):
    return train_cfg("data=latents", f"data.root={cached}", "data.img_size=[8,12]", "data.workers=0", *overrides)


def test_every_image_of_both_splits_with_its_label(images, vae, cached):
    """Against the autoencoder on the images as evaluation reads them, one by one, plain and mirrored."""
    autoencoder, cfg = load_autoencoder(vae), images_cfg(images)
    data = build_data(cfg)
    for split, source in (("train", data.train), ("val", data.val)):
        latents = CachedLatents(cached, split)
        assert len(latents) == len(source) and latents.classes == source.classes
        for i, (image, label) in enumerate(build_eval_loader(cfg, source, CPU, 1)):
            for latents.hflip, pixels in ((0.0, image), (1.0, image.flip(-1))):
                moments, own = latents[i]
                torch.testing.assert_close(moments, autoencoder.moments(pixels)[0], rtol=0, atol=1e-5)
                assert own == label


def test_the_mirrored_image_has_latents_of_its_own(cached):
    file = load_file(cached / "train-00000.safetensors")
    assert (file["flipped"] - file["moments"].flip(-1)).abs().max() > 1e-2


def test_the_index_says_what_it_is(vae, cached):
    index = read_index(cached)
    facts, autoencoder = index["facts"], load_autoencoder(vae)
    assert (facts["autoencoder"], facts["weights"]) == (str(vae), autoencoder.digest())
    assert (facts["scale"], facts["shift"], facts["channels"], facts["flips"]) == (0.7, 0.1, 4, True)
    assert (facts["latent_size"], facts["img_size"], facts["dtype"]) == ([8, 12], [16, 24], "float32")
    assert index["splits"]["train"]["counts"] == [6, 6, 5] and index["splits"]["val"]["counts"] == [6]
    assert {"torch", "timm", "diffusers"} == facts["versions"].keys()
    assert {path.name for path in cached.iterdir()} == {INDEX_NAME, *index["splits"]["val"]["files"],
                                                        *index["splits"]["train"]["files"]}  # fmt: skip


def test_images_and_latents_train_alike(images, vae, cached):
    """R20: the same x0 for the same noise, whole epochs with the same mean and deviation, scaled once."""
    autoencoder = load_autoencoder(vae)
    facts = CachedLatents(cached, "train").facts
    codec = Moments(facts["channels"], facts["scale"], shift=facts["shift"])

    def drawn(cfg, encode):
        data = build_data(cfg)
        loader = build_train_loader(cfg, data.train, BatchPlan(len(data.train), 6, drop_last=False), CPU)
        torch.manual_seed(3)
        parts = [(encode(batch).clone(), share.images) for epoch in range(8) for share, batch, _ in loader.epoch(epoch)]
        return torch.cat([x0 for x0, _ in parts]), [i for _, numbers in parts for i in numbers]

    square = ("augment.hflip=0.5",)
    online, order = drawn(images_cfg(images, *square), autoencoder.encode)
    kept, order2 = drawn(latents_cfg(cached, *square), codec.encode)
    assert order == order2 and online.shape == kept.shape == (8 * 17, 4, 8, 12)
    error = online.std(dim=(0, 2, 3)) / (8 * 17 * 8 * 12) ** 0.5
    assert ((online.mean(dim=(0, 2, 3)) - kept.mean(dim=(0, 2, 3))).abs() < 8 * error).all()
    torch.testing.assert_close(kept.std(dim=(0, 2, 3)), online.std(dim=(0, 2, 3)), rtol=0.02, atol=0)


def test_twenty_updates_have_the_same_losses(vae, tmp_path):
    """R20: the same noise and images that need no resizing; all that differs is where the latents come from."""
    for split, count in (("train", 8), ("val", 1)):
        for label in range(3):
            for i in range(count):
                make_image(tmp_path / "images" / split / f"class{label}" / f"{i}.png", label, (16, 16))
    square = "data.img_size=[16,16]"
    folder = cache(tmp_path / "images", vae, tmp_path / "cache", square)
    network = (
        "recipe=dit3_digits", f"diffusion.autoencoder={vae}", "engine.batch_size=6", "engine.epochs=5",
        "engine.device=cpu", "optim.warmup_epochs=0", "optim.lr=0.01", "data.workers=0",
        "++model.kwargs={patch_size: 2, embed_dim: 16, depth: 1, num_heads: 2}",
    )  # fmt: skip
    half = ("data=folder", f"data.root={tmp_path / 'images'}", "data.mean=[0.5,0.5,0.5]", "data.std=[0.5,0.5,0.5]")
    online = losses_of(typed(compose_config(*network, *half, square), TrainConfig))
    latents = ("data=latents", f"data.root={folder}", "data.in_chans=4", "data.mean=[0,0,0,0]", "data.std=[1,1,1,1]")
    kept = losses_of(typed(compose_config(*network, *latents, "data.img_size=[8,8]"), TrainConfig))
    assert len(online) == 20 and online[-1] < online[0]
    assert kept == pytest.approx(online, rel=1e-3)


def losses_of(cfg):
    """The loss of every update."""
    data = build_data(cfg)
    torch.manual_seed(0)
    model, codec = build_network(cfg, data.classes, CPU.device)
    plan = build_plan(cfg, len(data.train), 1, model)
    trainer = build_trainer(cfg, data, model, plan, {}, CPU, codec)
    return [outcome.losses["loss"] for epoch in range(cfg.engine.epochs) for outcome in updates_of(trainer, epoch)]


def test_float16_halves_the_files_and_keeps_the_latents(images, vae, cached, tmp_path):
    small = tensors(cache(images, vae, tmp_path / "half", "dtype=float16", "flips=false"))
    for name, file in tensors(cached).items():
        assert small[name]["moments"].dtype == torch.float16 and "flipped" not in small[name]
        torch.testing.assert_close(small[name]["moments"].float(), file["moments"], rtol=1e-3, atol=1e-4)


def test_two_processes_write_the_same_files(images, vae, cached, tmp_path):
    run_processes(cache, 2, images, vae, tmp_path / "two", timeout=300)  # each imports diffusers
    assert_same(tensors(tmp_path / "two"), tensors(cached))
    assert read_index(tmp_path / "two") == read_index(cached)


def test_a_stopped_run_goes_on_with_what_is_missing(images, vae, cached, tmp_path, monkeypatch, caplog):
    written = []

    def stop_at_third(path, *content):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        write(path, *content)

    write = tool.write_shard
    monkeypatch.setattr(tool, "write_shard", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        cache(images, vae, tmp_path / "b")
    with pytest.raises(UserError, match="caching has not ended"):
        read_index(tmp_path / "b")
    first = {name: os.stat(tmp_path / "b" / name).st_mtime_ns for name in written}
    monkeypatch.setattr(tool, "write_shard", write)
    with caplog.at_level(logging.INFO):
        cache(images, vae, tmp_path / "b")
    assert "of which this process makes 2" in caplog.text and "images/s a process, 0.0 min left" in caplog.text
    assert {name: os.stat(tmp_path / "b" / name).st_mtime_ns for name in written} == first
    assert_same(tensors(tmp_path / "b"), tensors(cached))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("flips=false", "was cached with flips=True, not False"),
        ("dtype=float16", "was cached with dtype=float32, not float16"),
        ("data.img_size=[16,16]", r"was cached with data.img_size=\[16, 24\], not \[16, 16\]"),
        ("latent_scale=0.5", "was cached with latent_scale=0.7, not 0.5"),
        ("shard_size=5", "was cached with shard_size=6, not 5"),
        ("data.crop_pct=0.9", "was cached with data.crop_pct=1.0, not 0.9"),
    ],
)
def test_a_folder_of_other_settings_is_refused(images, vae, cached, override, sentence):
    with pytest.raises(UserError, match=f"{sentence}; choose an empty folder"):
        cache(images, vae, cached, override)


def test_other_weights_or_images_are_refused(images, vae, cached, tmp_path):
    other = tiny_autoencoder(tmp_path / "other", shift=0.1, channels=4, in_chans=3, factor=2)
    weights = load_file(other / "diffusion_pytorch_model.safetensors")
    loaded = load_autoencoder(other)
    loaded.vae.encoder.conv_in.weight.data += 0.1
    loaded.vae.save_pretrained(other)
    assert weights.keys() == loaded.vae.state_dict().keys()
    with pytest.raises(UserError, match="was cached with autoencoder=.* .hash of its weights., not"):
        cache(images, other, cached)
    with pytest.raises(UserError, match="was cached with data.root=17 . 6 images, not 3 . 3 images"):
        cache(make_folder(tmp_path / "few", train=1, val=1), vae, cached)


def test_bad_images_stop_it_or_are_left_out(vae, tmp_path, caplog):
    root = make_folder(tmp_path / "images")
    for name in ("train/class0/0.png", "train/class1/2.png", "val/class2/1.png"):
        (root / name).write_bytes(b"no image")
    with pytest.raises(UserError, match="cannot be decoded .*data.on_bad_image=skip"):
        cache(root, vae, tmp_path / "stopped")
    cache(root, vae, tmp_path / "out", "data.on_bad_image=skip", "batch_size=1")
    assert "3 images could not be decoded and were left out" in caplog.text
    index = read_index(tmp_path / "out")["splits"]
    assert (index["train"]["counts"], index["val"]["counts"]) == ([5, 5], [5])
    latents = CachedLatents(tmp_path / "out", "train")
    assert [latents[i][1] for i in range(len(latents))] == [0] * 3 + [1] * 3 + [2] * 4


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "data.mean=[0.4,0.5,0.5]",
            r"data.mean=.*images in \[-1, 1\]; set data.mean=\[0.5,0.5,0.5\]",
        ),
        ("data.img_size=[15,24]", r"data.img_size=\[15, 24\] must be multiples of 2"),
        ("data=latents", "data=latents holds latents already"),
        ("autoencoder=/nowhere/at/all", "autoencoder=/nowhere/at/all is neither a folder nor a name on the hub"),
        ("++data.stream=true", "data.stream=True means nothing to data=folder"),
    ],
)
def test_refusals(images, vae, tmp_path, override, sentence):
    with pytest.raises(UserError, match=sentence):
        cache(images, vae, tmp_path / "c", override)
    assert not (tmp_path / "c").exists()


def test_grey_images_need_a_grey_autoencoder(vae, tmp_path):
    digits = ("data=digits", "data.in_chans=1", "data.mean=[0.5]", "data.std=[0.5]", "data.img_size=[8,8]")
    with pytest.raises(UserError, match="data.in_chans=1, but the autoencoder takes 3; set it to 3"):
        run_digits(vae, tmp_path / "d", *digits)
    grey = tiny_autoencoder(tmp_path / "grey", in_chans=1)
    run_digits(grey, tmp_path / "d", *digits)
    assert len(CachedLatents(tmp_path / "d", "train")) == 1437 and len(CachedLatents(tmp_path / "d", "val")) == 360


def run_digits(vae, output, *overrides):
    options = (f"autoencoder={vae}", f"output={output}", "batch_size=256", "device=cpu", *overrides)
    tool.cache_latents(compose_config(*options, root="cache_latents"))
