"""Codecs: scaled once, drawn alike from images and from moments, undone by decoding; what cannot be loaded says why."""

from __future__ import annotations

import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.diffusion.toy import tiny_autoencoder
from vit3.diffusion.codec import Moments, Pixels, load_autoencoder
from vit3.errors import UserError

SCALE, SHIFT = 0.7, 0.2
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_autoencoder(tmp_path_factory.mktemp("vae") / "vae", shift=SHIFT)


@pytest.fixture(scope="module")
def autoencoder(folder):
    return load_autoencoder(folder)


def images(count=3, height=12, width=20):
    return torch.rand(count, 3, height, width) * 2 - 1


def test_pixels_are_images():
    x = images()
    pixels = Pixels(3)
    assert torch.equal(pixels.decode(pixels.encode(x)), x) and pixels.grid([12, 20]) == pixels.pixels([12, 20]) == (
        12,
        20,
    )
    assert pixels.decode(torch.tensor([[[[-3.0, 0.5, 2.0]]]])).flatten().tolist() == [-1, 0.5, 1]
    assert pixels.describe() == {"codec": "pixels", "autoencoder": None, "channels": 3}


def test_latents_are_drawn_from_the_posterior_and_scaled_once(autoencoder):
    """Against diffusers' own distribution, its own draw and the formula of its pipelines."""
    x = images()
    posterior = autoencoder.vae.encode(x).latent_dist
    torch.manual_seed(1)
    expected = (posterior.sample() - SHIFT) * SCALE
    torch.manual_seed(1)
    x0 = autoencoder.encode(x)
    assert x0.shape == (3, 4, *autoencoder.grid((12, 20))) == (3, 4, 6, 10)
    torch.testing.assert_close(x0, expected.detach(), rtol=0, atol=1e-6)
    assert not torch.equal(x0, autoencoder.encode(x))  # drawn anew


def test_moments_give_the_same_latents_as_images(autoencoder):
    """Equal given equal noise, also as they come back from a file."""
    x = images()
    moments = autoencoder.moments(x)
    assert moments.shape == (3, 8, 6, 10) and (moments[:, 4:] > 0).all()
    codec = Moments(4, autoencoder.scale, autoencoder, shift=autoencoder.shift)
    torch.manual_seed(2)
    direct = autoencoder.encode(x)
    for dtype, bound in ((torch.float32, 0.0), (torch.float16, 4e-3)):
        torch.manual_seed(2)
        assert (codec.encode(moments.to(dtype)) - direct).abs().max() <= bound
    assert codec.grid([12, 20]) == (6, 10) and codec.pixels([6, 10]) == (12, 20)
    assert torch.equal(codec.decode(direct), autoencoder.decode(direct))


def test_moments_know_their_own_scale(autoencoder):
    """The scale belongs to the network that was trained with it, whatever the autoencoder says."""
    codec = Moments(4, 0.1, autoencoder, shift=-0.5)
    x0 = torch.randn(2, 4, 6, 10)
    expected = autoencoder.decode((x0 / 0.1 - 0.5 - SHIFT) * SCALE)
    torch.testing.assert_close(codec.decode(x0), expected, rtol=0, atol=1e-5)


def test_moments_take_what_the_autoencoder_says(autoencoder):
    codec = Moments(4, None, autoencoder)
    assert (codec.scale, codec.shift) == (SCALE, SHIFT)
    assert codec.describe()["autoencoder"] == autoencoder.place and codec.describe()["shift"] == SHIFT
    assert Moments(4, 0.5, weights="abc").describe()["autoencoder_sha256"] == "abc"
    alone = Moments(4, 0.5)
    assert (alone.shift, alone.grid([6, 10]), alone.pixels([6, 10])) == (0, (6, 10), (6, 10))
    with pytest.raises(ValueError, match="scale of the latents is not known"):
        Moments(4)
    with pytest.raises(ValueError, match="channels=3 of latents are not the 4 of the autoencoder"):
        Moments(3, None, autoencoder)


def test_many_draws_have_the_mean_and_deviation_kept():
    mean, std = torch.randn(1, 2, 3, 3), torch.rand(1, 2, 3, 3) + 0.1
    draws = Moments(2, 2.0, shift=1.0).encode(torch.cat([mean, std], 1).expand(4000, -1, -1, -1))
    assert ((draws.mean(0) - 2 * (mean[0] - 1)).abs() < 5 * 2 * std[0] / 4000**0.5).all()
    assert ((draws.std(0) / (2 * std[0]) - 1).abs() < 0.08).all()


