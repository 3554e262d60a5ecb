# UPerNet with H-ViT³-T, 160,000 updates, ADE20K (paper table 9).
#   command    python tools/seg.py train configs/segmentation/upernet_h_vit3_tiny_160k.py data_root=/path/to/ade
#   expected   mIoU 48.0 at one scale (the paper's; not run here)
#   hardware   8 GPUs with 2 images each: 16 per update
# Start from model.backbone.init_cfg.checkpoint=FILE, ImageNet-1K weights of h_vit3_tiny: the authors' file or ours.
_base_ = ["mmseg::_base_/models/upernet_swin.py", "_ade20k_160k.py"]
model = dict(
    data_preprocessor=dict(size=(512, 512)),
    backbone=dict(
        _delete_=True,
        type="HViT3",
        arch="tiny",
        drop_path_rate=0.2,
        init_cfg=dict(type="Pretrained", checkpoint="h_vit3_tiny.safetensors"),
    ),
    decode_head=dict(in_channels=[64, 128, 320, 512], num_classes=150),
    auxiliary_head=dict(in_channels=320, num_classes=150),
)
optim_wrapper = dict(type="AmpOptimWrapper")  # the authors train only this one in mixed precision
