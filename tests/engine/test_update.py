"""Updates: exact under accumulation and any number of processes; what is not finite leaves no trace."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from tests.processes import run_processes
from tests.toy import configured, one_update, trainer_of, updates_of
from vit3.engine.distributed import start_processes
from vit3.engine.update import NotFinite

EXACT = (  # nothing random, nothing over the batch; rounding is not blown up as by Adam
    "augment=none", "augment.hflip=0", "optim.opt=sgd", "optim.lr=0.01", "optim.lr_batch=16", "optim.warmup_epochs=0",
    "engine.ema_decay=0.9", "engine.ema_batch=16", "++model.kwargs.depth=2", "++model.kwargs.embed_dim=16",
    "engine.drop_last=false", "engine.epochs=2", "engine.device=cpu",
)  # fmt: skip
NORMALISED = (  # a network with statistics of the batch
    "model=h_vit3_tiny", "++model.kwargs.dims=[8,16]", "++model.kwargs.depths=[1,1]", "++model.kwargs.num_heads=[2,2]",
    "data.img_size=[16,16]",
)  # fmt: skip


def train(images: int, *overrides: str):
    """An epoch over so many digits on all processes: weights, their average, rates and numbers of reductions."""
    trainer = trainer_of(configured(*EXACT, *overrides), start_processes("cpu"), images)
    model, reductions = trainer.task.trainable_module, []
    if hasattr(model, "register_comm_hook"):

        def counted(state, bucket):
            reductions.append(1)
            return allreduce_hook(None, bucket)

        model.register_comm_hook(None, counted)
    rates = []
    for _outcome in updates_of(trainer):
        rates.append(trainer.updater.optimizer.param_groups[0]["lr"])
    tensors = [dict(m.state_dict()) for m in (trainer.updater.model, trainer.task.trainable_module_ema.module)]
    return tensors, rates, len(reductions)


def close(some, others, bound):
    for a, b in zip(some, others):
        assert a.keys() == b.keys()
        assert max((a[name] - b[name]).abs().max().item() for name in a) <= bound


@pytest.mark.parametrize("images", [10, 16])
def test_accumulation_is_the_big_batch(images):
    """R11 on one process: windows of 8 and of 2."""
    whole, rates, _ = train(images, "engine.batch_size=8")
    parts, same_rates, _ = train(images, "engine.batch_size=8", "engine.max_per_process=2")
    assert len(rates) == 2 and rates == same_rates
    close(whole, parts, 1e-6)


def test_processes_and_accumulation_give_the_same_updates():
    """R11 on two, and 1x8 = 2x4 = 4 passes of 2 = 2 processes x 2 passes of 2: updates, rates, weights, reductions."""
    whole, rates, _ = train(20, "engine.batch_size=8")
    once = None
    for world_size, limit in ((1, 2), (2, 4), (2, 2)):
        results = run_processes(train, world_size, 20, "engine.batch_size=8", f"engine.max_per_process={limit}")
        for tensors, same_rates, reductions in results:
            assert same_rates == rates and len(rates) == 3
            close(whole, tensors, 1e-5)
            close(results[0][0], tensors, 0)
            if world_size == 2:
                once = once or reductions
                assert reductions == once and once % 3 == 0  # one reduction of each bucket per update


def train_normalised():
    trainer = trainer_of(configured(*NORMALISED, "engine.batch_size=8", "engine.ema_decay=0.5"), start_processes("cpu"))
    one_update(trainer)
    return [dict(m.state_dict()) for m in (trainer.updater.model, trainer.task.trainable_module_ema.module)]


def test_processes_hold_one_set_of_statistics():
    """Weights, statistics and the average of both are equal in all processes after an update."""
    one, other = run_processes(train_normalised, 2)
    close(one, other, 0)
    assert any("running_mean" in name and value.abs().sum() > 0 for name, value in one[0].items())


def broken_trainer(where: str, how: str, *overrides: str):
    """A trainer whose module ``where`` gives infinite values or gradients while ``broken["on"]``."""
    trainer = trainer_of(configured(*NORMALISED, "engine.batch_size=8", "engine.max_per_process=4", *overrides))
    broken = {"on": False}

    def spoil(module, inputs, output):
        if broken["on"] and how == "value":
            return output * float("inf")
        if broken["on"]:
            output.register_hook(lambda grad: grad * float("inf"))

    trainer.updater.model.get_submodule(where).register_forward_hook(spoil)
    return trainer, broken


def everything(trainer):
    tensors = [m.state_dict().values() for m in (trainer.updater.model, trainer.task.trainable_module_ema.module)]
    optimizer = [v for s in trainer.updater.optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    return [v.clone() for group in (*tensors, optimizer) for v in group], trainer.updater.optimizer.param_groups[0][
        "lr"
    ]


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("value", "the loss is not finite, first in the output of layers.1.blocks.0.mlp "),
        (
            "gradient",
            "a gradient is not finite, first in the gradient that reaches the output of layers.1.blocks.0.mlp ",
        ),
    ],
)
def test_a_bad_update_leaves_no_trace_and_names_the_module(how, sentence, caplog, tmp_path):
    trainer, broken = broken_trainer("layers.1.blocks.0.mlp", how)
    trainer.updater.dump_folder = tmp_path
    whole = updates_of(trainer)
    assert next(whole).taken
    before, rate = everything(trainer)
    broken["on"] = True
    outcome = next(whole)
    assert not outcome.taken and sentence in caplog.text
    after, same_rate = everything(trainer)
    assert rate == same_rate and all(torch.equal(a, b) for a, b in zip(before, after))
    assert (trainer.updater.counts.updates, trainer.updater.counts.bad) == (1, 1)
    dump = torch.load(tmp_path / "nonfinite-0.pt", weights_only=True)
    assert dump["images"].shape == (4, 1, 16, 16) and "layers.1.blocks.0.mlp" in dump["where"]
    broken["on"] = False
    assert next(whole).taken and trainer.updater.counts.bad_in_row == 0
    assert all(v.isfinite().all() for v in everything(trainer)[0])


def test_too_many_bad_updates_in_a_row_stop():
    trainer, broken = broken_trainer("layers.0.blocks.0.attn", "value", "engine.max_bad_updates=3")
    broken["on"] = True
    with pytest.raises(
        NotFinite, match="the loss was not finite in 3 updates in a row, first in the output of layers.0"
    ):
        list(updates_of(trainer))


def test_a_scale_that_is_too_large_is_found_and_not_feared(caplog):
    """Loss scaling: an overflow halves the scale, moves nothing and is counted apart; then updates are taken."""
    trainer = trainer_of(configured("engine.amp=float16", "++model.kwargs.depth=1", "engine.batch_size=8"))
    scaler = trainer.updater.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
    before, rate = everything(trainer)
    skipped, taken, scales = 0, 0, []
    for outcome in updates_of(trainer):
        scales.append(scaler.get_scale())
        if not outcome.taken and not taken:
            skipped += 1
            assert scales[-1] == 2.0 ** (40 - skipped) and math.isfinite(outcome.losses["loss"])
            after, same_rate = everything(trainer)
            assert rate == same_rate and all(torch.equal(a, b) for a, b in zip(before, after))
        taken += outcome.taken
        if taken == 4:
            break
    counts = trainer.updater.counts
    assert skipped > 3 and taken == counts.updates == 4 and counts.bad == 0 and counts.scale_skips >= skipped
    assert "not finite" not in caplog.text


def test_float16_updates_are_those_of_a_hand_written_loop():
    """Scale, backward, unscale, clip, step: by hand with plain numbers, on SGD of rate 0.5."""
    overrides = ("engine.amp=float16", "optim.opt=sgd", "optim.lr=0.5", "optim.lr_batch=8", "optim.warmup_epochs=0",
                 "optim.clip_grad=0.1", "optim.weight_decay=0", "engine.batch_size=8", "augment=none",
                 "++model.kwargs.depth=1")  # fmt: skip
    trainer, hand = trainer_of(configured(*overrides)), trainer_of(configured(*overrides))
    for group in trainer.updater.optimizer.param_groups:
        group.update(momentum=0, nesterov=False)
    trainer.updater.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    outcome = one_update(trainer)
    _, images, target = next(hand.batches.epoch(0))
    hand.task.train()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = hand.task(images, target)["loss"]
    (loss * 2.0**10).backward()
    gradients = [p.grad / 2.0**10 for p in hand.updater.model.parameters()]
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
    assert outcome.taken and outcome.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    for p, q, g in zip(trainer.updater.model.parameters(), hand.updater.model.parameters(), gradients):
        torch.testing.assert_close(p, q - 0.5 * g * min(1.0, 0.1 / (norm.item() + 1e-6)), rtol=1e-5, atol=1e-7)


def test_a_bad_update_is_no_step_for_any_optimiser(tmp_path, caplog):
    """Some count steps beside the weights' state (Lookahead moves weights by that count); a dump that fails is said."""
    trainer, broken = broken_trainer("layers.0.blocks.0.attn", "value", "optim.opt=lookahead_adamw")
    trainer.updater.dump_folder = tmp_path / "of-another-machine"
    whole, counts = updates_of(trainer), []
    for broken["on"] in (False, True, True, False):
        next(whole)
        counts.append({group["lookahead_step"] for group in trainer.updater.optimizer.param_groups})
    assert counts == [{1}, {1}, {1}, {2}] and "nonfinite-0.pt could not be written" in caplog.text
