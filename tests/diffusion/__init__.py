"""Tests of vit3.diffusion."""
