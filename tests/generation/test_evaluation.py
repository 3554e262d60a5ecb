"""From two places to scores: what is compared with what, what is left out, refused or warned of."""

import json
import logging

import numpy as np
import pytest
import torch
from PIL import Image

from tests.generation.networks import MeanFeatures, PublishedMeans
from vit3.errors import UserError
from vit3.generation.compared import open_reference, open_samples
from vit3.generation.evaluation import METRICS, agreement, score
from vit3.generation.folder import SampleFolder
from vit3.generation.report import UNKNOWN, score_report, score_tables, write_report
from vit3.generation.scores import Statistics, frechet_distance

RNG = np.random.default_rng(0)
FAKE = RNG.integers(0, 200, (12, 4, 4, 3), dtype=np.uint8)
REAL = RNG.integers(50, 256, (15, 4, 4, 3), dtype=np.uint8)
SETTINGS = {"sampler": "ddpm", "steps": 250, "guidance": 1.5, "seed": 3, "checkpoint": {"path": "a.pt", "sha256": "f0"}}


@pytest.fixture
def places(tmp_path):
    """Archives of samples and of a reference."""
    np.savez(tmp_path / "fake.npz", FAKE)
    np.savez(tmp_path / "real.npz", REAL)
    return str(tmp_path / "fake.npz"), str(tmp_path / "real.npz")


def features_of(pixels):
    x = pixels.reshape(len(pixels), -1, 3) / 255
    return np.concatenate([x.mean(1), x.std(1, ddof=1)], axis=1)


def statistics(x):
    return Statistics(x.mean(0), np.cov(x, rowvar=False))


def sample_folder(path, images, in_turn=(1, 0)):
    folder = SampleFolder.start(path, len(images), SETTINGS, in_turn, ["dark", "bright"], {})
    for i in reversed(range(len(images))):
        folder.write(i, images[i])
    return folder


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_all_metrics_of_images(places, batch_size):
    samples, reference = open_samples(places[0]), open_reference(places[1])
    network = PublishedMeans()
    found = score(samples, reference, network, METRICS, splits=3, batch_size=batch_size)
    assert max(network.seen) == min(batch_size, 15)
    ours, theirs = statistics(features_of(FAKE)), statistics(features_of(REAL))
    assert found.values["fid"] == pytest.approx(frechet_distance(ours, theirs), rel=1e-4)
    corners = [statistics(pixels[:, 0, 0].astype(float)) for pixels in (FAKE, REAL)]
    assert found.values["sfid"] == pytest.approx(frechet_distance(*corners), rel=1e-6)
    assert found.values.keys() == {"fid", "sfid", "inception_score", "inception_score_std", "precision", "recall"}
    assert found.compared == dict.fromkeys(("fid", "sfid", "precision", "recall"), "15 images")
    assert not found.left_out and not found.per_class
    assert found.values == pytest.approx(
        score(samples, reference, PublishedMeans(), METRICS, splits=3, batch_size=4).values, rel=1e-6
    )


def test_precision_and_recall_are_not_swapped(tmp_path):
    """Samples that are all one image of the reference: precise, but they cover nothing."""
    np.savez(tmp_path / "one.npz", REAL[:1].repeat(9, 0))
    np.savez(tmp_path / "real.npz", REAL)
    pair = open_samples(str(tmp_path / "one.npz")), open_reference(str(tmp_path / "real.npz"))
    values = score(*pair, MeanFeatures(), ["precision", "recall"]).values
    assert values["precision"] == 1 and values["recall"] < 0.2


