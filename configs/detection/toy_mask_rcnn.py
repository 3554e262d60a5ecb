# A small Mask R-CNN on generated pictures: shapes and digit scans of 15 to 80 pixels, from scratch.
#   data       python scripts/make_toy_data.py data/toy --train 480 --val 80
#   command    python tools/det.py train configs/detection/toy_mask_rcnn.py
#   hardware   two cores of any CPU, 960 updates of about a core-second each; batch 8, one process
# The twin toy_mask_rcnn_no_update.py is the same network without the inner step.
_base_ = [
    "mmdet::_base_/models/mask-rcnn_r50_fpn.py",
    "mmdet::_base_/datasets/coco_instance.py",
    "mmdet::_base_/default_runtime.py",
]
custom_imports = dict(imports=["vit3.openmmlab"], allow_failed_imports=False)

data_root = "data/toy/coco/"
classes = ("disc", "ring", "square", "crescent", "triangle", "star", "cross", "digit")
width = 64  # channels of the pyramid and of the heads
strides = [4, 8, 16, 32]
box_levels = dict(out_channels=width, featmap_strides=strides, finest_scale=16)  # a box of 32 pixels goes to stride 8
model = dict(
    backbone=dict(
        _delete_=True,
        type="HViT3",
        arch=None,
        dims=(32, 64, 128, 192),
        depths=(1, 1, 2, 1),
        num_heads=(1, 2, 4, 6),
        drop_path_rate=0.05,
    ),
    neck=dict(in_channels=[32, 64, 128, 192], out_channels=width, num_outs=4),
    rpn_head=dict(
        in_channels=width,
        feat_channels=width,
        anchor_generator=dict(scales=[4], strides=strides),  # squares of 16, 32, 64 and 128 pixels
    ),
    roi_head=dict(
        bbox_roi_extractor=box_levels,
        bbox_head=dict(in_channels=width, fc_out_channels=256, num_classes=len(classes)),
        mask_roi_extractor=box_levels,
        mask_head=dict(num_convs=2, in_channels=width, conv_out_channels=width, num_classes=len(classes)),
    ),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=128)),
        rpn_proposal=dict(nms_pre=400, max_per_img=200),
        rcnn=dict(sampler=dict(num=64)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=400, max_per_img=200)),
)

scale = (160, 128)  # longer and shorter side at most
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="Resize", scale=scale, keep_ratio=True),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PackDetInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=scale, keep_ratio=True),
    dict(type="LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="PackDetInputs", meta_keys=("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")),
]
loader = dict(num_workers=0, persistent_workers=False)  # pictures are small, and both cores train
source = dict(data_root=data_root, metainfo=dict(classes=classes))
train_dataloader = dict(
    batch_size=8,
    dataset=dict(filter_cfg=dict(filter_empty_gt=False, min_size=8), pipeline=train_pipeline, **source),
    **loader,
)
val_dataloader = dict(batch_size=1, dataset=dict(pipeline=test_pipeline, **source), **loader)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + "annotations/instances_val2017.json")
test_evaluator = val_evaluator

max_epochs = 16
train_cfg = dict(type="EpochBasedTrainLoop", max_epochs=max_epochs, val_interval=4)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=60),
    dict(type="CosineAnnealingLR", by_epoch=True, begin=0, end=max_epochs, eta_min=1e-5, convert_to_iter_based=True),
]
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=1e-3, betas=(0.9, 0.999), weight_decay=0.05),
    paramwise_cfg=dict(custom_keys=dict(norm=dict(decay_mult=0.0))),
    clip_grad=dict(max_norm=5.0, norm_type=2),
)
auto_scale_lr = dict(enable=False, base_batch_size=8)
