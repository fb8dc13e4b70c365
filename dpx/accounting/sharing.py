"""The cost of runs of which it is not known whether they shared their batches: the largest over all ways to share them.

Neither the batches of one key nor those of several are always dearer, so no single event bounds both.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import dp_accounting

from dpx.accounting.profiles import Profile
from dpx.identity import fingerprint

MOST_RUNS = 4  # which can share their batches in 14 ways


@dataclass(frozen=True)
class Largest:
    """The profile of runs that have one of these profiles, and it is not known which."""

    profiles: tuple[Profile, ...]

    def epsilon(self, delta: float) -> float:
        return max(profile.epsilon(delta) for profile in self.profiles)

    def delta(self, epsilon: float) -> float:
        return max(profile.delta(epsilon) for profile in self.profiles)


def ways_to_share(
    apart: Sequence[dp_accounting.DpEvent], of_group: Callable[[list[int]], dp_accounting.DpEvent]
) -> list[dp_accounting.DpEvent]:
    """The event of every way in which at least two of the runs share their batches.

    apart: the event of each run with batches of its own. of_group: that of some runs, by their numbers, on the same
    batches. Raises ValueError for too many runs, and for those whose bill on shared batches is not known.
    """
    if len(apart) > MOST_RUNS:
        words = f"for more than {MOST_RUNS} runs whose states do not show the keys of their batches"
        raise ValueError(f"shared_batches must be True or False {words}, got None")
    found: list[dp_accounting.DpEvent] = []
    for groups in _partitions(range(len(apart))):
        try:
            parts = [apart[group[0]] if len(group) == 1 else of_group(group) for group in groups]
        except ValueError as error:
            words = "shared_batches must be False if every run drew its batches with a key of its own, as dpx.fit does"
            raise ValueError(f"{words}; otherwise these runs have no bill: {error}") from error
        event = dp_accounting.ComposedDpEvent(sorted(parts, key=fingerprint))
        if len(groups) < len(apart) and event not in found:
            found.append(event)
    return found


def _partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every way to put the items into groups."""
    if not items:
        yield []
        return
    for groups in _partitions(items[1:]):
        yield [[items[0]], *groups]
        for place, group in enumerate(groups):
            yield [*groups[:place], [items[0], *group], *groups[place + 1 :]]
