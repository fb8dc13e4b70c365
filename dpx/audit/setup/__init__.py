"""What a careful colleague would notice before a long run: `dpx.check_setup`.

report          findings, and the table of them
loss_findings   what the loss sees beside its one example, its random numbers, the parameters it uses, and their dtypes
plan_findings   the batch, the data, delta and the privacy cost
batch_findings  losses, gradients and clipping on one batch (not private); time, memory and lost updates of a step
before_run      all of it in one call
"""

from dpx.audit.setup.before_run import check_setup
from dpx.audit.setup.report import Finding, SetupReport

__all__ = ["Finding", "SetupReport", "check_setup"]
