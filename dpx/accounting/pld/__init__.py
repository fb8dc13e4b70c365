"""Privacy loss distributions (PLD) of steps and of their compositions.

`losses`: the loss of one step. `composition`: the summed loss of many. `buckets`: long schedules as few distinct steps.
"""
