"""Schedules: noise multipliers and clip norms that change over the steps of a run.

falling  those of the papers' methods; any optax schedule may take their place
scalars  a number or a schedule at one step and at many steps, and the checks of schedules
"""

from dpx.schedules.falling import every as every
from dpx.schedules.falling import growing_mu as growing_mu
from dpx.schedules.falling import inverse_power as inverse_power
from dpx.schedules.falling import sensitivity_decay as sensitivity_decay
