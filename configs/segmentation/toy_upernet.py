# A small UPerNet on generated pictures: shapes and digit scans on textured backgrounds, from scratch.
#   data       python scripts/make_toy_data.py data/toy --train 480 --val 80
#   command    python tools/seg.py train configs/segmentation/toy_upernet.py
#   hardware   two cores of any CPU, 2,000 updates of about a core-second each; batch 8, one process
# The twin toy_upernet_no_update.py is the same network without the inner step.
_base_ = [
    "mmseg::_base_/models/upernet_swin.py",
    "mmseg::_base_/datasets/ade20k.py",
    "mmseg::_base_/default_runtime.py",
]
custom_imports = dict(imports=["vit3.openmmlab"], allow_failed_imports=False)

data_root = "data/toy/ade/"
grounds = ("plain ground", "striped ground", "checked ground", "speckled ground")
classes = (*grounds, "disc", "ring", "square", "crescent", "triangle", "star", "cross", "digit")
weights = [0.2] * len(grounds) + [1.0] * (len(classes) - len(grounds))  # grounds fill most of each picture
dims = [32, 64, 128, 192]
norm_cfg = dict(type="BN", requires_grad=True)
crop_size = (128, 128)
data_preprocessor = dict(size=crop_size)
model = dict(
    data_preprocessor=data_preprocessor,
    backbone=dict(
        _delete_=True,
        type="HViT3",
        arch=None,
        dims=(32, 64, 128, 192),
        depths=(1, 1, 2, 1),
        num_heads=(1, 2, 4, 6),
        drop_path_rate=0.05,
    ),
    decode_head=dict(
        in_channels=dims,
        channels=64,
        num_classes=len(classes),
        norm_cfg=norm_cfg,
        loss_decode=dict(class_weight=weights),
    ),
    auxiliary_head=dict(
        in_channels=dims[2],
        channels=32,
        num_classes=len(classes),
        norm_cfg=norm_cfg,
        loss_decode=dict(class_weight=weights),
    ),
)

scale = (160, 128)  # longer and shorter side at most
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", reduce_zero_label=True),
    dict(type="RandomResize", scale=scale, ratio_range=(0.8, 1.25), keep_ratio=True),
    dict(type="RandomCrop", crop_size=crop_size, cat_max_ratio=0.9),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PackSegInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=scale, keep_ratio=True),
    dict(type="LoadAnnotations", reduce_zero_label=True),
    dict(type="PackSegInputs"),
]
loader = dict(num_workers=0, persistent_workers=False)  # pictures are small, and both cores train
# ADE20KDataset allows only names of its own 150 classes
source = dict(
    type="BaseSegDataset",
    data_root=data_root,
    metainfo=dict(classes=classes),
    img_suffix=".jpg",
    seg_map_suffix=".png",
    reduce_zero_label=True,
)
train_dataloader = dict(batch_size=8, dataset=dict(pipeline=train_pipeline, **source), **loader)
val_dataloader = dict(batch_size=1, dataset=dict(pipeline=test_pipeline, **source), **loader)
test_dataloader = val_dataloader

max_iters, warmup = 2000, 100
train_cfg = dict(type="IterBasedTrainLoop", max_iters=max_iters, val_interval=200)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=warmup),
    dict(type="PolyLR", eta_min=0.0, power=1.0, by_epoch=False, begin=warmup, end=max_iters),
]
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=2e-3, betas=(0.9, 0.999), weight_decay=0.05),
    paramwise_cfg=dict(custom_keys=dict(norm=dict(decay_mult=0.0))),
    clip_grad=dict(max_norm=5.0, norm_type=2),
)
default_hooks = dict(
    timer=dict(type="IterTimerHook"),
    logger=dict(type="LoggerHook", interval=50, log_metric_by_epoch=False),
    param_scheduler=dict(type="ParamSchedulerHook"),
    checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=200),
    sampler_seed=dict(type="DistSamplerSeedHook"),
    visualization=dict(type="SegVisualizationHook"),
)
auto_scale_lr = dict(enable=False, base_batch_size=8)
