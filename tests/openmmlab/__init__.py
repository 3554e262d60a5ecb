"""Tests of vit3/openmmlab."""
