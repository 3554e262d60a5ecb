"""Configs and arguments of the commands: what is set where, and what is refused with which words."""

from __future__ import annotations

import copy
import json
import logging

import pytest

pytest.importorskip("mmengine", reason="needs the extra mm")
pytest.importorskip("mmdet", reason="needs the extra mm")

import torch  # noqa: E402

from tests.openmmlab.small import DETECTOR, SEGMENTOR, write_config  # noqa: E402
from vit3.doctor.check import FAIL  # noqa: E402
from vit3.engine.distributed import Processes  # noqa: E402
from vit3.errors import UserError  # noqa: E402
from vit3.openmmlab.adapt import adapt, forget_pretrained, scale_learning_rate  # noqa: E402
from vit3.openmmlab.before import check_classes, check_evaluator, check_losses  # noqa: E402
from vit3.openmmlab.checkpoints import keep_checkpoints  # noqa: E402
from vit3.openmmlab.settings import _read_config, read_settings  # noqa: E402

CPU = Processes(torch.device("cpu"))


@pytest.fixture(scope="module")
def read_once():
    """Configs are read once for all tests: MMEngine needs half a second for one."""
    kept = {}

    def read(path):
        if path not in kept:
            kept[path] = _read_config(path)
        return copy.deepcopy(kept[path])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vit3.openmmlab.settings._read_config", read)
        yield


@pytest.fixture(scope="module")
def detector(tmp_path_factory, read_once):
    return write_config(tmp_path_factory.mktemp("configs"), DETECTOR)


@pytest.fixture(scope="module")
def segmentor(tmp_path_factory, read_once):
    return write_config(tmp_path_factory.mktemp("configs"), SEGMENTOR)


def test_values_by_the_rules_of_yaml(detector):
    arguments = [
        "optim_wrapper.optimizer.lr=1e-3",
        "train_dataloader.batch_size=4",
        "param_scheduler.0.milestones=[3,5]",
        "+optim_wrapper.clip_grad.max_norm=1",
        "name=7",
    ]
    settings = read_settings(detector, arguments)
    config = settings.config
    assert config.optim_wrapper.optimizer.lr == 0.001 and config.train_dataloader.batch_size == 4
    assert config.param_scheduler[0].milestones == [3, 5] and config.optim_wrapper.clip_grad.max_norm == 1
    assert settings.options.name == "7" and settings.options.given == arguments


def test_arguments_of_a_part_of_the_model_are_known(detector):
    """A key that the config does not mention and the class has needs no plus; another one does."""
    arguments = ["model.backbone.frozen_stages=2", "model.backbone.out_indices=[2,3]", "model.neck.num_outs=5"]
    backbone = read_settings(detector, [*arguments, "model.backbone.init_cfg=null"]).config.model.backbone
    assert backbone.frozen_stages == 2 and list(backbone.out_indices) == [2, 3]
    with pytest.raises(UserError, match="model.backbone.frozen_stage is no key of this config"):
        read_settings(detector, ["model.backbone.frozen_stage=2"])


def test_lists_become_the_tuples_that_transforms_ask_for(detector):
    steps = "{type: Resize, scale: [64, 48]}, {type: RandomChoiceResize, scales: [[1, 2], [3, 4]]}, {type: A, b: [1]}"
    pipeline = f"[{steps}]"
    config = read_settings(detector, [f"train_dataloader.dataset.pipeline={pipeline}"]).config
    steps = config.train_dataloader.dataset.pipeline
    assert steps[0].scale == (64, 48) and steps[1].scales == [(1, 2), (3, 4)] and steps[2].b == [1]
    arguments = ["val_dataloader.dataset.pipeline.1.scale=[32,16]", "model.backbone.depths=[1,1,1,2]"]
    config = read_settings(detector, arguments).config
    assert config.val_dataloader.dataset.pipeline[1].scale == (32, 16)
    assert config.model.backbone.depths == (1, 1, 1, 2)  # as it was before


