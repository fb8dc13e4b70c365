"""Facts about a mechanism that several lines of the contract need, computed once."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from dp_accounting import DpEvent

from dpx.accounting.flat_event import from_event
from dpx.audit.contract import inputs
from dpx.audit.contract.draws import FULLY, NoiseDraws, find_noise_fault, measured_release
from dpx.audit.contract.subject import STEPS, NotChecked, Release, ReleaseFunction, Subject
from dpx.sampling.schemes import Sampling
from dpx.schedules import values_over
from dpx.values import Tree

MULTIPLIERS = 2**20  # number of steps whose noise multipliers are read


class MechanismUnderTest(Subject):
    """A `Subject` with the facts that several lines need. subject: its arguments. draws: int, draws of a step's noise.
    seed: for the keys of these draws. rebuild: (key) -> the mechanism with this key, or None."""

    def __init__(self, *subject: Any, draws: int, seed: int, rebuild: Callable | None = None):
        super().__init__(*subject)
        self.draws, self.seed, self.rebuild = draws, seed, rebuild
        self._contributions: dict[int, dict[str, Tree]] = {}
        self._releases: dict[tuple[int, bool], Release] = {}
        self.event = functools.lru_cache(self.mechanism.event)  # slow for schedules
        self.clip_norm = functools.lru_cache(self._measured_clip_norm)

    @functools.cached_property
    def traced(self) -> ReleaseFunction:
        return ReleaseFunction(self)

    @functools.cached_property
    def noise(self) -> NoiseDraws:
        return NoiseDraws(self.traced, self.draws, self.seed, self.rebuild)

    @property
    def draws_noise_by_dpx(self) -> bool:
        """Whether the noise of the release comes from `dpx.keys`, so that it can be exchanged for data."""
        return self.traced.normals > 0

    def release(self, step: int, *, others: bool = False) -> Release:
        """The release at this step, traced, or measured if the noise is not dpx's.

        others: whether to use the other parameter values.
        """
        if (step, others) not in self._releases:
            found = self.traced.release_at(self.state_after(step), self.others if others else self.params)
            if not self.draws_noise_by_dpx:
                if self.obvious_noise_fault:
                    raise NotChecked(self.obvious_noise_fault)
                found = measured_release(found, self.noise, step, others=others)
            self._releases[step, others] = found
        return self._releases[step, others]

    @functools.cached_property
    def obvious_noise_fault(self) -> str:
        """Describes an obvious fault in noise that is not dpx's; "" if none is found."""
        return "" if self.draws_noise_by_dpx else find_noise_fault(self.traced)

    def multiplier(self, step: int) -> float:
        """The mechanism's stated noise multiplier for this step, which `check_cost` compares with its event."""
        return float(self.multipliers[step])

    @functools.cached_property
    def multipliers(self) -> np.ndarray:
        """The stated noise multipliers of the first MULTIPLIERS steps, float64."""
        return values_over(self.mechanism.noise_multiplier, MULTIPLIERS)

    def contributions_by_path(self, step: int) -> dict[str, Tree]:
        """What single gradients add to the sums, by path; float32 with rows on axis 0: loud ones, then hostile ones.

        The steps in FULLY have all paths, and other steps only `Mechanism.update`.
        """
        if step not in self._contributions:
            rows, state, names = self.with_loud(self.hostile[0]), self.state_after(step), list(self.problems[0].sums)
            names = names if step in FULLY else names[:1]
            self._contributions[step] = {name: self.problems[0].sums[name](rows, state) for name in names}
        return self._contributions[step]

    @functools.cached_property
    def hostile(self) -> tuple[Tree, Tree, Tree]:
        return inputs.hostile_gradients(self.params)

    def with_loud(self, rows: Tree) -> Tree:
        """The loud gradients, then `rows`."""
        return inputs.joined_rows([inputs.loud_gradients(self.params), rows])

    def released_sums(self, step: int, sums: tuple[Tree, ...]) -> tuple[Tree, ...]:
        """The sums that move public values. The others are kept as unreleased state."""
        seen = self.release(step).seen
        return tuple(part for part, is_seen in zip(sums, seen, strict=True) if is_seen)

    def released_norms(self, step: int, sums: tuple[Tree, ...]) -> np.ndarray:
        """The norms of the contributions to the released sums, float64 (rows,)."""
        return np.linalg.norm(inputs.flattened_leaves(self.released_sums(step, sums), 1), axis=1)

    def _measured_clip_norm(self, step: int) -> float:
        """The median norm of the contributions of several very large gradients."""
        return float(np.median(self.released_norms(step, self.contributions_by_path(step)["update"])[: inputs.RANDOM]))

    def largest_contribution(self, step: int) -> float:
        """The largest size of a contribution, in units of the noise, that the cost of a release covers.

        It is 1 / sigma, or if the event is not a Gaussian release, the largest that the clip norm allows.
        """
        if self.costed_by_multiplier:
            return 1 / self.multiplier(step)
        return self.clip_norm(step) * float(np.linalg.norm(self.release(step).exchange, 2))

    @functools.cached_property
    def costed_by_multiplier(self) -> bool:
        """Whether the cost of a release follows from its noise multiplier, relative to what one example moves."""
        return not names_of_special_events(self.event(1), self.mechanism.sampling)

    @property
    def has_stated_sensitivity(self) -> bool:
        """Whether one example moves its own step by at most 1 / the stated multiplier, in deviations of fresh noise."""
        return self.costed_by_multiplier or self.mechanism.correlated is not None

    def require_noise(self) -> None:
        """Raises NotChecked if a step has no noise, because an infinite cost says nothing about sizes."""
        for step in STEPS:
            if self.multiplier(step) == 0:
                raise NotChecked(f"the noise multiplier is 0 at step {step}, so the cost is infinite")

    def require_linear_release(self, step: int, what: str) -> Release:
        """Returns the release of the step. Raises NotChecked unless the updates are linear in its noise."""
        release = self.release(step)
        if not release.is_linear:
            raise NotChecked(f"{what}, because the updates are not a linear function of the noisy sum")
        return release


def names_of_special_events(event: DpEvent, sampling: Sampling) -> str:
    """The types of the event's noisy releases that the sampling's own event lacks; "" if there are none."""
    known = {type(release).__name__ for release in from_event(sampling.event(np.ones(1))).event_counts}
    names = {type(release).__name__ for release in from_event(event).event_counts} - known - {"NonPrivateDpEvent"}
    return ", ".join(sorted(names))
