"""Planning: what is counted against what PyTorch's allocator sees, what fits, and what is said."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from vit3.tools.plan import _Parts, count_memory, data_facts, plan, read, rows

from tests.toy import compose_config, make_folder
from vit3.analysis.memory import Memory, kept_bytes
from vit3.config import PlanConfig, known_keys
from vit3.engine.distributed import Processes
from vit3.engine.precision import autocast
from vit3.errors import UserError

CPU = Processes(torch.device("cpu"))
PLAIN = ("++model.kwargs.depth=1", "engine.device=cpu")
HIERARCHICAL = (
    "model=h_vit3_tiny", "++model.kwargs.dims=[16,32]", "++model.kwargs.depths=[1,1]", "++model.kwargs.num_heads=[2,2]",
    "data.img_size=[32,32]", "engine.device=cpu",
)  # fmt: skip
MEMORY = Memory(100, 100, 200, 100, kept=20, kept_per_image=9, transient=10, transient_per_image=1, step=50)


def planned(*overrides: str) -> PlanConfig:
    return read(compose_config(*overrides, root="plan"))


def allocated_by_forward(cfg: PlanConfig, size: int) -> int:
    """Bytes that a real forward pass allocates on the CPU and does not free, as the allocator reports them."""
    parts = _Parts(cfg, *data_facts(cfg), CPU)
    parts.task.train()
    batch = parts.batch(size, parts.mixes)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        with autocast(torch.device("cpu"), cfg.engine.amp):
            result = parts.task(*batch)
    del result
    return sum(event.self_cpu_memory_usage for event in seen.key_averages())


@pytest.mark.parametrize(
    "overrides",
    [
        PLAIN,
        (*PLAIN, "engine.amp=bfloat16", "augment.mixup=0.8", "task=mesa"),
        (*PLAIN, "model.grad_checkpointing=true"),
        (*HIERARCHICAL, "engine.amp=bfloat16"),
    ],
    ids=["plain", "plain-bf16-mixed-mesa", "plain-checkpointing", "hierarchical-bf16"],
)
def test_kept_is_what_the_allocator_sees(overrides):
    """At a third size, far from the two that were counted, and with real tensors."""
    cfg = planned(*overrides)
    memory = count_memory(cfg, *data_facts(cfg))
    assert memory.kept + 38 * memory.kept_per_image == pytest.approx(allocated_by_forward(cfg, 38), rel=0.05)


@pytest.mark.parametrize(
    ("overrides", "tolerance"),
    [(PLAIN, 0.02), ((*HIERARCHICAL, "model.grad_checkpointing=true"), 0.12)],  # convolutions have workspaces
    ids=["plain", "hierarchical-checkpointing"],
)
def test_peak_is_what_the_allocator_sees(overrides, tolerance):
    """A real forward and backward pass, its allocations added up in the order of time."""
    cfg = planned(*overrides)
    memory = count_memory(cfg, *data_facts(cfg))
    parts = _Parts(cfg, *data_facts(cfg), CPU)
    parts.task.train()
    for p in parts.model.parameters():
        p.grad = torch.zeros_like(p)
    batch = parts.batch(150, parts.mixes)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        parts.task(*batch)["loss"].backward()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert memory.at(150) - memory.standing() == pytest.approx(max(itertools.accumulate(changes)), rel=tolerance)


def test_standing_memory():
    cfg = planned(*PLAIN)
    memory = count_memory(cfg, *data_facts(cfg))
    count = sum(p.numel() for p in _Parts(cfg, *data_facts(cfg), CPU).model.parameters())
    assert memory.parameters == memory.gradients == memory.average == 4 * count  # no buffers
    assert memory.optimizer == pytest.approx(2 * 4 * count, rel=0.01)  # AdamW's two moments, and its counters
    without = planned(*PLAIN, "engine.ema_decay=null", "optim.opt=sgd", "model.freeze=[blocks]")
    memory = count_memory(without, *data_facts(without))
    assert memory.average == 0 and memory.gradients < memory.parameters and memory.optimizer < 1.01 * memory.gradients


def test_checkpointing_and_16_bit_need_less():
    plain, shorter, narrower = (
        count_memory(cfg, *data_facts(cfg)).kept_per_image
        for cfg in (
            planned(*PLAIN, o) for o in ("engine.amp=null", "model.grad_checkpointing=true", "engine.amp=float16")
        )
    )
    assert shorter < 0.5 * plain and 0.4 * plain < narrower < 0.8 * plain


def test_rules_of_a_gpu_need_no_gpu():
    """CUDA's autocast widens layer norms, which the CPU's does not; counted without a GPU."""
    cpu, gpu = (
        count_memory(cfg, *data_facts(cfg)).kept_per_image
        for cfg in (planned(PLAIN[0], "engine.amp=bfloat16", f"engine.device={device}") for device in ("cpu", "auto"))
    )
    assert cpu != gpu and cpu == pytest.approx(gpu, rel=0.5)
    assert not torch.is_autocast_enabled("cuda")


def test_kept_bytes():
    x, w = torch.randn(10, 10, requires_grad=True), torch.randn(10, 10, requires_grad=True)
    assert kept_bytes(lambda: x.exp() * x.exp()) == 4 * 200
    assert kept_bytes(lambda: x[:5] @ w) == 4 * 200  # a view holds its whole storage
    assert kept_bytes(lambda: x @ w, (x, w)) == 0


@pytest.mark.parametrize("limit", [531, 600, 1234])
def test_largest_batch_fits_and_the_next_does_not(limit):
    for unit, shards in ((1, 1), (2, 1), (2, 4)):
        largest = MEMORY.largest_batch(limit, unit, shards)
        assert largest % unit == 0 and MEMORY.at(largest + unit, shards) > limit
        assert largest == 0 or MEMORY.at(largest, shards) <= limit
    assert MEMORY.largest_batch(499) == 0
    assert MEMORY.at(0) == 550 and MEMORY.at(100) == 500 + 30 + 1000  # the optimiser's step, then the passes


def test_table():
    cfg = planned(*PLAIN, "engine.batch_size=64", "processes=[1,4]", "memory_gb=700e-9", "reserve=0", "images=6400")
    one, four = rows(cfg, 6400, MEMORY, 10.0, _Parts(cfg, 6400, 10, CPU).model)
    assert (one.largest, one.accumulation, one.per_pass) == (16, 4, 16)  # 500 + 30 + 16 * 10 <= 700
    assert (four.accumulation, four.per_pass) == (1, 16)
    assert one.hours == pytest.approx(36 * 6400 / 10 / 3600) and four.hours == pytest.approx(one.hours / 4)
    assert one.gb == pytest.approx(690e-9)
    capped = rows(dataclasses.replace(cfg, engine=dataclasses.replace(cfg.engine, max_per_process=8)), 6400, MEMORY,
                  10.0, _Parts(cfg, 6400, 10, CPU).model)  # fmt: skip
    assert (capped[0].accumulation, capped[0].per_pass) == (8, 8)


def test_table_says_what_cannot_be():
    cfg = planned(*PLAIN, "engine.batch_size=4", "processes=[1,8]", "memory_gb=1e-6", "reserve=0.3")
    model = _Parts(cfg, 1437, 10, CPU).model
    assert "global and less than" in rows(cfg, 1437, MEMORY, None, model)[1].problem
    small = dataclasses.replace(cfg, memory_gb=4e-7)
    assert all("grad_checkpointing=true" in row.problem for row in rows(small, 1437, MEMORY, None, model))


def test_known_data_need_not_be_here(tmp_path):
    assert data_facts(planned("recipe=vit3_tiny_in1k")) == (1_281_167, 1000)
    assert data_facts(planned("recipe=vit3_tiny_in1k", "images=50", "classes=7")) == (50, 7)
    with pytest.raises(UserError, match="data=folder says nothing of its size; give images=N and classes=K"):
        data_facts(planned("data=folder"))
    make_folder(tmp_path, classes=3, train=4)
    assert data_facts(planned("data=folder", f"data.root={tmp_path}")) == (12, 3)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("processes=0", "processes=0 is not allowed; give a number from 1 on"),
        ("processes=[2,x]", "processes=.2, 'x'. is not allowed"),
        ("memory_gb=-1", "memory_gb=-1.0 is not allowed; it must be more than 0"),
        ("images_per_s=0", "images_per_s=0.0 is not allowed"),
        ("reserve=1", "reserve=1.0 is not allowed"),
    ],
)
def test_wrong_values(override, sentence):
    with pytest.raises(UserError, match=sentence):
        planned(override)


def test_keys_are_those_of_training_and_its_own():
    assert set(known_keys(PlanConfig)) > {"processes", "memory_gb", "optim.lr"}
    assert planned("processes=8").processes == [8]


def test_command(capsys):
    plan(compose_config(*PLAIN, "processes=2", "engine.epochs=4", root="plan"))
    text = capsys.readouterr().out
    assert "images/s measured here in" in text and "says nothing of a GPU" in text and "rules of a CPU" in text


def test_hours_that_are_given_are_not_measured(capsys):
    plan(compose_config(*PLAIN, "processes=2", "images_per_s=0.5", "optim.warmup_epochs=0", root="plan"))
    text = capsys.readouterr().out
    assert "from images_per_s=0.5, as given" in text and "measured here" not in text
    assert f"{36 * 22 * 64 / (0.5 * 2) / 3600:.1f}" in text  # 22 updates of 64 in each of 36 epochs
