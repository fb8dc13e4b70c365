"""The bill of error feedback, whose releases do not compose: one event of a whole run.

`event` reads it. The proofs of its bounds stand in `energy`, for participations that count as known, and in `renyi`,
for those that sampling amplifies.
"""
