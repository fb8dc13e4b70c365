"""What XLA needs to be told: the order of computation, sums over microbatches, and fast convolutions in loops."""
