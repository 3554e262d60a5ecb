# Mask R-CNN with H-ViT³-T, 3x schedule (36 epochs), COCO (paper table 8).
#   command    python tools/det.py train configs/detection/mask_rcnn_h_vit3_tiny_3x.py data_root=/path/to/coco/
#   expected   box AP 48.9, mask AP 44.0 (the paper's; not run here)
#   hardware   e.g. 4 GPUs with 4 images each: 16 per update (the authors' number of GPUs is not known)
# Start from model.backbone.init_cfg.checkpoint=FILE, ImageNet-1K weights of h_vit3_tiny: the authors' file or ours.
_base_ = ["mmdet::_base_/models/mask-rcnn_r50_fpn.py", "_coco_3x.py"]
model = dict(
    backbone=dict(
        _delete_=True,
        type="HViT3",
        arch="tiny",
        drop_path_rate=0.3,
        with_cp=True,
        init_cfg=dict(type="Pretrained", checkpoint="h_vit3_tiny.safetensors"),
    ),
    neck=dict(in_channels=[64, 128, 320, 512]),
)
