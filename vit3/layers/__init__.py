"""Layers that networks are made of, besides the mixers."""
