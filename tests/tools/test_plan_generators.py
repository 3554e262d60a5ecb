"""What counts and checks a run, on generators: costs and memory of what the network sees, without an autoencoder."""

from __future__ import annotations

import json

import pytest
from vit3.tools.doctor import examine
from vit3.tools.flops import flops
from vit3.tools.plan import _Parts, count_memory, plan, read

from tests.toy import CPU, compose_config, configured
from vit3.build import as_latents
from vit3.doctor import FAIL, OK
from vit3.errors import UserError

DIGITS = ("recipe=dit3_digits", "++model.kwargs.depth=1", "engine.device=cpu", "engine.threads=null")
IMAGENET = ("recipe=dit3_s_8_in256", "data.root=x")


def printed(capsys, tool, *overrides, root):
    tool(compose_config(*overrides, root=root))
    return capsys.readouterr().out


# What the network sees


def test_an_autoencoder_on_the_hub_is_taken_for_stable_diffusions():
    run = configured(*IMAGENET)
    seen, note = as_latents(run)
    assert (seen.data.in_chans, seen.data.img_size, seen.diffusion.autoencoder) == (4, [32, 32], None)
    assert "latents 32x32 of 4 channels, as Stable Diffusion's has, assumed" in note
    assert run.data.img_size == [256, 256] and run.diffusion.autoencoder  # a copy


@pytest.mark.parametrize("inside", ["", "vae"])
def test_a_folder_says_it_itself(tmp_path, inside):
    (tmp_path / inside).mkdir(exist_ok=True)
    facts = {"latent_channels": 16, "block_out_channels": [8, 8, 8]}
    (tmp_path / inside / "config.json").write_text(json.dumps(facts))
    run = configured(*IMAGENET, f"diffusion.autoencoder={tmp_path}", "data.img_size=[64,256]")
    seen, note = as_latents(run)
    assert (seen.data.in_chans, seen.data.img_size) == (16, [16, 64]) and "as its config.json says" in note
    with pytest.raises(UserError, match=r"data.img_size=\[64, 250\] must be multiples of 4, the factor of diffusion"):
        as_latents(configured(*IMAGENET, f"diffusion.autoencoder={tmp_path}", "data.img_size=[64,250]"))


@pytest.mark.parametrize("text", [None, "{", "[]", '{"latent_channels": 4}'])
def test_a_folder_that_says_nothing(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="has no config.json that says latent_channels and block_out_channels"):
        as_latents(configured(*IMAGENET, f"diffusion.autoencoder={tmp_path}"))


def test_cached_latents_and_pixels_are_what_the_network_sees():
    seen, note = as_latents(configured(*IMAGENET, "data=latents"))
    assert (seen.data.in_chans, seen.data.img_size) == (4, [32, 32]) and note == "cached latents of 4 channels"
    for run in (configured("recipe=dit3_digits"), configured()):
        assert as_latents(run) == (run, "")


# The tools


def test_costs_of_a_published_recipe(capsys):
    text = printed(capsys, flops, *IMAGENET, "sizes=[32,[4,16]]", root="flops")
    sizes = {line.split()[0]: line.split() for line in text.splitlines() if "x" in line.split(" ")[1:2] or "G" in line}
    assert sizes["32x32"][1] == sizes["32x32"][3] == "0.4037"  # by formula, and as PyTorch counts
    assert sizes["4x16"][1] == sizes["4x16"][3] and float(sizes["4x16"][1]) < 0.1
    assert "34,966,784" in text and "as Stable Diffusion's has, assumed" in text


def test_costs_of_a_generator_of_pixels(capsys):
    text = printed(capsys, flops, *DIGITS, root="flops")
    assert "8x8" in text and "latents" not in text


@pytest.mark.slow
def test_memory_of_a_published_recipe():
    """Without the autoencoder: what stands is the network's; and checkpointing needs less."""
    cfg = read(compose_config(*IMAGENET, "++model.kwargs.depth=2", root="plan"))
    seen, _ = as_latents(cfg)
    memory = count_memory(seen, 1000, 1000)
    count = sum(p.numel() for p in _Parts(seen, 1000, 1000, CPU).model.parameters())
    assert memory.parameters == memory.gradients == memory.average == 4 * count
    seen.model.grad_checkpointing = True
    assert count_memory(seen, 1000, 1000).kept_per_image < 0.5 * memory.kept_per_image


def test_plan_of_a_published_recipe(capsys):
    given = ("++model.kwargs.depth=1", "processes=8", "images_per_s=100", "images=256000", "engine.epochs=1")
    text = printed(capsys, plan, *IMAGENET, *given, root="plan")
    assert "256x256" in text and "latents 32x32 of 4 channels" in text
    assert "memory, counted from shapes by the rules of a GPU" in text and "0.1" in text.split("hours:")[0]
    (line,) = [line.split() for line in text.splitlines() if line.startswith(" 8 ")]
    assert line[2] == "32" and line[-1] == f"{1000 * 256 / 800 / 3600:.1f}"


def test_plan_times_a_generator_here(capsys):
    text = printed(capsys, plan, *DIGITS, "processes=1", root="plan")
    assert "images/s measured here in" in text


def test_doctor(tmp_path):
    checks = {c.name: c for c in examine(compose_config(*DIGITS, f"output={tmp_path}"))}
    assert {checks[name].status for name in ("configuration", "data", "model", "batch", "learning")} == {OK}
    assert checks["model"].detail.startswith("dit3_s_2: ") and "task diffusion" in checks["learning"].detail


def test_doctor_of_a_run_whose_autoencoder_is_not_there(tmp_path):
    where = (f"output={tmp_path}", f"diffusion.autoencoder={tmp_path}/nowhere")
    checks = {c.name: c for c in examine(compose_config(*DIGITS, *where))}
    assert checks["model"].status == FAIL and "nowhere" in checks["model"].sentence


@pytest.mark.parametrize("tool", [flops, plan], ids=["flops", "plan"])
def test_a_generator_alone_says_what_else_it_needs(tool):
    root = "flops" if tool is flops else "plan"
    with pytest.raises(UserError, match="model.name=dit3_s_8 is a generator; train it with task=diffusion diffusion="):
        tool(compose_config("model=dit3_s_8", root=root))
