"""Parity with the authors' code: weights made by name, inputs made by seed, outputs and gradients compared.

No weight file is needed: a rule gives every tensor of a state dict from its name and shape, and the outputs of the
authors' code on such weights are stored. The folder's README describes the rule and the files.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import vit3
from vit3.diffusion import guided
from vit3.layers.rope import RoPE2d
from vit3.models.dense import DenseHViT3
from vit3.models.official import from_official

COMMIT = "e3477587"  # of the authors' repository
BLOCK_BOUND = {"float32": 2e-6, "float64": 1e-12}
MODEL_BOUND = 2e-5
NORM_BOUND = 1e-3  # relative, of a gradient's norm
SMALL_NORM, SMALL_BOUND = 1e-4, 1e-6  # norms under the first are compared absolutely, to the second


@dataclass(frozen=True)
class Row:
    """One comparison: what was compared, the deviation found and the largest one allowed."""

    what: str
    measured: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.measured <= self.bound  # NaN does not pass


def weights_by_rule(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Tensors for the names and shapes of an official state dict; rotation and position tables are left out."""
    return {
        name: _tensor_by_rule(name, tuple(shape))
        for name, shape in shapes.items()
        if name.rsplit(".", 1)[-1] not in ("rotations", "pos_embed")
    }


def _tensor_by_rule(name: str, shape: tuple[int, ...]) -> Tensor:
    last = name.rsplit(".", 1)[-1]
    if last == "num_batches_tracked":
        return torch.zeros(shape, dtype=torch.long)
    x = _normal(shape, zlib.crc32(name.encode()))
    if last == "running_var":
        return 1 + 0.1 * x.abs()
    if last == "running_mean":
        return 0.1 * x
    if len(shape) <= 1:
        return 1 + 0.1 * x if name.endswith("weight") else 0.02 * x
    fan = shape[-2] if last in ("w1", "w2") else math.prod(shape[1:])
    gain = 0.5 if len(shape) == 4 and last not in ("w1", "w2", "w3") else 1.0
    return (x.double() * gain / math.sqrt(fan)).float()  # rounded once: float64 cases see the last bit


def image(shape: Sequence[int], seed: int) -> Tensor:
    """The input of a golden case: standard normal float32 values."""
    return _normal(shape, seed)


def _normal(shape: Sequence[int], seed: int) -> Tensor:
    x = np.random.RandomState(seed).standard_normal(tuple(shape))
    return torch.from_numpy(np.asarray(x, dtype=np.float32))


