# Mask R-CNN with plain ViT³-S and a simple feature pyramid, 1x schedule (12 epochs), COCO. Ours, not in the paper.
#   command    python tools/det.py train configs/detection/mask_rcnn_vit3_small_1x.py data_root=/path/to/coco/
#   expected   no published number
#   hardware   e.g. 4 GPUs with 4 images each: 16 per update
# The pyramid is that of ViTDet (arXiv 2203.16527): four maps from the one of stride 16. All blocks are global, so that
# nothing else changes. Start from model.backbone.init_cfg.checkpoint=FILE, ImageNet-1K weights of vit3_small.
_base_ = ["mmdet::_base_/models/mask-rcnn_r50_fpn.py", "_coco_1x.py"]
model = dict(
    backbone=dict(
        _delete_=True,
        type="ViT3",
        arch="small",
        drop_path_rate=0.1,
        with_cp=True,
        init_cfg=dict(type="Pretrained", checkpoint="vit3_small.safetensors"),
    ),
    neck=dict(_delete_=True, type="SimpleFeaturePyramid", in_channels=384, out_channels=256, num_outs=5),
)
