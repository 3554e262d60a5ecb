"""Guidance: what is moved by how much, when, and with how many calls of the network."""

import pytest
import torch

from vit3.diffusion import guided

NULL = 10
T = torch.tensor([0, 400, 999])
Y = torch.tensor([3, 0, 9])


class Network:
    """Elementwise in x, t and y; counts its calls."""

    null_label = NULL

    def __init__(self, out_chans, dtype=torch.float64):
        self.calls, self.out_chans, self.dtype = [], out_chans, dtype

    def __call__(self, x, t, y):
        self.calls.append(len(x))
        channel = torch.arange(self.out_chans)[:, None, None]
        mean = x.mean(1, keepdim=True)
        place = (t / 1000 + 0.3 * y)[:, None, None, None]
        return torch.sin(mean + channel + place).to(self.dtype)


def images(channels):
    torch.manual_seed(0)
    return torch.randn(3, channels, 2, 5, dtype=torch.float64)


def parts(network, x):
    return network(x, T, Y), network(x, T, torch.full_like(Y, network.null_label))


@pytest.mark.parametrize("channels, first", [(3, 3), (None, 4), (1, 1), (9, 4)])
def test_first_channels_are_moved(channels, first):
    """The rest, and always the variance, is what the network says with the class."""
    network, x = Network(8), images(4)
    conditional, none = parts(network, x)
    network.calls.clear()
    output = guided(network, x, T, Y, scale=4.0, channels=channels)
    assert network.calls == [6]
    torch.testing.assert_close(output[:, :first], (1 - 4) * none[:, :first] + 4 * conditional[:, :first])
    assert torch.equal(output[:, first:], conditional[:, first:])
    assert not torch.equal(none[:, first:], conditional[:, first:])


@pytest.mark.parametrize("channels", [3, None])
def test_variance_of_one_channel_is_not_moved(channels):
    network, x = Network(2), images(1)
    conditional, none = parts(network, x)
    output = guided(network, x, T, Y, scale=2.0, channels=channels)
    torch.testing.assert_close(output[:, :1], 2 * conditional[:, :1] - none[:, :1])
    assert torch.equal(output[:, 1:], conditional[:, 1:])


def test_scale_one_is_the_network_itself():
    network, x = Network(8), images(4)
    wanted = network(x, T, Y)
    network.calls.clear()
    assert torch.equal(guided(network, x, T, Y, scale=1.0), wanted)
    assert network.calls == [3]


def test_scale_zero_is_the_network_without_a_class():
    network, x = Network(4), images(4)
    torch.testing.assert_close(guided(network, x, T, Y, scale=0.0, channels=None), parts(network, x)[1])


def test_interval():
    """Both ends belong to it; outside of it nothing moves, and no second half is computed where none is needed."""
    network, x = Network(4), images(4)
    conditional, none = parts(network, x)
    moved = 3 * conditional - 2 * none
    output = guided(network, x, T, Y, scale=3.0, channels=None, interval=(0.4, 0.7))
    torch.testing.assert_close(output, torch.stack([conditional[0], moved[1], conditional[2]]))
    output = guided(network, x, T, Y, scale=3.0, channels=None, interval=(0.0, 0.4))
    torch.testing.assert_close(output, torch.stack([moved[0], moved[1], conditional[2]]))
    network.calls.clear()
    assert torch.equal(guided(network, x, T, Y, scale=3.0, interval=(0.5, 0.9)), conditional)
    assert network.calls == [3]


def test_null_label_may_be_given():
    network, x = Network(4), images(4)
    conditional, none = network(x, T, Y), network(x, T, torch.full_like(Y, 5))
    output = guided(lambda *inputs: network(*inputs), x, T, Y, scale=2.0, channels=None, null_label=5)
    torch.testing.assert_close(output, 2 * conditional - none)


def test_low_precision_is_summed_in_float32():
    """A scale of 1.3 would be 1.297 in bfloat16."""
    network, x = Network(8, torch.bfloat16), images(4)
    conditional, none = (half.float() for half in parts(network, x))
    output = guided(network, x, T, Y, scale=1.3)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output[:, :3], none[:, :3] + 1.3 * (conditional - none)[:, :3], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(channels=0), "channels=0 of guidance must be at least 1, or None for all"),
        (dict(interval=(0.6, 0.2)), r"interval=\(0.6, 0.2\) of guidance must be two numbers LOW, HIGH"),
        (dict(interval=(0, 600)), r"interval=\(0, 600\) of guidance must be two numbers"),
        (dict(interval=(0.1,)), r"interval=\(0.1,\) of guidance must be two numbers"),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_refused(options, words, scale):
    with pytest.raises(ValueError, match=words):
        guided(Network(4), images(4), T, Y, scale=scale, **options)


def test_unknown_null_label():
    with pytest.raises(ValueError, match="null_label is not known of this model; give null_label=LABEL"):
        guided(lambda x, t, y: x, images(4), T, Y, scale=2.0)
