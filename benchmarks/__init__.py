"""Time, memory and accounting, measured. A package of its own name: Opacus installs one called `benchmarks` too."""
