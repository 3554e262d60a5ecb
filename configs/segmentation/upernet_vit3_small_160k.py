# UPerNet with plain ViT³-S and a simple feature pyramid, 160,000 updates, ADE20K. Ours, not in the paper.
#   command    python tools/seg.py train configs/segmentation/upernet_vit3_small_160k.py data_root=/path/to/ade
#   expected   no published number
#   hardware   8 GPUs with 2 images each: 16 per update
# Start from model.backbone.init_cfg.checkpoint=FILE, ImageNet-1K weights of vit3_small.
_base_ = ["mmseg::_base_/models/upernet_swin.py", "_ade20k_160k.py"]
model = dict(
    data_preprocessor=dict(size=(512, 512)),
    backbone=dict(
        _delete_=True,
        type="ViT3",
        arch="small",
        drop_path_rate=0.2,
        init_cfg=dict(type="Pretrained", checkpoint="vit3_small.safetensors"),
    ),
    neck=dict(type="SimpleFeaturePyramid", in_channels=384, out_channels=256, num_outs=4),
    decode_head=dict(in_channels=[256, 256, 256, 256], num_classes=150),
    auxiliary_head=dict(in_channels=256, num_classes=150),
)
