# Cascade Mask R-CNN with H-ViT³-S, 3x schedule (36 epochs), COCO. Ours, not in the paper.
#   command    python tools/det.py train configs/detection/cascade_mask_rcnn_h_vit3_small_3x.py data_root=/path/to/coco/
#   expected   no published number; mask_rcnn_h_vit3_small_3x.py, from which the training is taken, has box AP 50.5
#   hardware   e.g. 4 GPUs with 4 images each: 16 per update
# Start from model.backbone.init_cfg.checkpoint=FILE, ImageNet-1K weights of h_vit3_small: the authors' file or ours.
_base_ = ["mmdet::_base_/models/cascade-mask-rcnn_r50_fpn.py", "_coco_3x.py"]
model = dict(
    backbone=dict(
        _delete_=True,
        type="HViT3",
        arch="small",
        drop_path_rate=0.4,
        with_cp=True,
        init_cfg=dict(type="Pretrained", checkpoint="h_vit3_small.safetensors"),
    ),
    neck=dict(in_channels=[64, 128, 320, 512]),
)
