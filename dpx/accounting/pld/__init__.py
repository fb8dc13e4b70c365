"""The privacy loss of steps and of their compositions: its distribution (PLD) and its Renyi divergences.

`losses`: the loss of one step, and rounding long schedules to few distinct steps. `composition`: sums of many losses.
`renyi`: the divergences of sampled Gaussians.
"""
