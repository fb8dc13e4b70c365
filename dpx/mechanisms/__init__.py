"""Mechanisms: what bounds, noises and bills. Each is built on the Gaussian one, or wraps another mechanism.

To add one: a file here that returns a `Mechanism`, a line below, one in `dpx/__init__.py`, and a case in
`tests/mechanisms.py`, which the contract reads.
"""

from dpx.mechanisms.adaptive_clipping import adaptive_clipping as adaptive_clipping
from dpx.mechanisms.clip_then_project import clip_then_project as clip_then_project
from dpx.mechanisms.error_feedback import error_feedback_mechanism as error_feedback_mechanism
from dpx.mechanisms.gaussian import gaussian_mechanism as gaussian_mechanism
from dpx.mechanisms.normalized import normalized as normalized
