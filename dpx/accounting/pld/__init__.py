"""Privacy loss distributions: the loss of a step, its composition over many, and long schedules as few steps."""
