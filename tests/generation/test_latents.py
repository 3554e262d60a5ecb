"""A generator of cached latents, from the images to samples by the commands; which autoencoders it takes."""

from __future__ import annotations

import shutil

import pytest
import torch
from vit3.tools.cache_latents import cache_latents
from vit3.tools.sample import run_sample
from vit3.tools.train import train

from tests.diffusion.toy import tiny_autoencoder
from tests.toy import CPU, compose_config, configured, make_folder
from vit3.build import build_network
from vit3.build.generator import build_codec
from vit3.diffusion.codec import Moments, load_autoencoder
from vit3.engine.checkpoint import load_checkpoint
from vit3.errors import UserError
from vit3.generation.folder import read_image

TINY = "++model.kwargs={patch_size: 4, embed_dim: 16, depth: 1, num_heads: 2}"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with an autoencoder, ``vae``, and what it made of 16 x 24 pixels, ``latents``: 8 x 12."""
    folder = tmp_path_factory.mktemp("place")
    vae = tiny_autoencoder(folder / "vae", shift=0.1)
    images = make_folder(folder / "images", classes=3, train=4, val=1)
    data = ["data=folder", f"data.root={images}", "data.workers=0", "data.img_size=[16,24]", "device=cpu"]
    cache_latents(compose_config(*data, f"autoencoder={vae}", f"output={folder / 'latents'}", root="cache_latents"))
    return folder


def training(place, *overrides):
    return [
        "recipe=dit3_digits", "data=latents", f"data.root={place / 'latents'}", "data.img_size=[8,12]",
        "data.workers=0", "data.mean=[0,0,0,0]", "data.std=[1,1,1,1]",
        "engine.epochs=1", "engine.steps_per_epoch=1", "engine.batch_size=4", "engine.device=cpu", TINY,
        "optim.warmup_epochs=0", "diffusion.sheet.images=3", "diffusion.sheet.steps=2", *overrides,
    ]  # fmt: skip


def codec_of(place, *overrides, **how):
    return build_codec(configured(*training(place, *overrides)), CPU.device, **how)


def test_trained_and_drawn(place, tmp_path):
    autoencoder = f"diffusion.autoencoder={place / 'vae'}"
    train(compose_config(*training(place, f"output={tmp_path}", "name=r", autoencoder)))
    assert (tmp_path / "r" / "samples.png").stat().st_size > 0
    stored = load_checkpoint(tmp_path / "r")
    assert (stored["codec"]["scale"], stored["codec"]["shift"]) == (0.7, 0.1)
    drawn = ["n=2", "sampling.steps=2", "device=cpu", f"output={tmp_path}", "name=s", "npz=false"]
    run_sample(compose_config(f"checkpoint={tmp_path / 'r'}", *drawn, root="sample"))
    assert read_image(tmp_path / "s" / "images" / "000001.png").shape == (16, 24, 3)


def test_without_an_autoencoder_there_are_no_images(place, tmp_path):
    """Training goes all the same; drawing then says what it needs, and takes it."""
    train(compose_config(*training(place, f"output={tmp_path}", "name=r")))
    assert not (tmp_path / "r" / "samples.png").exists() and (tmp_path / "r" / "curves.png").exists()
    drawn = [f"checkpoint={tmp_path / 'r'}", "n=1", "sampling.steps=2", "device=cpu", f"output={tmp_path}", "name=s"]
    with pytest.raises(UserError, match="learnt from cached latents; to draw images set autoencoder="):
        run_sample(compose_config(*drawn, root="sample"))
    run_sample(compose_config(*drawn, f"autoencoder={place / 'vae'}", root="sample"))
    assert read_image(tmp_path / "s" / "images" / "000000.png").shape == (16, 24, 3)


def test_scale_and_shift_are_those_of_the_latents(place):
    alone, together = codec_of(place), codec_of(place, f"diffusion.autoencoder={place / 'vae'}")
    assert isinstance(alone, Moments) and isinstance(together, Moments)
    assert [(codec.channels, codec.scale, codec.shift) for codec in (alone, together)] == [(4, 0.7, 0.1)] * 2
    assert codec_of(place, "diffusion.latent_scale=2").scale == 2
    moved = codec_of(place, f"diffusion.autoencoder={place / 'vae'}", drawing=True, scale=0.5)
    assert moved.scale == moved.autoencoder.scale == 0.5


def test_another_autoencoder_is_refused(place, tmp_path):
    other = load_autoencoder(place / "vae")
    other.vae.decoder.conv_out.weight.data += 0.1
    other.vae.save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="has other weights than what made the latents in data.root="):
        codec_of(place, f"diffusion.autoencoder={tmp_path / 'other'}")
    shutil.copytree(place / "vae", tmp_path / "moved")
    assert codec_of(place, f"diffusion.autoencoder={tmp_path / 'moved'}").scale == 0.7


def test_what_cannot_be_loaded_says_how_to_go_on(place, tmp_path):
    with pytest.raises(UserError, match="diffusion.autoencoder=.*null trains from cached latents without sheets"):
        codec_of(place, f"diffusion.autoencoder={tmp_path}")


def test_images_must_be_multiples_of_the_factor(place):
    cfg = ["data=folder", "data.root=x", "data.img_size=[15,24]", f"diffusion.autoencoder={place / 'vae'}"]
    with pytest.raises(UserError, match=r"data.img_size=\[15, 24\] must be multiples of 2"):
        build_network(configured("recipe=dit3_digits", *cfg, TINY), ["a"], CPU.device)


def test_encoding_in_training_sees_what_the_cache_holds(place):
    """The network's shape is one and the same."""
    images = [
        f"data.root={place / 'images'}",
        "data.img_size=[16,24]",
        "data.in_chans=3",
        "data.mean=[.5,.5,.5]",
        "data.std=[.5,.5,.5]",
    ]
    cfg = configured("recipe=dit3_digits", "data=folder", *images, TINY, f"diffusion.autoencoder={place / 'vae'}")
    model, codec = build_network(cfg, ["a", "b", "c"], CPU.device)
    cached, _ = build_network(configured(*training(place)), ["a", "b", "c"], CPU.device)
    assert model.img_size == cached.img_size == (8, 12) and model.in_chans == cached.in_chans == 4
    assert codec.encode(torch.zeros(2, 3, 16, 24)).shape == (2, 4, 8, 12)
