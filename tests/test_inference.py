"""Predictions from a checkpoint alone: read as evaluation reads images, whatever they come as; what is refused."""

import json
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from PIL import Image
from timm.data import create_transform
from timm.models import save_for_hf
from torch import nn

import vit3
from tests.toy import CONFIGS, CPU, compose_config, make_folder, make_image, trained
from vit3 import inference
from vit3.build import build_eval_loader, build_trained
from vit3.cli import stored_config
from vit3.config import EvalConfig, typed
from vit3.data import open_split
from vit3.engine.checkpoint import save_checkpoint
from vit3.errors import UserError
from vit3.inference import Predictor, load_predictor, predict

RGB = (
    "data=folder",
    "data.img_size=[20,16]",
    "data.workers=0",
    "data.crop_pct=0.8",
    "data.interpolation=bilinear",
    "++model.kwargs.patch_size=4",
)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def predictor(digits):
    return load_predictor(digits)


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    """A run on files of several kinds and sizes, and these files."""
    root = make_folder(tmp_path_factory.mktemp("folder") / "data", train=8)
    make_image(root / "val" / "class0" / "palette.png", 3, (31, 50), "P")
    make_image(root / "val" / "class1" / "grey.png", 5, (64, 33), "L")
    Image.fromarray(np.arange(900, dtype=np.uint16).reshape(30, 30) * 70).save(root / "val" / "class2" / "deep.png")
    return trained(root.parent, *RGB, f"data.root={root}"), root


def evaluated(run, count):
    """Logits of the first test images as tools/eval.py computes them."""
    options = typed(compose_config(f"checkpoint={run}", "device=cpu", root="eval"), EvalConfig)
    found = build_trained(options, partial(stored_config, configs=CONFIGS), CPU)
    images, _ = next(iter(build_eval_loader(found.cfg, found.images, CPU, count)))
    with torch.no_grad():
        return found.model.eval()(images)


def test_digits_are_read_as_evaluation_reads_them(digits, predictor, tmp_path):
    split = open_split("digits", None, "val", 1, "raise")
    arrays = [split.images[i] for i in range(6)]
    for i, pixels in enumerate(arrays):
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    wanted = evaluated(digits, 6)
    ways = (
        arrays,
        [a[..., None] for a in arrays],
        [np.stack([a, a, a, np.full_like(a, 255)], axis=-1) for a in arrays],
        [Image.fromarray(a).convert("RGB") for a in arrays],
        [tmp_path / "0.png", str(tmp_path / "1.png"), *arrays[2:]],
    )
    for images in ways:
        assert torch.equal(predictor.logits(next(predictor.inputs(images))), wanted)
    assert predictor.classes == tuple("0123456789") and predictor.title.startswith(f"{digits}/best_raw.pt: raw weights")
    assert np.array_equal(predictor.pixels(next(predictor.inputs(arrays)))[..., 0], arrays)  # nothing is resized


def test_files_are_read_as_evaluation_reads_them_and_the_data_may_be_gone(colours):
    run, root = colours
    files = sorted((root / "val").rglob("*.png"))
    wanted = evaluated(run, len(files))
    kept = root.parent / "kept"
    shutil.copytree(root / "val", kept)
    shutil.move(root, root.parent / "gone")
    try:
        predictor = load_predictor(run)
        inputs = next(predictor.inputs([kept / file.relative_to(root / "val") for file in files]))
    finally:
        shutil.move(root.parent / "gone", root)
    assert inputs.shape == (9, 3, 20, 16) and predictor.classes == ("class0", "class1", "class2")
    assert torch.equal(predictor.logits(inputs), wanted)


def test_one_or_many_in_order_whatever_the_batches(digits, predictor):
    images = [open_split("digits", None, "val", 1, "raise").images[i] for i in range(7)]
    found = predictor.predict(images, topk=3, batch_size=3)
    for image, prediction in zip(images, found, strict=True):
        (alone,) = predictor.predict(image, topk=3)
        assert alone.classes == prediction.classes
        assert alone.probabilities == pytest.approx(prediction.probabilities, abs=1e-5)
    logits = torch.cat([predictor.logits(batch) for batch in predictor.inputs(images, 3)])
    chances = logits.softmax(-1)
    assert [int(p.classes[0]) for p in found] == chances.argmax(-1).tolist()
    assert [p.probabilities[0] for p in found] == pytest.approx(chances.amax(-1).tolist())
    assert all(p.probabilities == tuple(sorted(p.probabilities, reverse=True)) for p in found)
    (whole,) = vit3.predict(images[0], digits, topk=99)  # all there are
    assert sorted(whole.classes) == list("0123456789") and sum(whole.probabilities) == pytest.approx(1)
    assert [p.classes for p in predictor.predict(tuple(images), topk=3)] == [p.classes for p in found]
    assert vit3.predict is predict and predictor.predict([]) == [] and not hasattr(vit3, "predictions")


def test_the_network_runs_as_it_was_evaluated_in_training():
    seen = []

    class Network(nn.Module):
        def forward(self, x):
            seen.append((x.is_contiguous(memory_format=torch.channels_last), torch.get_autocast_dtype("cpu"),
                         torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()))  # fmt: skip
            return x.mean((2, 3)).bfloat16()

    plain = Predictor(Network(), ("a", "b", "c"), {}, CPU.device, "title")
    for predictor in (plain, replace(plain, amp="bfloat16", channels_last=True)):
        assert predictor.logits(torch.randn(2, 3, 4, 4)).dtype == torch.float32
    assert seen[0][0] is seen[0][2] is False and seen[1] == (True, torch.bfloat16, True, True)


