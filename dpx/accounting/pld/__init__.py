"""Privacy loss distributions (PLD) of steps and of their compositions.

`losses`: the loss of one step. `composition`: the sum of many losses. `buckets`: long schedules as few distinct steps.
"""