def test_stored_statistics_are_used_as_they_are(tmp_path, places):
    """ADM's layout: distances to mu and mu_s, which are not those of arr_0; precision and recall to arr_0."""
    rng = np.random.default_rng(1)
    stored = {"": statistics(rng.normal(size=(40, 6))), "_s": statistics(rng.normal(size=(40, 3)))}
    arrays = {f"{name}{end}": getattr(s, name) for end, s in stored.items() for name in ("mu", "sigma")}
    np.savez(tmp_path / "adm.npz", REAL, arr_1=np.zeros(15), **arrays)
    samples, reference = open_samples(places[0]), open_reference(str(tmp_path / "adm.npz"))
    found = score(samples, reference, PublishedMeans(), METRICS, splits=2)
    assert found.values["fid"] == pytest.approx(frechet_distance(statistics(features_of(FAKE)), stored[""]), rel=1e-4)
    corner = statistics(FAKE[:, 0, 0].astype(float))
    assert found.values["sfid"] == pytest.approx(frechet_distance(corner, stored["_s"]), rel=1e-6)
    both = ("precision", "recall")
    plain = score(samples, open_reference(places[1]), PublishedMeans(), both)
    assert {name: found.values[name] for name in both} == plain.values
    file = "statistics in the file"
    assert found.compared == {"fid": file, "sfid": file, "precision": "15 images", "recall": "15 images"}
    # features of another network are compared with the images, never with Inception's statistics
    other = score(samples, reference, MeanFeatures(), ["fid"])
    assert other.values == score(samples, open_reference(places[1]), MeanFeatures(), ["fid"]).values


def test_statistics_alone(tmp_path, places, caplog):
    s = statistics(features_of(REAL))
    np.savez(tmp_path / "stats.npz", mu=s.mu.astype(np.float32), sigma=s.sigma)
    samples, reference = open_samples(places[0]), open_reference(str(tmp_path / "stats.npz"))
    found = score(samples, reference, PublishedMeans(), ["fid", "sfid", "precision"])
    assert found.values.keys() == {"fid"} and found.left_out.keys() == {"sfid", "precision"}
    assert "sfid is left out" in caplog.text and "holds no images and no spatial statistics" in caplog.text
    with pytest.raises(UserError, match="none of them can be computed here; .*Inception's features alone, no images"):
        score(samples, reference, MeanFeatures(), ["fid"])
    np.savez(tmp_path / "wide.npz", mu=np.zeros(9), sigma=np.eye(9))
    with pytest.raises(UserError, match="holds features statistics of 9 numbers, and means gives 6"):
        score(samples, open_reference(str(tmp_path / "wide.npz")), PublishedMeans(), ["fid"])


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (dict(mu=np.zeros(3)), "sigma is not a file in the archive; statistics are mu and sigma"),
        (dict(mu=np.zeros(3), sigma=np.eye(2)), r"mu \(3,\) and sigma \(2, 2\) are no mean and covariance"),
        (dict(mu=np.zeros(2), sigma=np.full((2, 2), np.nan)), "not finite"),
        (dict(x=np.zeros(2)), "no arr_0"),
    ],
)
def test_refused_references(tmp_path, arrays, text):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UserError, match=text):
        open_reference(str(tmp_path / "a.npz"))


def test_classes_asked_for(tmp_path):
    """Images 0, 2, … are asked to be bright and 1, 3, … dark; every third is not."""
    images = np.stack([np.full((4, 4, 1), 220 if i % 2 == 0 else 30, np.uint8) for i in range(12)])
    images[::3] = 255 - images[::3]
    sample_folder(tmp_path / "s", images)
    samples = open_samples(str(tmp_path / "s"))
    assert samples.asked == ("bright", "dark") * 6 and samples.images.n == 12 and samples.settings == SETTINGS
    found = score(samples, None, MeanFeatures(), ["is"], splits=2)
    assert found.values["agreement"] == pytest.approx(8 / 12)
    assert found.per_class == {"dark": pytest.approx(4 / 6), "bright": pytest.approx(4 / 6)}
    np.savez(tmp_path / "s" / "samples.npz", images.repeat(3, axis=-1))
    archive = open_samples(str(tmp_path / "s" / "samples.npz"))
    assert archive.asked == samples.asked and score(archive, None, MeanFeatures(), ["is"], splits=2) == found


def test_agreement_by_class():
    logits = torch.tensor([[1.0, 0], [0, 1], [1, 0], [1, 0]])
    assert agreement(logits, ["a", "b", "b", "b"], ["a", "b"]) == (0.5, {"a": 1.0, "b": pytest.approx(1 / 3)})


