"""Mechanisms: each bounds every example, adds noise and states its cost.

dp_sgd             the sum of clipped gradients plus Gaussian noise (DP-SGD, Abadi et al. 2016)
normalized         automatic clipping: normalize instead of choosing a clip norm (Bu et al. 2023)
adaptive_clipping  a clip norm that follows a quantile of the norms (Andrew et al. 2021)

From `dpx.papers`:

correlated_noise   noise that cancels part of earlier noise (BandMF, lambda-CGD, BISR)
clip_then_project  project the clipped sum, once a step, instead of every example
dice_sgd           add the clipping error to later releases (DiceSGD, Zhang et al. 2023)

To add one: write a file in `dpx/mechanism/` or its paper's folder, import it below, and add a line to `MECHANISMS` in
`dpx/catalog.py` (CONTRIBUTING.md).
"""

from dpx.mechanism.adaptive_clipping import adaptive_clipping
from dpx.mechanism.dp_sgd import dp_sgd, normalized
from dpx.papers.correlated_noise import correlated_noise
from dpx.papers.d2p2_sgd import clip_then_project
from dpx.papers.dice_sgd import dice_sgd

__all__ = ["adaptive_clipping", "clip_then_project", "correlated_noise", "dice_sgd", "dp_sgd", "normalized"]