@pytest.mark.parametrize(
    "argument, words",
    [
        ("train_dataloader.batch_sizes=4", "did you mean train_dataloader.batch_size?"),
        ("train_dataloadr.batch_size=4", "did you mean train_dataloader.batch_size?"),
        ("lr=1", "did you mean optim_wrapper.optimizer.lr?"),
        ("outputs=x", "did you mean output?"),
        ("optim_wrapper.clip=1", "+optim_wrapper.clip=VALUE adds it"),
        ("param_scheduler.3.end=1", "param_scheduler.3.end is no key"),
        ("dims=[1,2,3,4]", "is a variable of the config file"),
        ("train_dataloader", "is no key=value"),
        ("name=[1", "YAML cannot read"),
        ("seed=one", "seed=one is not allowed; it must be of type int"),
        ("seed=true", "seed=True is not allowed"),
        ("train_cfg.max_epochs=many", "train_cfg.max_epochs=many is not allowed; it must be a number, such as 2"),
        ("train_dataloader.persistent_workers=on_", "must be true or false, such as false"),
        ("device=gpu", "use one of: auto, cpu, cuda"),
        ("threshold=2", "between 0 and 1"),
        ("images=x", "images is no key of train, but of predict"),
        ("classes=[a,a]", "every name may stand once"),
        ("classes=none.json", "is no readable JSON file"),
    ],
)
def test_what_is_refused(detector, argument, words):
    with pytest.raises(UserError) as error:
        read_settings(detector, [argument])
    assert words in str(error.value)


def test_a_file_that_is_no_config(tmp_path):
    with pytest.raises(UserError, match="no such config file"):
        _read_config(tmp_path / "none.py")
    (tmp_path / "empty.py").write_text("a = 1\n")
    with pytest.raises(UserError, match="has no model"):
        _read_config(tmp_path / "empty.py")


def test_data_root_goes_into_every_path(detector, segmentor):
    config = read_settings(detector, ["data_root=/d/coco"]).config
    for loader in (config.train_dataloader, config.val_dataloader, config.test_dataloader):
        assert loader.dataset.data_root == "/d/coco" and loader.dataset.ann_file.startswith("annotations/")
    for evaluator in (config.val_evaluator, config.test_evaluator):
        assert evaluator.ann_file == "/d/coco/annotations/instances_val2017.json"
    config = read_settings(segmentor, ["data_root=/d/ade/"]).config
    assert config.val_dataloader.dataset.data_root == "/d/ade/"
    assert config.val_dataloader.dataset.data_prefix.img_path == "images/validation"


def test_classes_go_into_data_and_heads(detector, segmentor, tmp_path):
    (tmp_path / "classes.json").write_text(json.dumps({"detection": list("abc"), "segmentation": list("abcd")}))
    config = read_settings(detector, [f"classes={tmp_path}/classes.json"]).config
    assert config.model.roi_head.bbox_head.num_classes == config.model.roi_head.mask_head.num_classes == 3
    assert (
        config.train_dataloader.dataset.metainfo.classes == config.val_dataloader.dataset.metainfo.classes == [*"abc"]
    )
    config = read_settings(segmentor, [f"classes={tmp_path}/classes.json"]).config
    assert config.model.decode_head.num_classes == config.model.auxiliary_head.num_classes == 4


def test_own_classes_in_the_place_of_a_named_set(segmentor):
    """ADE20KDataset takes a part of its 150 classes alone; the general data set in its place reads its files."""
    argument = "+train_dataloader.dataset={type: ADE20KDataset}"
    own = read_settings(segmentor, [argument, "classes=[a,b]"]).config.train_dataloader.dataset
    assert (own.type, own.reduce_zero_label, own.seg_map_suffix) == ("BaseSegDataset", True, ".png")
    part = read_settings(segmentor, [argument, "classes=[wall,sky]"]).config.train_dataloader.dataset
    assert part.type == "ADE20KDataset"


def test_a_count_of_classes_that_does_not_fit(detector):
    assert [check.status for check in check_classes(read_settings(detector, []).config)] == ["ok"]
    config = read_settings(detector, ["model.roi_head.mask_head.num_classes=80"]).config
    assert "num_classes=80, and the data 2 classes (cat, dog)" in check_classes(config)[0].sentence
    config = read_settings(detector, ["val_dataloader.dataset.metainfo.classes=[cat,cow]"]).config
    assert "train_dataloader has the classes cat, dog and val_dataloader cat, cow" in check_classes(config)[0].sentence


