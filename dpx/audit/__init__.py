"""Audits: what anyone can check about a mechanism and its stated cost.

* The privacy contract, line by line: `check_contract` measures how far one example moves a release and how large the
  noise is, and compares their ratio with the cost, for any mechanism, including your own compositions.
* Lower bounds on epsilon, with a confidence: `lower_bound` attacks many cheap runs of a mechanism in its worst case.
  `lower_bound_from_scores` takes the scores of any attack, such as those that `canary_scores` returns. `one_run` takes
  the scores of canaries in one training run, whose members `draw_members` draws and whose gradients `canary_loss` sets.
  `plot_lower_bound` plots the attack's errors and what the stated cost allows.
* What a trained model leaks: `exposure` of random secrets in canaries, and `membership`, the true-positive rates of an
  attack at low false-positive rates, both alongside the stated cost.

If the scores are computed from released values, as in `canary_scores`, a lower bound above the stated epsilon proves,
up to its confidence, that the statement is wrong. A lower bound below it proves nothing.
"""

from dpx.audit.attacks.leaks import Exposure as Exposure
from dpx.audit.attacks.leaks import Membership as Membership
from dpx.audit.attacks.leaks import exposure as exposure
from dpx.audit.attacks.leaks import membership as membership
from dpx.audit.attacks.many_runs import canary_scores as canary_scores
from dpx.audit.attacks.many_runs import lower_bound as lower_bound
from dpx.audit.attacks.many_runs import observe_canary as observe_canary
from dpx.audit.attacks.one_run import OneRun as OneRun
from dpx.audit.attacks.one_run import canary_loss as canary_loss
from dpx.audit.attacks.one_run import draw_members as draw_members
from dpx.audit.attacks.one_run import one_run as one_run
from dpx.audit.attacks.scores import LowerBound as LowerBound
from dpx.audit.attacks.scores import Roc as Roc
from dpx.audit.attacks.scores import lower_bound_from_scores as lower_bound_from_scores
from dpx.audit.attacks.scores import plot_lower_bound as plot_lower_bound
from dpx.audit.contract import ContractReport as ContractReport
from dpx.audit.contract import Line as Line
from dpx.audit.contract import check_contract as check_contract
