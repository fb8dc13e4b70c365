"""The bill of error feedback, whose releases do not compose: one event of a whole run (`event`), and the proofs of its
bounds (`energy` where the participations count as known, `renyi` where sampling amplifies)."""
