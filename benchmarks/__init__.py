"""Measurements of time, memory, accuracy and accounting. Opacus installs a package called `benchmarks` too."""
