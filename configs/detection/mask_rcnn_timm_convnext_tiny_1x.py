# Mask R-CNN with a backbone of timm (ConvNeXt-T) in the same training, as an example and a baseline. Not in the paper.
#   command    python tools/det.py train configs/detection/mask_rcnn_timm_convnext_tiny_1x.py data_root=/path/to/coco/
#   expected   no published number for this training
#   hardware   e.g. 4 GPUs with 4 images each: 16 per update
# Any model of timm with several feature maps: change model_name and neck.in_channels.
_base_ = ["mmdet::_base_/models/mask-rcnn_r50_fpn.py", "_coco_1x.py"]
model = dict(
    backbone=dict(_delete_=True, type="TimmBackbone", model_name="convnext_tiny.fb_in1k", pretrained=True),
    neck=dict(in_channels=[96, 192, 384, 768]),
)
