"""Sweeps: many runs of one command, each a cell, computed once, in a process of its own, whatever becomes of others."""
