"""Metrics on private validation data: a noisy mean of one bounded value per example."""

import functools
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from dp_accounting import SelfComposedDpEvent

from dpx import keys
from dpx.accounting.budget import Budget
from dpx.accounting.checks import require_delta
from dpx.accounting.cost import profile_of_run
from dpx.sampling.users import UserData
from dpx.statistics.released import RELATION, Statistic, mark_of_released_noise, records_of
from dpx.statistics.sums import release_mean
from dpx.values import Tree, as_local_array, explain_misuse, leaf_path, require_function


@explain_misuse
def release_accuracy(
    correct: Any,
    *,
    noise_multiplier: float | Budget,
    key: jax.Array,
    noise: str | None = None,
    words: str = "accuracy",
    ledger: Any = None,
    part: str | None = None,
) -> Statistic:
    """Releases the share of correct predictions on private data.

    correct: bool (N,), such as `predictions == labels`; or a `dpx.UserData` of such an array, for the share over all
        records. Integers, such as labels, raise ValueError. The other arguments and errors are those of
        `dpx.statistics`. For any other metric, pass one bounded value per example to `release_mean`.

        >>> right = dpx.statistics.release_accuracy(np.ones(40, bool), noise_multiplier=2.0, key=dpx.secret_key())
        >>> right.interval(0.95)[1] <= 1
        True
    """
    asked = {"noise_multiplier": noise_multiplier, "key": key, "noise": noise, "words": words}
    complete = not isinstance(correct, UserData)
    dtype = np.asarray(correct if complete else correct.kept_rows).dtype
    if dtype.kind in ("i", "u"):  # labels would be clipped to 0 and 1
        raise ValueError(f"correct must be bool (N,), such as predictions == labels, got integers ({dtype})")
    return release_mean(correct, low=0, high=1, complete=complete, **asked, ledger=ledger, part=part)


