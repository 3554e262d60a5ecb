# toy_upernet.py with an inner step that does nothing: the fast weights stay at their learned start W0.
#   command    python tools/seg.py train configs/segmentation/toy_upernet_no_update.py
# What is left of the mixer is a gated map of each token and a fixed 3x3 depthwise convolution.
_base_ = "toy_upernet.py"
model = dict(backbone=dict(mixer_kwargs=dict(inner=dict(epochs=0))))
