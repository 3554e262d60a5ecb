"""tools/eval_generation.py on the digits, in the features of a classifier of ours."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from vit3.tools.eval_generation import eval_generation
from vit3.tools.train import train

from tests.toy import compose_config, no_pictures, short_run
from vit3.data import open_split
from vit3.errors import UserError
from vit3.files import sha256_of
from vit3.generation.folder import SampleFolder

VAL = open_split("digits", None, "val", 1, "raise")


def evaluate(samples, *overrides):
    eval_generation(compose_config(f"samples={samples}", "device=cpu", *overrides, root="eval_generation"))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A run whose network is better than chance."""
    output = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        no_pictures(patch.setattr)
        narrow = ("++model.kwargs.embed_dim=48", "++model.kwargs.num_heads=3", "augment=none", "optim.lr=1e-2")
        train(short_run(output, "name=a", "engine.steps_per_epoch=20", "engine.batch_size=64", *narrow, epochs=3))
    return output / "a"


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The test digits as a set of samples that were asked to be what they are."""
    path = tmp_path_factory.mktemp("samples") / "s"
    settings = {"guidance": 4.0, "sampler": "ddim"}
    folder = SampleFolder.start(path, len(VAL), settings, VAL.labels.tolist(), VAL.classes, {})
    for i, image in enumerate(VAL.images):
        folder.write(i, image[..., None])
    return path


@pytest.fixture(scope="module")
def scored(classifier, digits, tmp_path_factory):
    """The report on the test digits."""
    output = tmp_path_factory.mktemp("scores") / "scores.json"
    evaluate(digits, "reference=digits", f"classifier={classifier}", f"output={output}")
    return json.loads(output.read_text())


def test_agreement_is_the_test_accuracy(scored, classifier):
    """The classifier sees pictures as it sees its test images: to the last one it decides as in its training's log."""
    accuracy = json.loads((classifier / "summary.json").read_text())["best"]["top1"]
    assert 15 < accuracy < 100  # chance is 10, give or take 1.6
    assert scored["scores"]["agreement"] == pytest.approx(accuracy / 100, abs=1e-9)
    by_class = scored["agreement_by_class"]
    counts = np.bincount(VAL.labels)
    assert sum(by_class[str(k)] * counts[k] for k in range(10)) / len(VAL) == pytest.approx(accuracy / 100)


def test_real_digits_score_well(scored, classifier, tmp_path):
    """The test digits are near the training digits; noise is not."""
    noise = np.random.default_rng(0).integers(0, 256, (100, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "noise.npz", noise)
    evaluate(tmp_path / "noise.npz", "reference=digits", f"classifier={classifier}")
    report = json.loads((tmp_path / "scores.json").read_text())
    real, noisy = scored["scores"], report["scores"]
    assert real.keys() - noisy.keys() == {"agreement"}
    assert real["frechet_distance"] < noisy["frechet_distance"] / 3
    assert real["recall"] > 0.7 and real["precision"] > 0.7 and noisy["recall"] < 0.3
    assert report["protocol"]["sampler"] == "unknown"


def test_report_says_under_which_protocol(scored, classifier, digits):
    protocol = scored["protocol"]
    assert (protocol["samples"], protocol["n"], protocol["sampler"], protocol["guidance"]) == (
        str(digits),
        360,
        "ddim",
        4,
    )
    assert (protocol["reference"], protocol["reference_images"]) == ("digits:train", 1437)
    features = protocol["features"]
    assert features["name"] == "vit3_tiny" and features["sha256"] == sha256_of(classifier / "best_raw.pt")
    assert scored["left_out"].keys() == {"sfid"} and "fid" not in scored["scores"]


def test_a_report_replaces_another(classifier, tmp_path, capsys):
    """Settings of two calls are never mixed."""
    np.savez(tmp_path / "a.npz", VAL.images[:40])
    evaluate(tmp_path / "a.npz", "reference=digits:val", f"classifier={classifier}", "metrics=[fid,is]")
    evaluate(tmp_path / "a.npz", f"classifier={classifier}", "metrics=[is]", "splits=2", "threads=1", "batch_size=7")
    report = json.loads((tmp_path / "scores.json").read_text())
    assert report["scores"].keys() == {"class_score", "class_score_std"}
    assert report["protocol"]["reference"] is None and report["protocol"]["splits"] == 2
    text = capsys.readouterr().out
    assert "frechet_distance" in text and "class_score" in text and "guidance_interval" in text
    assert {path.name for path in tmp_path.iterdir()} == {"a.npz", "scores.json"}


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["classifier=nowhere"], "nowhere: no such checkpoint"),
        (["classifier=a", "inception=b"], "inception and classifier are both given"),
        (["inception=nowhere.pth", "metrics=[is]"], "inception=nowhere.pth: no such file"),
        (["output=nowhere/scores.json"], "output=nowhere/scores.json: its folder is missing"),
        (["output=."], "output=. is a folder or in one that is not writable"),
    ],
)
def test_refused(overrides, text):
    with pytest.raises(UserError, match=text):
        evaluate("digits:val", *overrides)


def test_generators_are_no_classifiers(classifier, tmp_path):
    state = torch.load(classifier / "best_raw.pt", weights_only=True)
    state["config"] = OmegaConf.to_container(compose_config("task=diffusion", "model.name=dit3_s_2", "diffusion=ddpm"))
    torch.save(state, tmp_path / "g.pt")
    with pytest.raises(UserError, match="g.pt is a generator; give a run that was trained to classify images"):
        evaluate("digits:val", "reference=digits", f"classifier={tmp_path / 'g.pt'}")
