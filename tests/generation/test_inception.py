"""torch-fidelity's Inception with random weights: its outputs are those that torch-fidelity itself scores by."""

import hashlib
import shutil

import pytest
import torch
import torch_fidelity
from torch.utils.data import TensorDataset
from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3

from tests.generation.networks import write_inception
from vit3.errors import UserError
from vit3.generation.features import collect
from vit3.generation.image_sets import ImageSet
from vit3.generation.inception import InceptionFeatures, load_inception
from vit3.generation.scores import inception_score, precision_recall

CPU = torch.device("cpu")
COUNT = 3


class Pixels(TensorDataset):
    """Images (3, H, W) as torch-fidelity reads them."""

    def __getitem__(self, index):
        return super().__getitem__(index)[0].permute(2, 0, 1)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(0)
    return write_inception(tmp_path_factory.mktemp("inception") / "weights.pth")


@pytest.fixture(scope="module")
def network(weights):
    return load_inception(str(weights), CPU)


@pytest.fixture(scope="module")
def both(network):
    """Two sets of images and all that the network says of them."""
    torch.manual_seed(0)
    pixels = [torch.randint(0, 256, (COUNT, 20, 12, 3), dtype=torch.uint8) // (1 + i) for i in range(2)]
    with torch.inference_mode():
        return pixels, [network(x) for x in pixels]


def test_outputs(network, both, weights):
    pixels, outputs = both
    for kind, width in network.dims.items():
        assert outputs[0][kind].shape == (COUNT, width) and outputs[0][kind].dtype == torch.float32
        assert outputs[0][kind].std() > 1e-3
    assert network.dims["spatial"] == 2023
    last = torch.load(weights, weights_only=True)["fc.weight"]  # the Inception Score takes logits without the bias
    torch.testing.assert_close(outputs[0]["logits"], outputs[0]["features"] @ last.T, rtol=1e-4, atol=1e-3)
    with torch.inference_mode():
        alone = network(pixels[0][1:2])
    for kind, value in alone.items():  # whatever the batch
        torch.testing.assert_close(value[0], outputs[0][kind][1], rtol=1e-4, atol=1e-4)


def test_spatial_features_are_the_first_channels_of_the_block(network, both):
    """The block puts its 1x1 branch first: its first 7 channels, in TensorFlow's order of row, column, channel."""
    block = {}
    hook = network._network.Mixed_6d.register_forward_hook(lambda m, x, y: block.update(y=y))
    with torch.inference_mode():
        network(both[0][0][:1])
    hook.remove()
    expected = block["y"][0]
    assert expected.shape == (768, 17, 17)
    spatial = both[1][0]["spatial"][0].view(17, 17, 7)
    for row, column, channel in ((0, 0, 0), (16, 3, 6), (5, 11, 2)):
        assert spatial[row, column, channel] == pytest.approx(expected[channel, row, column].item(), rel=1e-4, abs=1e-5)
    assert (spatial >= 0).all() and (spatial > 0).any()


def test_scores_are_torch_fidelitys(weights, both):
    """Its own pipeline from pixels to scores; the FID from its statistics is held in test_scores.py."""
    pixels, (own, theirs) = both
    expected = torch_fidelity.calculate_metrics(
        input1=Pixels(pixels[0]), input2=Pixels(pixels[1]), isc=True, prc=True, cuda=False, verbose=False, cache=False,
        feature_extractor="inception-v3-compat", feature_extractor_weights_path=str(weights), isc_splits=1,
        prc_neighborhood=1, save_cpu_ram=True, batch_size=COUNT,
    )  # fmt: skip
    found = precision_recall(own["features"], theirs["features"], neighbours=1)
    assert found == (expected["precision"], expected["recall"])
    assert inception_score(own["logits"], splits=1)[0] == pytest.approx(expected["inception_score_mean"], rel=1e-5)


def test_collected(network, both):
    """Statistics of a set are those of its images, in batches of another size."""
    pixels, outputs = both
    images = ImageSet("a", COUNT, (20, 12), lambda size: (part.numpy() for part in pixels[0].split(size)))
    found = collect(network, images, 2, statistics=["spatial"], keep=["logits"])
    torch.testing.assert_close(found.kept["logits"], outputs[0]["logits"], rtol=1e-4, atol=1e-4)
    mean = torch.from_numpy(found.statistics["spatial"].mu)
    torch.testing.assert_close(mean, outputs[0]["spatial"].double().mean(0), rtol=1e-4, atol=1e-4)
    assert found.kept.keys() == {"logits"} and found.statistics.keys() == {"spatial"}


def test_report_says_which_weights(network, weights):
    expected = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert network.describe() == {"name": "inception-v3-compat", "weights": str(weights), "sha256": expected}


def test_what_was_downloaded_is_found(weights, monkeypatch, tmp_path, network):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", None)  # not called
    file = tmp_path / "checkpoints" / URL_INCEPTION_V3.rpartition("/")[2]
    file.parent.mkdir()
    shutil.copy(weights, file)
    assert load_inception(None, CPU).describe()["sha256"] == network.describe()["sha256"]


def test_without_weights_and_network(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    text = r"missing and cannot be downloaded \(no route to host\); put https.* at .*checkpoints/weights-inception.*pth"
    with pytest.raises(UserError, match=text + r" or give inception=FILE, .* classifier=RUN$"):
        load_inception(None, CPU)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="inception=.*no.pth: no such file"):
        InceptionFeatures(tmp_path / "no.pth", CPU)
    torch.save({"weight": torch.zeros(2)}, tmp_path / "other.pth")
    with pytest.raises(
        UserError, match=r"other.pth holds no weights of torch-fidelity's Inception \(.*\); they are at"
    ):
        InceptionFeatures(tmp_path / "other.pth", CPU)
