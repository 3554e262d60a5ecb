"""Memory format, compilation, checkpointing and processes combined: one update is that of the plain network (P19)."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.processes import run_processes
from tests.toy import configured, one_update, trainer_of
from vit3.engine.distributed import start_processes
from vit3.engine.sharding import is_sharded, whole

MODELS = {
    "vit3_tiny": ("++model.kwargs.depth=2", "++model.kwargs.embed_dim=16"),
    "h_vit3_tiny": (
        "model=h_vit3_tiny", "++model.kwargs.dims=[8,16]", "++model.kwargs.depths=[1,1]",
        "++model.kwargs.num_heads=[2,2]", "data.img_size=[16,16]",
    ),
}  # fmt: skip
COMMON = (  # rounding is not blown up as by Adam; drop-path's random numbers depend on the place of images alone
    "augment=none", "augment.hflip=0", "optim.opt=sgd", "optim.lr=0.1", "optim.lr_batch=8", "optim.warmup_epochs=0",
    "engine.batch_size=8", "engine.max_per_process=4", "engine.device=cpu", "optim.clip_grad=null",
    "model.drop_path_rate=0.5",
)  # fmt: skip
SWITCHES = ("engine.compile", "engine.channels_last", "model.grad_checkpointing")


def combinations(name: str, distributed: bool) -> list[tuple[str, ...]]:
    """All without the compiler, which takes seconds a time; with it every one for one of the two models (alone), or
    all switches of the larger one (on two processes)."""
    plain = name == "vit3_tiny"
    chosen = [(False, *on) for on in product((False, True), repeat=2)]
    if distributed:
        chosen += [] if plain else [(True, True, True)]
    else:
        chosen += [(True, False, True), (True, True, False)] if plain else [(True, False, False), (True, True, True)]
    return [tuple(f"{switch}={str(value).lower()}" for switch, value in zip(SWITCHES, on)) for on in chosen]


def cheap_compile(model, backend=None, mode=None, _compile=torch.compile, **options):
    """Graphs, forward and backward, as Inductor gets them; without its code."""
    return _compile(model, backend="aot_eager", **options)


def update(name: str, *overrides: str):
    """Gradients and weights after one update of 8 images, 4 in each pass, on all processes; and its trainer."""
    torch._dynamo.reset()
    trainer = trainer_of(configured(*COMMON, *MODELS[name], *overrides), start_processes("cpu"), images=8)
    assert one_update(trainer).taken
    parameters = dict(trainer.updater.model.named_parameters())
    gradients = {f"gradient of {n}": p.grad for n, p in parameters.items()}
    return whole({**gradients, **{n: p.detach() for n, p in parameters.items()}}), trainer


def close(tensors, wanted, bound=1e-4):
    assert tensors.keys() == wanted.keys()
    errors = {name: (tensors[name] - value).abs().max().item() for name, value in wanted.items()}
    worst = max(errors, key=errors.get)
    assert errors[worst] <= bound, f"{worst} differs by {errors[worst]}"


@pytest.mark.parametrize("name", [pytest.param("vit3_tiny", marks=pytest.mark.slow), "h_vit3_tiny"])
def test_one_process(name, monkeypatch):
    monkeypatch.setattr(torch, "compile", cheap_compile)
    wanted, trainer = update(name)
    assert max(value.abs().max() for key, value in wanted.items() if key.startswith("gradient")) > 1e-2
    for combination in combinations(name, distributed=False)[1:]:
        tensors, trainer = update(name, *combination)
        assert hasattr(trainer.task.trainable_module, "_orig_mod") == (f"{SWITCHES[0]}=true" in combination)
        close(tensors, wanted)


def update_in_all_ways():
    torch.compile = cheap_compile
    results = []
    for name in MODELS:
        tensors = [update(name, *combination)[0] for combination in combinations(name, distributed=True)]
        sharded, trainer = update(name, "engine.parallel=fsdp", *(f"{switch}=true" for switch in SWITCHES[1:]))
        assert is_sharded(trainer.updater.model)
        results.append([*tensors, sharded])
    return results


def test_two_processes():
    """DDP in all these ways, and sharded."""
    wanted = [update(name)[0] for name in MODELS]
    for results in run_processes(update_in_all_ways, 2):
        for name, ways, tensors in zip(MODELS, results, wanted):
            assert len(ways) == len(combinations(name, distributed=True)) + 1 >= 5
            for way in ways:
                close(way, tensors)


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_near(name):
    """Finite, and as near as 8 bits allow."""
    wanted, _ = update(name)
    tensors, _ = update(name, "engine.amp=bfloat16", "model.grad_checkpointing=true", "engine.channels_last=true")
    assert all(value.isfinite().all() for value in tensors.values())
    flat = [torch.cat([x[key].flatten() for key in wanted if key.startswith("gradient")]) for x in (tensors, wanted)]
    assert (flat[0] - flat[1]).norm() <= 0.2 * flat[1].norm()
