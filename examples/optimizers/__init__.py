"""Noise-aware optimizers, compared behind one mechanism: `python -m examples.optimizers`."""
