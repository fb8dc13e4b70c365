"""The bill of error feedback, whose releases do not compose: one event of a whole run, and the bounds on it."""
