# Mask R-CNN with H-ViT³-B, 1x schedule (12 epochs), COCO (paper table 8).
#   command    python tools/det.py train configs/detection/mask_rcnn_h_vit3_base_1x.py data_root=/path/to/coco/
#   expected   box AP 50.0, mask AP 44.6 (the paper's; not run here)
#   hardware   e.g. 4 GPUs with 4 images each: 16 per update (the authors' number of GPUs is not known)
# Start from model.backbone.init_cfg.checkpoint=FILE, ImageNet-1K weights of h_vit3_base: the authors' file or ours.
_base_ = ["mmdet::_base_/models/mask-rcnn_r50_fpn.py", "_coco_1x.py"]
model = dict(
    backbone=dict(
        _delete_=True,
        type="HViT3",
        arch="base",
        drop_path_rate=0.1,
        with_cp=True,
        init_cfg=dict(type="Pretrained", checkpoint="h_vit3_base.safetensors"),
    ),
    neck=dict(in_channels=[96, 192, 448, 640]),
)