@pytest.mark.parametrize(
    "arguments, world, lr, batch",
    [
        (["train_dataloader.batch_size=2"], 8, 0.02, 16),
        (["train_dataloader.batch_size=4"], 2, 0.01, 8),
        (["train_dataloader.batch_size=4", "scale_lr=false"], 2, 0.02, 8),
        (["train_dataloader.batch_size=2", "+optim_wrapper.accumulative_counts=4"], 2, 0.02, 16),
    ],
)
def test_learning_rate_goes_with_the_batch(detector, arguments, world, lr, batch):
    settings = read_settings(detector, ["auto_scale_lr.base_batch_size=16", *arguments])
    facts = scale_learning_rate(settings.config, world, settings.options.scale_lr)
    assert facts["lr"] == settings.config.optim_wrapper.optimizer.lr == pytest.approx(lr)
    assert facts["global_batch"] == batch and facts["lr_config"] == 0.02


def test_what_a_cpu_and_one_process_need(segmentor, caplog):
    amp = "optim_wrapper.type=AmpOptimWrapper"
    settings = read_settings(segmentor, [amp, "+optim_wrapper.loss_scale=dynamic", "workers=0", "seed=3"])
    with caplog.at_level(logging.INFO):
        config = adapt(settings, "work", CPU)
    assert config.model.decode_head.norm_cfg.type == config.model.auxiliary_head.norm_cfg.type == "BN"
    assert settings.config.model.decode_head.norm_cfg.type == "SyncBN"  # derived, so not written back
    assert config.optim_wrapper.type == "OptimWrapper" and "loss_scale" not in config.optim_wrapper
    assert config.launcher == "none" and config.randomness.seed == 3
    assert len([r for r in caplog.records if "SyncBN is BN" in r.message or "float32 on a CPU" in r.message]) == 2


def test_two_processes_on_a_cpu_get_a_wrapper_without_devices(segmentor, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    config = adapt(read_settings(segmentor, []), "work", Processes(torch.device("cpu"), 1, 2))
    assert config.launcher == "pytorch" and config.model_wrapper_cfg.device_ids is None
    assert config.model_wrapper_cfg.find_unused_parameters is False


def test_start_weights_are_forgotten(detector):
    start = "+model.backbone.init_cfg={type: Pretrained, checkpoint: gone.pth}"
    config = read_settings(detector, [start]).config
    config.model.neck.pretrained = True  # as of timm's models
    forget_pretrained(config)
    assert config.model.backbone.init_cfg is None and config.model.neck.pretrained is False


def test_an_optimiser_that_does_not_exist(detector):
    config = read_settings(detector, ["optim_wrapper.optimizer.type=AdamWW"]).config
    with pytest.raises(UserError, match="type=AdamWW is no optimiser that MMEngine knows; did you mean AdamW?"):
        scale_learning_rate(config, 1, True)


def test_scores_of_other_annotations_are_refused(detector):
    assert check_evaluator(read_settings(detector, ["data_root=elsewhere"]).config) == []
    config = read_settings(detector, ["val_dataloader.dataset.ann_file=annotations/mine.json"]).config
    (check,) = check_evaluator(config)
    assert "set val_evaluator.ann_file=data/coco/annotations/mine.json" in check.sentence


def test_one_channel_under_a_softmax_is_refused(segmentor):
    assert check_losses(read_settings(segmentor, []).config) == []
    (check,) = check_losses(read_settings(segmentor, ["classes=[thing]"]).config)
    assert check.status == FAIL and "which is always 0" in check.sentence


def test_the_score_that_decides_may_be_chosen(detector):
    config = read_settings(detector, []).config
    assert keep_checkpoints(config) == config.default_hooks.checkpoint.save_best == "coco/bbox_mAP"
    config.default_hooks.checkpoint.save_best = "coco/segm_mAP"
    assert keep_checkpoints(config) == config.default_hooks.checkpoint.save_best == "coco/segm_mAP"
