"""Audits: what anyone can check about a mechanism and the cost that it states.

* The privacy contract, line by line: `check_contract` measures what one example moves and how large the noise is, and
  compares their ratio with the cost, for any mechanism, including your own compositions.
* Lower bounds on epsilon, with a confidence: `lower_bound` attacks many cheap runs of a mechanism in its worst case,
  `lower_bound_from_scores` takes the scores of any attack (`canary_scores` returns `lower_bound`'s), and `one_run` the
  scores of the canaries of one training run, with coins from `draw_members`; `canary_loss` adds canaries, each with its
  own gradient. `plot_lower_bound` draws the attack's errors and what the stated cost allows.
* What a trained model leaks: `exposure` of random secrets in canaries, and `membership`, the true-positive rates of an
  attack at low false-positive rates, both beside the stated cost.

A lower bound above the stated epsilon proves, up to its confidence, that the statement is wrong, if the scores are
computed from released values, as in `canary_scores`. A lower bound below it proves nothing.
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
