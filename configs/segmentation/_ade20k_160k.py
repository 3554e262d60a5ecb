# ADE20K and the training that the segmentation leaves share: 160,000 updates of crops of 512x512.
# The learning rate is that of 16 images per update (auto_scale_lr.base_batch_size): 8 GPUs with 2 images each.
# The optimiser decays biases and all matrices, also the inner models' starts, and no parameter with "norm" in its name
# (the heads' batch norms are called bn, and are decayed).
_base_ = [
    "mmseg::_base_/datasets/ade20k.py",
    "mmseg::_base_/schedules/schedule_160k.py",
    "mmseg::_base_/default_runtime.py",
]
custom_imports = dict(imports=["vit3.openmmlab"], allow_failed_imports=False)

train_dataloader = dict(batch_size=2)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-6, by_epoch=False, begin=0, end=1500),
    dict(type="PolyLR", eta_min=0.0, power=1.0, by_epoch=False, begin=1500, end=160000),
]
optim_wrapper = dict(
    _delete_=True,
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=6e-5, betas=(0.9, 0.999), weight_decay=0.01),
    paramwise_cfg=dict(custom_keys=dict(norm=dict(decay_mult=0.0))),
)
auto_scale_lr = dict(enable=False, base_batch_size=16)
