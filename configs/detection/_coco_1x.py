# COCO instances and the training that the detection leaves share: 12 epochs.
# The learning rate is that of 16 images per update (auto_scale_lr.base_batch_size): 4 GPUs with 4 images each, or
# 2 with 8. The authors give 4 images per GPU and no number of GPUs; 16 is the usual batch of such results.
# The optimiser decays biases and all matrices, also the inner models' starts, and no parameter with "norm" in its name.
_base_ = [
    "mmdet::_base_/datasets/coco_instance.py",
    "mmdet::_base_/schedules/schedule_1x.py",
    "mmdet::_base_/default_runtime.py",
]
custom_imports = dict(imports=["vit3.openmmlab"], allow_failed_imports=False)

sides = [(side, 1333) for side in range(480, 801, 32)]  # shorter side drawn from these, longer one at most 1333
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="RandomFlip", prob=0.5),
    dict(
        type="RandomChoice",
        transforms=[
            [dict(type="RandomChoiceResize", scales=sides, keep_ratio=True)],
            [
                dict(type="RandomChoiceResize", scales=[(400, 1333), (500, 1333), (600, 1333)], keep_ratio=True),
                dict(type="RandomCrop", crop_type="absolute_range", crop_size=(384, 600), allow_negative_crop=True),
                dict(type="RandomChoiceResize", scales=sides, keep_ratio=True),
            ],
        ],
    ),
    dict(type="PackDetInputs"),
]
train_dataloader = dict(batch_size=4, num_workers=4, pin_memory=True, dataset=dict(pipeline=train_pipeline))
# As the authors test: two images at once, the smaller one padded. Its scores depend a little on the other's size;
# val_dataloader.batch_size=1 test_dataloader.batch_size=1 end that.
val_dataloader = dict(batch_size=2)
test_dataloader = val_dataloader

param_scheduler = [
    dict(type="LinearLR", start_factor=0.001, by_epoch=False, begin=0, end=1000),
    dict(type="MultiStepLR", begin=0, end=12, by_epoch=True, milestones=[8, 11], gamma=0.1),
]
optim_wrapper = dict(
    type="AmpOptimWrapper",
    optimizer=dict(_delete_=True, type="AdamW", lr=2e-4, betas=(0.9, 0.999), weight_decay=0.05),
    paramwise_cfg=dict(custom_keys=dict(norm=dict(decay_mult=0.0))),
)
auto_scale_lr = dict(enable=False, base_batch_size=16)