def subsample(x: Tensor, at_most: int = 2048) -> Tensor:
    """``flatten()[::stride]`` with a stride that shares no divisor with the size: it visits all rows and columns."""
    stride = -(-x.numel() // at_most)
    while math.gcd(stride, x.numel()) > 1:
        stride += 1
    return x.flatten()[::stride]


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Relative L2 distance in float64; infinite where the shapes differ."""
    if ours.shape != theirs.shape:
        return math.inf
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return ((ours - theirs).norm() / theirs.norm()).item()


def load_by_rule(module: nn.Module) -> nn.Module:
    """Fill a module with weights made from its own names, as the golden cases do; returns it."""
    module.load_state_dict(weights_by_rule({name: x.shape for name, x in module.state_dict().items()}))
    return module


def block_rows(folder: Path) -> Iterator[Row]:
    """The mixer alone: output and all gradients, in float32 and float64."""
    golden = load_file(folder / "block.safetensors")
    for case, p in _read(folder, "block.json").items():
        for dtype, bound in BLOCK_BOUND.items():
            prefix = f"block.{case}.{dtype}"
            if f"{prefix}.y" not in golden:
                continue
            mixer = load_by_rule(vit3.TTT(p["dim"], p["num_heads"])).to(getattr(torch, dtype))
            shape = (p["batch"], p["h"] * p["w"], p["dim"])
            x = image(shape, 7).to(getattr(torch, dtype)).requires_grad_()
            y = mixer(x, p["h"], p["w"], rope=RoPE2d(p["dim"]) if p["rope"] else None)
            (y * image(shape, 8)).sum().backward()
            found = {"y": y, "dx": x.grad, **{f"d_{name}": w.grad for name, w in mixer.named_parameters()}}
            for key, value in found.items():
                error = relative_error(subsample(value), golden[f"{prefix}.{key}"])
                yield Row(f"block {case} {dtype}: {key}", error, bound)


def classifier_rows(folder: Path) -> Iterator[Row]:
    """Pooled features and logits of whole classifiers in eval mode."""
    golden = load_file(folder / "classifiers.safetensors")
    for official in sorted({key.split(".")[0] for key in golden}):
        model = _classifier(folder, official).eval()
        with torch.no_grad():
            maps = model.forward_features(image((2, 3, 224, 224), 1))
            found = {"features": model.forward_head(maps, pre_logits=True), "logits": model.forward_head(maps)}
        for key, value in found.items():
            yield Row(f"{_ours(official)}: {key}", relative_error(value, golden[f"{official}.{key}"]), MODEL_BOUND)


def gradient_rows(folder: Path) -> Iterator[Row]:
    """Loss and gradient norms of whole classifiers in train mode: the largest deviation of all parameters.

    Biases before a BatchNorm have no gradient but rounding noise (norms of 1e-6), which depends on how many threads
    share a sum; so the number of threads is fixed here.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for official, golden in _read(folder, "train_gradients.json").items():
            model = _classifier(folder, official).train()
            loss = F.cross_entropy(model(image((4, 3, 224, 224), 11)), torch.tensor([1, 500, 999, 42]))
            loss.backward()
            yield Row(f"{_ours(official)}: training loss", abs(loss.item() / golden["loss"] - 1), MODEL_BOUND)
            pairs = [(w.grad.norm().item(), golden["grad_norm"][name]) for name, w in model.named_parameters()]
            large = [abs(ours / theirs - 1) for ours, theirs in pairs if theirs >= SMALL_NORM]
            small = [abs(ours - theirs) for ours, theirs in pairs if theirs < SMALL_NORM]
            yield Row(f"{_ours(official)}: largest of {len(large)} gradient norms' deviations", max(large), NORM_BOUND)
            if small:
                what = f"{_ours(official)}: largest of {len(small)} tiny gradient norms' deviations, absolute"
                yield Row(what, max(small), SMALL_BOUND)
    finally:
        torch.set_num_threads(threads)


def dense_rows(folder: Path) -> Iterator[Row]:
    """The four maps of the detection backbone, each through its own LayerNorm, at two image sizes."""
    golden = load_file(folder / "dense.safetensors")
    for official, shapes in _read(folder, "dense_state_dict.json").items():
        arch = official.split("_")[1]
        model = DenseHViT3(arch).eval()
        model.load_state_dict(from_official(weights_by_rule(shapes), f"h_vit3_{arch}_dense"))
        for size in sorted({key.split(".")[1] for key in golden if key.startswith(official)}):
            with torch.no_grad():
                maps = model(image((1, 3, *map(int, size.split("x"))), 3))
            for i, y in enumerate(maps):
                shape, mean, sample = (golden[f"{official}.{size}.out{i}.{k}"] for k in ("shape", "mean_abs", "sample"))
                ours = y.flatten()[:: max(1, y.numel() // 512)][:512]
                error = max(relative_error(ours, sample), relative_error(y.abs().mean(), mean))
                error = error if [*y.shape] == shape.tolist() else math.inf
                yield Row(f"h_vit3_{arch} at {size}: map {i}", error, MODEL_BOUND)


def generator_rows(folder: Path) -> Iterator[Row]:
    """What whole generators predict, alone and guided by 4 on the first three channels as the authors' code does."""
    golden = load_file(folder / "dit.safetensors")
    shapes = _read(folder, "dit_state_dict.json")
    x, t = image((2, 4, 32, 32), 5), torch.tensor([17, 803])
    for official in sorted({key.split(".")[0] for key in golden}):
        name = _ours(official)
        model = timm.create_model(name).eval()
        model.load_state_dict(from_official(weights_by_rule(shapes[official]), name))
        with torch.no_grad():
            y = model(x, t, torch.tensor([3, 1000]))
            moved = guided(model, x, t, torch.tensor([3, 7]), scale=4.0, channels=3)
        yield Row(f"{name}: prediction", relative_error(y, golden[f"{official}.out"]), MODEL_BOUND)
        # the second half of theirs is what was said without a class, which ours does not return
        yield Row(f"{name}: guided prediction", relative_error(moved, golden[f"{official}.cfg4"][:2]), MODEL_BOUND)


def check_all(folder: str | Path) -> list[Row]:
    """All comparisons with the golden values in ``folder``; takes some seconds."""
    folder = Path(folder)
    checks = (block_rows, classifier_rows, gradient_rows, dense_rows, generator_rows)
    return [row for check in checks for row in check(folder)]


def to_markdown(rows: Sequence[Row]) -> str:
    """The text of ``docs/parity.md``: the rule, and one line for each comparison."""
    lines = [
        "# Parity with the authors' code",
        "",
        f"Our outputs and gradients against those of the authors' code at commit {COMMIT}. Both sides get weights made",
        "from each tensor's name and inputs made from a seed: `tests/golden/README.md` has the rule,",
        "`vit3/analysis/parity.py` the comparison. Deviations are relative L2 distances, or relative differences of",
        "norms, unless called absolute; they are rounded to one digit, as the others differ from machine to machine.",
        "",
        f"{sum(row.passed for row in rows)} of {len(rows)} comparisons hold.",
        "",
        "| what | deviation | bound | |",
        "|---|---|---|---|",
    ]
    lines += [f"| {r.what} | {r.measured:.0e} | {r.bound:.0e} | {'pass' if r.passed else 'FAIL'} |" for r in rows]
    return "\n".join(lines) + "\n"


def _read(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def _ours(official: str) -> str:
    return official.replace("DiTTT", "dit3").lower().replace("-", "_").replace("/", "_").replace("vittt", "vit3")


def _classifier(folder: Path, official: str) -> nn.Module:
    weights = weights_by_rule(_read(folder, "classifiers_state_dict.json")[official])
    model = timm.create_model(_ours(official))
    model.load_state_dict(from_official(weights, _ours(official)))
    return model
