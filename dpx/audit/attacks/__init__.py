"""Attacks that bound epsilon from below: on many cheap runs, on the scores of any attack, and on one training run."""
