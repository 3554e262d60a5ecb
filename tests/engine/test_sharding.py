"""Sharded training: the numbers of DDP, one checkpoint format, and the plain thing where nothing is sharded."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import timm
import torch
import torch.distributed as dist
from timm.task import ClassificationTask
from timm.utils import ModelEmaV3
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from tests.helpers import same_dict, shallow
from tests.processes import run_processes
from vit3.engine.distributed import start_processes
from vit3.engine.sharding import (
    LocalEma,
    gradient_norm,
    is_sharded,
    load_model,
    load_optimizer,
    shard,
    synchronise,
    whole,
)
from vit3.errors import UserError

CPU, CLASSES, DECAY = torch.device("cpu"), 3, 0.7  # 3 rows on 2 processes: uneven
SHAPES = dict(  # the second has batch norms
    vit3_tiny=dict(embed_dim=32, depth=2, num_heads=2),
    h_vit3_tiny=dict(dims=(16,), depths=(2,), num_heads=(2,)),
)
close = partial(assert_close, rtol=1e-6, atol=1e-6)


class Training:
    """The same training in one of three ways: plain, ddp, sharded."""

    def __init__(self, name: str, how: str, accumulate: int = 1, seed: int = 0):
        torch.manual_seed(seed)
        model = timm.create_model(name, num_classes=CLASSES, **SHAPES[name])
        self.task, self.how, self.accumulate = ClassificationTask(model, verbose=False), how, accumulate
        self.task.trainable_module_ema = LocalEma(model, decay=DECAY)
        self.ema = self.task.trainable_module_ema.module
        if how == "sharded":
            shard(model, CPU)
            shard(self.task.trainable_module_ema, CPU)
        if how == "ddp":  # statistics of the process's own images, as in a sharded model
            self.task.trainable_module = DistributedDataParallel(model, broadcast_buffers=False)
        self.model = model
        # eps: biases before a batch norm have no gradient but rounding, which Adam would blow up to whole steps
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)

    def backward(self, step: int, rank: int) -> None:
        self.task.train()
        for part in range(self.accumulate):
            generator = torch.Generator().manual_seed(step * 100 + part * 10 + rank)
            images = torch.randn(4, 3, 33, 32, generator=generator)
            target = torch.randint(CLASSES, (4,), generator=generator)
            with synchronise(self.task, last=part == self.accumulate - 1):
                (self.task(images, target)["loss"] / self.accumulate).backward()

    def step(self, step: int, rank: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        self.backward(step, rank)
        norm = gradient_norm(self.model.parameters(), max_norm=0.1)
        self.optimizer.step()
        self.task.update_ema()
        return norm

    @torch.no_grad()
    def evaluate(self) -> torch.Tensor:
        images = torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)
        return torch.cat([model.eval()(images) for model in (self.task.get_eval_model(), self.ema)])

    def state(self) -> dict:
        state = dict(model=self.model.state_dict(), ema=self.ema.state_dict(), optimizer=self.optimizer.state_dict())
        return copy.deepcopy(whole(state))

    def load(self, state: dict) -> None:
        load_model(self.model, state["model"])
        load_model(self.ema, state["ema"])
        load_optimizer(self.optimizer, state["optimizer"])


def _flat(state: dict) -> dict[str, torch.Tensor]:
    """All tensors of :meth:`Training.state` by name."""
    moments = {f"{n}.{k}": v for n, values in state["optimizer"]["state"].items() for k, v in values.items()}
    return {**state["model"], **{f"ema.{k}": v for k, v in state["ema"].items()}, **moments}


def _train_both(name: str):
    rank = start_processes("cpu").rank
    for accumulate in (1, 2):
        ddp, sharded = (Training(name, how, accumulate) for how in ("ddp", "sharded"))
        assert [is_sharded(x.model) for x in (ddp, sharded)] == [False, True]
        ema = sharded.state()["model"]
        for step in range(2):
            close(sharded.evaluate(), ddp.evaluate())  # before and between the steps
            norm = sharded.step(step, rank)
            assert type(norm) is torch.Tensor and norm.ndim == 0
            close(norm, ddp.step(step, rank))
            ema = _averaged(ema, sharded.state()["model"])
        expected, got = ddp.state(), sharded.state()
        assert list(got["model"]) == list(expected["model"]) and got["optimizer"].keys() == expected["optimizer"].keys()
        assert {type(x) for x in _flat(got).values()} == {torch.Tensor}
        close(_flat(got), _flat(expected))
        close(got["ema"], ema)
    own = sum(p.to_local().numel() for x in (sharded.model, sharded.ema) for p in x.parameters())
    return own, sum(p.numel() for x in (sharded.model, sharded.ema) for p in x.parameters())


def _averaged(ema: dict, now: dict) -> dict:
    """The moving average by its formula."""
    return {k: DECAY * v + (1 - DECAY) * now[k] if v.is_floating_point() else now[k] for k, v in ema.items()}


@pytest.mark.parametrize("name", SHAPES)
def test_training_equals_ddp_and_the_average_its_formula(name):
    (first, total), (second, _) = run_processes(_train_both, 2, name)
    assert first + second == total and abs(first - second) < 0.01 * total  # halved but for a row of the head


def _checkpoint(folder):
    rank, name = start_processes("cpu").rank, "h_vit3_tiny"
    first = Training(name, "sharded")
    for step in range(2):
        first.step(step, rank)
    state = first.state()
    torch.save(state, folder / f"{rank}.pt")
    saved = torch.load(folder / f"{rank}.pt", weights_only=True)
    others = {how: Training(name, how, seed=1) for how in ("plain", "ddp", "sharded")}
    for other in others.values():
        other.load(copy.deepcopy(saved))
        assert same_dict(_flat(other.state()), _flat(state))
        close(other.evaluate(), first.evaluate())
        assert other.state()["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    first.step(2, rank)
    for how in ("ddp", "sharded"):
        others[how].step(2, rank)
        close(_flat(others[how].state()), _flat(first.state()))
    return {key: value for key, value in _flat(state).items() if "running" not in key}  # those are the process's own


def test_one_format_for_all(tmp_path):
    first, second = run_processes(_checkpoint, 2, tmp_path)
    assert same_dict(first, second)


def _wrong_checkpoints():
    start_processes("cpu")
    training = Training("vit3_tiny", "sharded")
    state = training.state()["model"]
    with pytest.raises(RuntimeError, match="size mismatch for head.weight"):
        load_model(training.model, {**state, "head.weight": torch.zeros(CLASSES + 1, 32)})
    del state["head.weight"]
    with pytest.raises(RuntimeError, match="Missing key.*head.weight"):
        load_model(training.model, state)
    assert load_model(training.model, state, strict=False).missing_keys == ["head.weight"]


def test_wrong_checkpoints_are_refused_as_for_a_plain_model():
    run_processes(_wrong_checkpoints, 2)


def _unfinished():
    rank = start_processes("cpu").rank
    images, target = torch.full((2, 3, 32, 32), 1.0 + rank), torch.tensor([rank, 2])
    gradients = {}
    for how in ("ddp", "sharded"):
        training = Training("vit3_tiny", how)
        with synchronise(training.task, last=False):
            training.task(images, target)["loss"].backward()
        gradients[how] = [p.grad for p in training.model.parameters() if p.grad is not None]
    return gradients


def test_nothing_is_averaged_before_the_last_part():
    first, second = run_processes(_unfinished, 2)
    assert first["sharded"] == second["sharded"] == []  # kept whole, aside
    assert not any(torch.equal(a, b) for a, b in zip(first["ddp"], second["ddp"]))


def _norms():
    rank = start_processes("cpu").rank
    training = Training("vit3_tiny", "sharded")
    training.backward(0, rank)
    parameters = list(training.model.parameters())
    full = [torch.nn.Parameter(x.clone()) for x in whole(parameters)]
    for p, gradient in zip(full, whole([p.grad for p in parameters])):
        p.grad = gradient.clone()
    close(gradient_norm(parameters), nn.utils.get_total_norm([p.grad for p in full]))
    close(whole([p.grad for p in parameters]), [p.grad for p in full])  # unscaled
    close(gradient_norm(parameters, 0.01), nn.utils.clip_grad_norm_(full, 0.01))
    close(whole([p.grad for p in parameters]), [p.grad for p in full])
    if rank == 0:
        parameters[0].grad.to_local().fill_(torch.inf)  # on one process; told by all
    return gradient_norm(parameters, 1.0)


def test_gradient_norm_is_that_of_full_gradients():
    for norm in run_processes(_norms, 2):
        assert norm.isinf() or norm.isnan()


def _start():
    rank = start_processes("cpu").rank
    training = Training("vit3_tiny", "sharded", seed=rank)  # DDP takes rank 0's start too
    return training.state()["model"], training.state()["ema"]


def test_the_start_is_that_of_rank_0():
    for model, ema in run_processes(_start, 2):
        assert same_dict(model, Training("vit3_tiny", "plain", seed=0).model.state_dict()) and same_dict(model, ema)


def _other_models():
    start_processes("cpu")
    models = [
        timm.create_model("test_vit"),
        timm.create_model("test_efficientnet"),
        timm.create_model("test_resnet"),  # has no ``blocks``: the root alone
        nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Flatten(), nn.LazyLinear(2)),
        shallow("vit3_tiny").to(memory_format=torch.channels_last),
        shallow("h_vit3_tiny"),
    ]
    models[3](torch.zeros(1, 3, 32, 32))
    models[5].set_grad_checkpointing()
    for model in models:
        size = getattr(model, "default_cfg", {}).get("input_size", (3, 32, 32))[-1]
        images = torch.ones(2, 3, min(size, 160), min(size, 160))
        plain = copy.deepcopy(model)
        shard(model, CPU)
        for x in (plain, model):
            with torch.autocast("cpu", torch.bfloat16):
                loss = x(images).float().square().mean()
            loss.backward()
        gradients = whole([p.grad for p in model.parameters()])
        assert_close(gradients, [p.grad for p in plain.parameters()], rtol=1e-2, atol=1e-3)


def test_models_of_other_shapes_and_precisions():
    run_processes(_other_models, 2)


def _scaled():
    rank = start_processes("cpu").rank
    training = Training("vit3_tiny", "sharded")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = training.state()["model"]
    training.backward(0, rank)
    if rank == 0:
        next(training.model.parameters()).grad.to_local().fill_(torch.inf)  # in one shard
    scaler.scale(torch.ones(()))
    scaler.step(training.optimizer)
    scaler.update()
    assert scaler.get_scale() == 4 and same_dict(training.state()["model"], before)


def test_an_overflow_in_one_shard_skips_the_step_everywhere():
    run_processes(_scaled, 2)


def _summing():
    start_processes("cpu")
    dist.reduce_scatter_tensor = lambda out, given, op: out.copy_(given.sum())
    with pytest.raises(UserError, match="gloo of torch .* does not average, which sharding needs"):
        Training("vit3_tiny", "sharded")


def test_a_backend_that_sums_is_refused():
    run_processes(_summing, 2)


def test_alone_nothing_is_sharded():
    training = Training("vit3_tiny", "sharded")
    reference = Training("vit3_tiny", "plain")
    reference.task.trainable_module_ema = ModelEmaV3(reference.model, decay=DECAY)
    reference.ema = reference.task.trainable_module_ema.module
    assert not is_sharded(training.model)
    for step in range(2):
        training.step(step, 0)
        reference.optimizer.zero_grad()
        reference.backward(step, 0)
        nn.utils.clip_grad_norm_(reference.model.parameters(), 0.1)
        reference.optimizer.step()
        reference.task.update_ema()
    assert same_dict(_flat(training.state()), _flat(reference.state()))
    again = Training("vit3_tiny", "plain", seed=1)
    again.load(training.state())
    assert same_dict(_flat(again.state()), _flat(reference.state()))
