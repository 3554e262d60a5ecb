"""What the command line says to Hydra's launchers, and what launchers add to it."""

from __future__ import annotations

import os

import pytest

from tests.toy import CONFIGS, compose_config
from vit3 import cli
from vit3.arguments import check_arguments
from vit3.config import TrainConfig
from vit3.errors import UserError


def check(*arguments: str) -> list[str]:
    return check_arguments(list(arguments), TrainConfig, CONFIGS)


def test_launchers_and_their_keys_pass():
    slurm = ["hydra/launcher=submitit_slurm", "hydra.launcher.nodes=2", "hydra.launcher.gpus_per_node=8"]
    assert check(*slurm, "engine.seed=0,1", "-m") == ["-m", *slurm, "engine.seed=0,1"]


def test_a_launcher_without_many_runs_would_do_nothing():
    with pytest.raises(UserError, match="hydra/launcher=slurm starts jobs only with -m"):
        check("hydra/launcher=slurm")


def test_a_misspelt_launcher():
    with pytest.raises(UserError, match="hydra/launcher=jobli: did you mean joblib?"):
        check("-m", "hydra/launcher=jobli")


def test_an_address_with_its_checksum_needs_no_quotes():
    place = f"file:///somewhere/model.safetensors#sha256={'0a' * 32}"
    for argument in (f"model.checkpoint={place}", f'model.checkpoint="{place}"'):
        (checked,) = check(argument)
        assert compose_config(checked).model.checkpoint == place


def test_null_is_no_choice_of_a_group_except_the_recipe():
    with pytest.raises(UserError, match="data=null: allowed: digits"):
        check("data=null")
    assert check("recipe=null") == ["recipe=[]"]  # which Hydra takes, and means the same by


def test_a_launcher_whose_package_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"hydra/launcher=ray needs a package that is missing: pip install 'vit3\[ray\]'"
    ):
        check("-m", "hydra/launcher=ray")


def test_hydra_is_no_group_of_ours():
    with pytest.raises(UserError, match="hydrax is no key of this program; allowed: ablation, augment, "):
        check("hydrax=1")


@pytest.mark.parametrize("spelling", ["--local-rank=3", "--local_rank=3"])
def test_local_rank_of_old_launchers(monkeypatch, spelling):
    monkeypatch.setenv("LOCAL_RANK", "")
    del os.environ["LOCAL_RANK"]
    assert check(spelling, "engine.seed=1") == ["engine.seed=1"] and os.environ["LOCAL_RANK"] == "3"
    assert check("--local-rank=4") == [] and os.environ["LOCAL_RANK"] == "3"  # the variable is the newer way


def test_the_slurm_preset_composes():
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs hydra-submitit-launcher")
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        overrides = ["hydra/launcher=slurm", "hydra.launcher.gpus_per_node=4"]
        cfg = compose("train", overrides, return_hydra_config=True)
    assert cfg.hydra.launcher._target_.endswith("SlurmLauncher") and cfg.hydra.launcher.tasks_per_node == 4


@pytest.mark.parametrize("others", [[], ["recipe=dit3_digits", "diffusion=none"]])
def test_a_key_of_diffusion_needs_one(others):
    with pytest.raises(UserError, match="diffusion.steps means nothing to a classifier; add task=diffusion and"):
        cli._check_diffusion([*others, "diffusion.steps=3"], "train", CONFIGS)
    cli._check_diffusion(["recipe=dit3_digits", "diffusion.steps=3"], "train", CONFIGS)
