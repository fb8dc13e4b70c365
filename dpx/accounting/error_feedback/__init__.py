"""The bill of error feedback: one event of a whole run, because its releases do not compose.

`event` computes the bill. The proofs of its bounds are in `energy`, for participations that count as known, and in
`renyi`, for participations that sampling amplifies. `rounding` proves that they hold for the computed releases, too. A
participation is a step whose batch has the example.
"""