def test_decoding_undoes_scale_and_shift_in_chunks(autoencoder):
    latents = torch.randn(11, 4, 6, 10)
    whole = autoencoder.vae.decode(latents).sample.detach().clamp(-1, 1)
    decoded = autoencoder.decode((latents - SHIFT) * SCALE)
    torch.testing.assert_close(decoded, whole, rtol=0, atol=1e-5)
    assert decoded.shape == (11, 3, 12, 20) and decoded.abs().max() <= 1
    seen = []
    hook = autoencoder.vae.decoder.register_forward_hook(lambda module, given, result: seen.append(len(result)))
    autoencoder.decode(latents)
    hook.remove()
    assert seen == [8, 3]


def test_nothing_of_it_learns(autoencoder):
    assert not autoencoder.vae.training and not any(p.requires_grad for p in autoencoder.vae.parameters())
    x0 = autoencoder.encode(images(1))
    weight = torch.ones((), requires_grad=True)
    (weight * x0).square().sum().backward()  # latents may be multiplied with what learns
    assert weight.grad > 0


def test_scale_given_or_own(folder, tmp_path):
    assert load_autoencoder(folder).scale == SCALE and load_autoencoder(folder, 0.3).scale == 0.3
    codec = load_autoencoder(folder, 0.3)
    assert codec.describe() == {
        "codec": "autoencoder", "autoencoder": str(folder), "autoencoder_sha256": codec.digest(), "channels": 4,
        "factor": 2, "scale": 0.3, "shift": SHIFT,
    }  # fmt: skip
    assert load_autoencoder(tiny_autoencoder(tmp_path / "none")).shift == 0
    with pytest.raises(ValueError, match="scale=0.0 of the latents must be positive"):
        load_autoencoder(folder, 0.0)


def test_a_whole_pipeline_holds_one(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "pipeline" / "vae")
    assert load_autoencoder(tmp_path / "pipeline").digest() == load_autoencoder(folder).digest()


def test_the_digest_is_of_the_weights(folder, tmp_path, autoencoder):
    other = load_autoencoder(folder, 0.1)
    assert other.digest() == autoencoder.digest()
    next(other.vae.parameters()).data.flatten()[0] += 1e-3
    assert other.digest() != autoencoder.digest()


def test_eight_times_smaller(tmp_path):
    autoencoder = load_autoencoder(tiny_autoencoder(tmp_path / "vae", factor=8))
    assert autoencoder.encode(images(1, 32, 128)).shape == (1, 4, 4, 16) and autoencoder.grid((32, 128)) == (4, 16)
    assert autoencoder.pixels((4, 16)) == (32, 128)


def test_wrong_shapes_say_what_is_right(autoencoder):
    with pytest.raises(ValueError, match=r"img_size=\[12, 21\] must be multiples of 2"):
        autoencoder.encode(images(1, 12, 21))
    with pytest.raises(ValueError, match="images have 1 channels, the autoencoder takes 3; set data.in_chans=3"):
        autoencoder.encode(images(1)[:, :1])
    with pytest.raises(ValueError, match="moments have 3 channels; mean and deviation of 4 have 8"):
        Moments(4, 1.0).encode(images(1))
    with pytest.raises(ValueError, match="cached latents alone give no images; set autoencoder="):
        Moments(4, 1.0).decode(torch.zeros(1, 4, 2, 2))


@pytest.mark.parametrize("place", ["/nowhere/at/all", "vae", "./vae/x", "a/b/c"])
def test_no_such_place(place):
    with pytest.raises(UserError, match=f"key={place} is neither a folder nor a name on the hub"):
        load_autoencoder(place, key="key")


def test_without_network_it_says_how_to_fetch_it(monkeypatch):
    from diffusers import AutoencoderKL

    def offline(*args, local_files_only, **kwargs):
        assert not local_files_only
        raise OSError("We couldn't connect to 'https://huggingface.co'\nmore of it")

    monkeypatch.setattr(AutoencoderKL, "from_pretrained", offline)
    with pytest.raises(UserError) as caught:
        load_autoencoder("owner/name")
    assert str(caught.value) == (
        "autoencoder=owner/name cannot be loaded (We couldn't connect to 'https://huggingface.co'); without network, "
        "run `hf download owner/name --local-dir FOLDER` elsewhere and set autoencoder=FOLDER"
    )


def test_broken_folders(folder, tmp_path):
    with pytest.raises(UserError, match="cannot be loaded .*; it must hold config.json and diffusion_pytorch_model"):
        load_autoencoder(tmp_path)
    cut, poor = tmp_path / "cut", tmp_path / "poor"
    for copy in (cut, poor):
        shutil.copytree(folder, copy)
    (cut / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:1000])
    with pytest.raises(UserError, match="cut cannot be loaded"):
        load_autoencoder(cut)
    tensors = load_file(poor / WEIGHTS)
    del tensors["encoder.conv_in.weight"]
    save_file(tensors, poor / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UserError, match="lacks 1 of its tensors .encoder.conv_in.weight"):
        load_autoencoder(poor)


def test_without_diffusers(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(UserError, match=r"autoencoder=.* needs diffusers: pip install -e '.\[gen\]'"):
        load_autoencoder(tmp_path)
