"""Optimizers that know the noise, compared behind one mechanism: `python -m examples.optimizers`."""