@explain_misuse
class PrivateMetric:
    """A metric on private validation data. Pass it to `dpx.fit(..., evaluate_private=)`, or call it with parameters.

    Each call is one release about the validation data, with fresh noise. Equal parameters get equal noise, so a run
    that is interrupted and repeats its steps releases nothing twice.

    metric: (params) -> one value per example, (N,), which depends only on that example and on `params`; or a
        `dpx.UserData` of one value per record. The metric is their mean. NaN values are left out: for a mean over some
        examples only, such as a precision, return NaN for the rest and pass complete=False.
    low, high: floats, public bounds to which values are clipped.
    noise_multiplier: float, for one call; or a `dpx.Budget` whose steps are the number of calls.
    complete: True if every example has a value that is not NaN, as for `release_mean`.
    The other arguments and errors are described in `dpx.statistics`. A call beyond the budget's steps raises
    ValueError. So does a call with a different number of examples than before, because that number is public.

        >>> budget = dpx.Budget(epsilon=0.5, delta=1e-5, steps=10)
        >>> metric = dpx.statistics.PrivateMetric(lambda params: np.ones(500, bool), noise_multiplier=budget, key=key)
        >>> 0 <= metric(params) <= 1
        True
    """

    def __init__(
        self,
        metric: Callable[[Tree], Any],
        *,
        low: float = 0.0,
        high: float = 1.0,
        complete: bool = True,
        noise_multiplier: float | Budget,
        key: jax.Array,
        noise: str | None = None,
        words: str = "a metric of validation data",
        ledger: Any = None,
        part: str | None = None,
    ):
        self._metric = require_function("metric", metric, "params")
        self._key = keys.warn_if_guessable(keys.require_key(key))
        budget = noise_multiplier if isinstance(noise_multiplier, Budget) else None
        self.most = None if budget is None else budget.steps
        self._planned = 0 if budget is None or budget.public_stop else budget.steps  # calls that count even if not made
        self._left: dict[int, int] = {}  # calls that runs of `fit` planned and did not make, by their key's fingerprint
        self._given = {"low": low, "high": high, "complete": complete, "words": words, "ledger": ledger, "part": part}
        self._noise = {"noise_multiplier": noise_multiplier, "noise": noise}
        settings = f"{int(keys.mark_of_key(self._key))} {noise_multiplier!r} {noise!r}".encode()
        self._mark = hashlib.sha256(settings).hexdigest()[:16]  # of the key and the noise, in the names of releases
        self._units: int | None = None  # number of examples in a call
        self._released: dict[bytes, Statistic] = {}
        self._names: dict[bytes, str] = {}  # of the same releases
        self._earlier: set[str] = set()  # names of what other programs released

    @property
    def released(self) -> tuple[Statistic, ...]:
        """What the calls released, in call order, each with its interval."""
        return tuple(self._released.values())

    def __call__(self, params: Tree) -> float:
        """Releases the metric of `params`. Raises ValueError if the budget has no call left."""
        digest = _digest_of_arrays(params)
        if digest not in self._released:
            self.require_calls_in_budget(self._made + all(digest.hex() not in name for name in self._earlier))
            key = functools.reduce(keys.fold_in, np.frombuffer(digest, np.uint32), keys.stream(self._key, "metric"))
            values = as_local_array(self._metric(params))
            if np.ndim(values) == 0:
                raise ValueError(
                    "metric must return one number for each example, (N,), got one number: leave out the mean, because "
                    "it has no noise"
                )
            self._require_same_count(records_of(values).units)
            found = release_mean(values, key=key, **self._noise, **self._given)
            self._noise = {"noise_multiplier": found.noise_multiplier, "noise": found.noise}
            name = f"{self._mark} {digest.hex()} {mark_of_released_noise(key)}"
            self.require_calls_in_budget(len({*self._names.values(), name} | self._earlier))
            self._released[digest], self._names[digest] = found, name
        return self._released[digest].value

    def _require_same_count(self, units: int):
        """Raises ValueError if the number of examples differs from the first call's: a release shows its divisor."""
        self._units = units if self._units is None else self._units
        if units != self._units:
            raise ValueError(
                "a private metric must have a value for each example at every call, because their number is public, "
                "but this call has more or fewer values than the first one. For a mean over some of the examples, "
                "return NaN for the others, with complete=False"
            )

    @property
    def _made(self) -> int:
        return len({*self._names.values()} | self._earlier)

    def release_and_name(self, params: Tree) -> str:
        """Releases the metric of these parameters and returns the release's name, which `fit` stores before it shows
        the metric. If the values differ, so does the name, because their noise differs."""
        self(params)
        return self._names[_digest_of_arrays(params)]

    def count_earlier_releases(self, names: Iterable[str]):
        """Counts the named releases, made by earlier programs of a run that `fit` continues. Raises ValueError if their
        metric had another key or noise, because epsilon counts every call with this metric's noise."""
        if any(not name.startswith(self._mark) for name in names):
            raise ValueError(
                "evaluate_private must have the key and the noise multiplier of the program that began this run, whose "
                "releases it counts, got a metric with others"
            )
        self._earlier |= {*names}

    def expect_calls(self, run: int, calls: int):
        """Sets the number of calls that a run of `fit` has planned but not made."""
        self._left[run] = calls

    def require_calls_in_budget(self, calls: int):
        """Raises ValueError if the budget covers fewer than this many calls."""
        if self.most is not None and calls > self.most:
            raise ValueError(
                f"the dpx.Budget of a private metric must have a step for each call, steps={calls}, got {self.most}"
            )

    def epsilon(self, *, delta: float) -> float:
        """Returns an upper bound on epsilon at `delta`, in (0, 1), for all calls, including those that earlier programs
        made for runs that this one continued. Raises ValueError if only earlier programs made calls.

        The releases may decide when a run ends, so every planned call counts: the budget's steps and all evaluations of
        `fit`, unless the budget or `fit` says `public_stop=True`. Without a budget, count every call that your own loop
        could have made.
        """
        if not self._made:
            return 0.0
        if not self._released:
            raise ValueError(
                f"a metric must be called before its epsilon is known, but all {self._made} calls of its run were made "
                "by another program"
            )
        one, *_ = self.released
        planned = max(self._made + sum(self._left.values()), self._planned)
        event = SelfComposedDpEvent(one.event, max(self._made, min(planned, self.most or planned)))
        numbers = max(released.numbers for released in self.released)  # values may have another shape at a later call
        return profile_of_run(event, relation=RELATION, numbers=numbers).epsilon(require_delta(delta))


def _digest_of_arrays(params: Tree) -> bytes:
    """A 32-byte digest of the bytes of all arrays."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(as_local_array(leaf))
        digest.update(f"{leaf_path(path)} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return digest.digest()
