"""The privacy loss of steps and of their compositions: its distribution (PLD), and its Renyi divergences.

`losses`: the loss of one step, and long schedules as few distinct steps. `composition`: the sum of many losses.
`renyi`: the divergences of sampled Gaussians.
"""