def test_what_is_asked_for_is_loaded(digits, monkeypatch):
    """Weights, device, and how the run was evaluated, which stands in its configuration."""
    given, images = [], np.zeros((8, 8), np.uint8)
    monkeypatch.setattr(inference, "load_predictor", lambda *args: given.append(args) or plain)
    plain = SimpleNamespace(predict=lambda images, topk: topk)
    assert predict(images, "run", 3, weights="ema", device="cuda") == 3 and given == [("run", "ema", "cuda")]
    read = inference.read_stored

    def stored(place, complete, weights):
        given.append((place, weights))
        found = read(place, complete)
        found.cfg.engine.amp, found.cfg.engine.channels_last = "bfloat16", True
        monkeypatch.setattr(type(found), "load_into", lambda self, model, kind: given.append(kind) or kind)
        return found

    monkeypatch.setattr(inference, "read_stored", stored)
    monkeypatch.setattr(inference, "usable_device", lambda name: torch.device("meta"))
    found = load_predictor(digits, weights="ema", device="cuda")
    assert given[1:] == [(str(digits), "ema"), "ema"] and "ema weights of" in found.title
    assert (found.amp, found.channels_last, found.model.training) == ("bfloat16", True, False)
    assert found.device.type == "meta" and all(p.is_meta for p in found.model.parameters())


def test_folders_in_the_layout_of_timm(tmp_path):
    torch.manual_seed(1)
    model = timm.create_model("vit3_tiny", depth=1, embed_dim=32, num_heads=2, num_classes=3, patch_size=8).eval()
    how = dict(
        input_size=(3, 40, 48), mean=(0.1, 0.2, 0.3), std=(0.5, 0.4, 0.3), interpolation="bilinear", crop_pct=0.8
    )
    names = dict(label_names=["cat", "dog", "owl"])
    save_for_hf(model, tmp_path, model_config=names, data_config=how, safe_serialization=True)
    make_image(tmp_path / "a.png", 3, (70, 90))
    predictor = load_predictor(f"local-dir:{tmp_path}")
    assert not predictor.model.training
    found = predictor.logits(next(predictor.inputs(tmp_path / "a.png")))
    shown = create_transform(**how)(Image.open(tmp_path / "a.png"))[None]
    with torch.no_grad():
        assert torch.allclose(found, model(shown), atol=1e-5)
    (best,) = predictor.predict(tmp_path / "a.png", topk=1)
    assert best.classes == (names["label_names"][found.argmax()],)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["label_names"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_predictor(tmp_path).classes == ("0", "1", "2")
    (tmp_path / "config.json").write_text(json.dumps(config | {"label_names": {"2": "owl", "0": "cat"}}))
    assert load_predictor(tmp_path).classes == ("cat", "1", "owl")
    with pytest.raises(UserError, match="weights=ema, but .* holds one kind of weights"):
        load_predictor(tmp_path, weights="ema")
    with pytest.raises(UserError, match="give the folder with its config.json"):
        load_predictor(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="cannot be loaded as vit3_tiny: "):
        load_predictor(tmp_path)


def test_networks_without_classes_are_refused(tmp_path):
    cfg = compose_config("recipe=dit3_digits")
    save_checkpoint(dict(config=OmegaConf.to_container(cfg), classes=list("0123456789")), tmp_path / "best_raw.pt")
    with pytest.raises(UserError, match="holds the generator dit3_.*tools/sample.py"):
        load_predictor(tmp_path)
    (tmp_path / "config.json").write_text('{"architecture": "dit3_s_8"}')
    with pytest.raises(UserError, match="holds the generator dit3_s_8"):
        load_predictor(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="names no architecture"):
        load_predictor(tmp_path)
    model = timm.create_model("vit3_tiny", depth=1, embed_dim=32, num_heads=2, num_classes=0)
    save_for_hf(model, tmp_path, safe_serialization=True)
    with pytest.raises(UserError, match="holds vit3_tiny without a classifier"):
        load_predictor(tmp_path)
    with pytest.raises(UserError, match="no such checkpoint"):
        load_predictor(tmp_path / "nowhere")
    with pytest.raises(UserError, match="device=tpu9 is unknown; use one of: auto, cpu, cuda"):
        load_predictor(tmp_path, device="tpu9")


def test_images_that_are_none(predictor, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no image")
    for image, sentence in [
        (np.zeros((0, 8), np.uint8), r"an image is an array \(0, 8\) of uint8"),
        (np.zeros((8, 8)), "an image is an array \\(8, 8\\) of float64; give uint8"),
        (np.zeros((1, 3, 8, 8), np.uint8), "give uint8 .*several as a list"),
        (np.zeros((3, 8, 8), np.uint8), "give uint8"),  # channels first
        (torch.zeros(3, 8, 8), "an image is a Tensor; give a path"),
        (tmp_path / "broken.png", "broken.png cannot be decoded"),
        (tmp_path / "nowhere.png", "nowhere.png cannot be decoded"),
    ]:
        with pytest.raises(UserError, match=sentence):
            predictor.predict(image)
    with pytest.raises(UserError, match="topk=0 is not allowed"):
        predictor.predict(np.zeros((8, 8), np.uint8), topk=0)


def test_configurations_are_in_the_package_or_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(inference, "__file__", str(tmp_path / "vit3" / "inference.py"))
    assert inference._configs() == tmp_path / "configs"
    (tmp_path / "vit3" / "configs").mkdir(parents=True)
    assert inference._configs() == tmp_path / "vit3" / "configs"


def test_a_program_of_the_callers_own_hydra_stays_as_it_was(digits, tmp_path):
    (tmp_path / "train.yaml").write_text("a: 1")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        own = GlobalHydra.instance().hydra
        assert load_predictor(digits).classes[3] == "3"
        assert GlobalHydra.instance().hydra is own