def test_unknown_classes_leave_agreement_out(tmp_path):
    sample_folder(tmp_path / "s", FAKE)
    network = MeanFeatures()
    network.classes = ("dark", "light")
    found = score(open_samples(str(tmp_path / "s")), None, network, ["is"], splits=2)
    assert "agreement" not in found.values
    assert found.left_out == {"agreement": "means does not know the classes asked for: bright"}


def test_incomplete_folders_are_refused(tmp_path):
    folder = sample_folder(tmp_path / "s", FAKE)
    folder.files()[3].unlink()
    with pytest.raises(UserError, match=r"11 of 12 images are there; finish them by tools/sample.py"):
        open_samples(str(tmp_path / "s"))


def test_only_images_of_the_set_count(tmp_path):
    sample_folder(tmp_path / "s", FAKE)
    Image.fromarray(REAL[0]).save(tmp_path / "s" / "sheet.png")
    assert open_samples(str(tmp_path / "s")).images.n == 12


def test_refused(places):
    samples, reference, network = open_samples(places[0]), open_reference(places[1]), MeanFeatures()
    with pytest.raises(UserError, match=r"metrics=\['kid'\] is not allowed; choose some of: fid, sfid, is"):
        score(samples, reference, network, ["kid"])
    with pytest.raises(UserError, match="reference has no value, and fid compares with one"):
        score(samples, None, network, METRICS)
    with pytest.raises(UserError, match="splits=13 is more than the 12 samples"):
        score(samples, reference, network, ["is"], splits=13)
    with pytest.raises(UserError, match="neighbours=12 is not less than the 12 images"):
        score(samples, reference, network, ["recall"], neighbours=12)
    with pytest.raises(UserError, match="means has no spatial features"):
        score(samples, reference, network, ["sfid"])
    assert not network.seen  # before any image was shown


def test_warned_of(tmp_path, places, caplog):
    np.savez(tmp_path / "few.npz", FAKE[:6])
    np.savez(tmp_path / "large.npz", REAL.repeat(2, axis=1))
    with caplog.at_level(logging.WARNING):
        score(open_samples(str(tmp_path / "few.npz")), open_reference(str(tmp_path / "large.npz")), MeanFeatures(),
              ["fid"])  # fmt: skip
    assert "samples are 4x4 and the reference 8x4 pixels" in caplog.text
    assert "frechet_distance: 6 samples are too few for 6 features" in caplog.text
    caplog.clear()
    score(open_samples(places[0]), open_reference(places[1]), MeanFeatures(), ["fid"])
    assert not caplog.records


def test_report(tmp_path, places):
    sample_folder(tmp_path / "s", FAKE)
    network, samples, reference = MeanFeatures(), open_samples(str(tmp_path / "s")), open_reference(places[1])
    scores = score(samples, reference, network, METRICS, splits=2)
    path = tmp_path / "scores.json"
    path.write_text("longer than the report " * 1000)
    write_report(path, score_report(scores, samples, reference, network, neighbours=3, splits=2))
    report = json.loads(path.read_text())
    assert report["scores"] == scores.values and report["left_out"] == {"sfid": "means has no spatial features"}
    protocol = report["protocol"]
    assert SETTINGS.items() <= protocol.items() and protocol["n"] == 12 and protocol["splits"] == 2
    assert protocol["guidance_interval"] == protocol["autoencoder"] == UNKNOWN
    assert (protocol["reference"], protocol["reference_images"]) == (places[1], 15)
    assert {"vit3", "torch", "torch_fidelity"} <= protocol["versions"].keys()
    assert report["agreement_by_class"] == scores.per_class
    text = [[str(cell) for column in table.columns for cell in column.cells] for table in score_tables(report)]
    assert "precision" in text[0] and "left out: means has no spatial features" in text[0] and "dark" in text[1]
    with pytest.raises(UserError, match="cannot be written"):
        write_report(tmp_path / "no" / "scores.json", report)
