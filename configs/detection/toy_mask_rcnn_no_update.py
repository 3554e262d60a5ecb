# toy_mask_rcnn.py with an inner step that does nothing: the fast weights stay at their learned start W0.
#   command    python tools/det.py train configs/detection/toy_mask_rcnn_no_update.py
# What is left of the mixer is a gated map of each token and a fixed 3x3 depthwise convolution.
_base_ = "toy_mask_rcnn.py"
model = dict(backbone=dict(mixer_kwargs=dict(inner=dict(epochs=0))))
