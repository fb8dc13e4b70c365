"""Mechanisms: each bounds every example, adds noise and bills it. All are the Gaussian one, or stand around another.

gaussian           the sum of clipped gradients plus Gaussian noise, which DP-SGD is (Abadi et al. 2016)
normalized         automatic clipping: normalize instead of choosing a clip norm (Bu et al. 2023)
adaptive_clipping  a clip norm that follows a quantile of the norms (Andrew et al. 2021)
clip_then_project  project the clipped sum, once a step, instead of every example
error_feedback     feed back what clipping took away (Zhang et al. 2023)

To add one: a file here, its import below, and a line in `MECHANISMS` of `dpx/catalog.py` (CONTRIBUTING.md).
"""

from dpx.mechanisms.adaptive_clipping import adaptive_clipping
from dpx.mechanisms.clip_then_project import clip_then_project
from dpx.mechanisms.error_feedback import error_feedback_mechanism
from dpx.mechanisms.gaussian import gaussian_mechanism
from dpx.mechanisms.normalized import normalized

__all__ = [
    "adaptive_clipping",
    "clip_then_project",
    "error_feedback_mechanism",
    "gaussian_mechanism",
    "normalized",
]
