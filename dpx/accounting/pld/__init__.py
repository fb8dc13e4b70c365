"""Privacy loss distributions (PLD) of steps and of their compositions.

`losses`: the loss of one step. `composition`: the sum of many losses. `buckets`: long schedules as few distinct steps.
`allocation`: the loss of an epoch of random allocation, by `sums` of likelihood ratios, and by their `moments`.
"""
