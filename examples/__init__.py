"""Runnable examples of dpx: one training loop, its data, its models. `python -m examples.train --help`."""
