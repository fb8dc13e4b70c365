"""Attacks that bound epsilon from below, by many cheap runs, the scores of any attack, or one training run."""
