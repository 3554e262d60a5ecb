"""How the optimiser treats each parameter: layer decay, weight decay and frozen parts (R14)."""

from __future__ import annotations

import pytest
import torch
from vit3.tools.train import train

from tests.engine.test_combinations import COMMON, MODELS
from tests.toy import configured, model_of, short_run, trainer_of
from vit3.engine.groups import ParameterRow, parameter_rows
from vit3.engine.profiling import Profile
from vit3.engine.signals import StopRequest

LAYER_DECAY = 0.75
FROZEN = {"vit3_tiny": ("patch_embed", "blocks.0"), "h_vit3_tiny": ("patch_embed", "layers.0")}


def trainer_for(name: str, *overrides: str):
    decay = (f"optim.layer_decay={LAYER_DECAY}", "optim.weight_decay=0.05", "engine.max_per_process=null")
    return trainer_of(configured(*COMMON, *MODELS[name], *decay, *overrides), images=8)


def frozen_trainer(name: str, *overrides: str):
    return trainer_for(name, f"model.freeze=[{','.join(FROZEN[name])}]", *overrides)


def rows_of(trainer) -> dict[str, ParameterRow]:
    rows = parameter_rows(trainer.updater.model, trainer.updater.optimizer)
    assert [row.name for row in rows] == [name for name, _ in trainer.updater.model.named_parameters()]
    return {row.name: row for row in rows}


def is_frozen(name: str, parameter: str) -> bool:
    return parameter.startswith(tuple(f"{part}." for part in FROZEN[name]))


def depth_of(parameter: str) -> int:
    """Number of the layer by hand, from the stem; both networks have two blocks, then the head."""
    part = parameter.split(".")
    if part[0] in ("blocks", "layers"):  # one block a stage; the downsampling goes with the block before it
        return 1 + int(part[1])
    return {"patch_embed": 0, "norm": 2, "head": 3}[part[0]]  # the norm goes with the last block


@pytest.mark.parametrize("name", MODELS)
def test_frozen_parts_do_not_shift_the_factors(name):
    free, frozen = rows_of(trainer_for(name)), rows_of(frozen_trainer(name))
    assert {row.name for row in frozen.values() if row.frozen} == {n for n in free if is_frozen(name, n)}
    for parameter, row in free.items():
        assert row.lr_factor == pytest.approx(LAYER_DECAY ** (3 - depth_of(parameter))), parameter
        if is_frozen(name, parameter):
            assert frozen[parameter] == ParameterRow(parameter, row.shape, frozen=True)
        else:
            assert frozen[parameter] == row


@pytest.mark.parametrize("decay_inner", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_one_step_moves_each_layer_by_its_factor(name, decay_inner):
    """Constant gradients, then none: steps follow the learning rates, and what is decayed shrinks by them too."""
    trainer = frozen_trainer(name, f"optim.decay_inner={str(decay_inner).lower()}")
    optimizer, rate = trainer.updater.optimizer, trainer.updater.optimizer.defaults["lr"]
    for group in optimizer.param_groups:
        group.update(momentum=0, nesterov=False)
    for gradient in (1.0, 0.0):
        before = {n: p.detach().clone() for n, p in trainer.updater.model.named_parameters()}
        for parameter in trainer.updater.model.parameters():
            parameter.grad = torch.full_like(parameter, gradient) if parameter.requires_grad else None
        optimizer.step()
        for n, p in trainer.updater.model.named_parameters():
            inner = n.split(".")[-1] in ("w1", "w2", "w3")
            decay = 0.05 if p.ndim > 1 and (decay_inner or not inner) else 0.0
            step = 0.0 if is_frozen(name, n) else rate * LAYER_DECAY ** (3 - depth_of(n))
            torch.testing.assert_close(before[n] - p, step * (gradient + decay * before[n]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_frozen_parts_stay_as_they_are(name):
    """Weights and statistics to the last bit, after two epochs of the loop; all others move."""
    trainer = frozen_trainer(name, "engine.ema_decay=0.5", "engine.save_minutes=null")
    trainer.updater.profile = Profile(0, trainer.processes.device, None)
    before = {n: v.clone() for n, v in trainer.updater.model.state_dict().items()}
    stop = StopRequest()
    for _epoch in range(2):
        trainer._train_epoch(None, None, stop, 0.0)
        trainer.place.position = 0
    assert trainer.updater.counts.updates == 2
    after = trainer.updater.model.state_dict()
    for n, value in before.items():
        assert torch.equal(value, after[n]) == is_frozen(name, n), n
    assert any("running_mean" in n and is_frozen(name, n) for n in before) == (name == "h_vit3_tiny")
    ema = trainer.task.trainable_module_ema.module.state_dict()
    for n, value in before.items():
        if is_frozen(name, n):
            torch.testing.assert_close(ema[n], value, rtol=1e-6, atol=0)


def test_groups_are_printed_and_nothing_is_trained(tmp_path, capsys):
    freeze = ("optim.layer_decay=0.75", "model.freeze=[patch_embed]", "optim.decay_inner=false")
    train(short_run(tmp_path, "print_groups=true", *freeze))
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if "." in line}
    names = [name for name, _ in model_of(configured("++model.kwargs.depth=1")).named_parameters()]
    assert list(lines) == names and list(tmp_path.iterdir()) == []
    assert lines["patch_embed.proj.weight"][1:] == ["frozen"]
    assert lines["blocks.0.attn.w1"][1:] == ["0", "0.75"]
    assert lines["blocks.0.attn.qkv.weight"][1:] == ["0.05", "0.75"]
    assert lines["head.weight"][1:] == ["0.05", "1"]


def test_every_learned_start_can_be_left_out_of_the_decay():
    inner = ("inner=mlp", "inner.depth=3", "inner.beside=[{model: dwconv, extra: true}, {model: swiglu, extra: true}]")
    trainer = trainer_of(configured(*inner, "optim.decay_inner=false", "++model.kwargs.depth=1", "engine.device=cpu"))
    rows = {row.name: row for row in parameter_rows(trainer.updater.model, trainer.updater.optimizer)}
    starts = {name: row for name, row in rows.items() if name.startswith("blocks.0.attn.w")}
    assert len(starts) == 7 and all(row.weight_decay == 0 for row in starts.values())
    assert rows["blocks.0.attn.qkv.weight"].weight_decay > 0
