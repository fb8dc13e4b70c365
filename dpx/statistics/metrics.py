"""Metrics of private validation data: the mean of a bounded value of each example, with noise."""

import functools
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from dp_accounting import SelfComposedDpEvent

from dpx import keys
from dpx.accounting.budget import Budget
from dpx.accounting.cost import profile_of_run
from dpx.sampling.users import UserData
from dpx.statistics.released import RELATION, Statistic, mark_of_answer, records_of
from dpx.statistics.sums import release_mean
from dpx.values import Tree, as_local_array, names_arguments, path_of, require_function


@names_arguments
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
    """The share of correct predictions, on private data.

    correct: bool (N,), such as `predictions == labels`; or a `dpx.UserData` of it, for the share of all records.
    The other arguments and errors are those of `dpx.statistics`. For any other metric, `release_mean` takes the
    bounded values of the examples.

        >>> right = dpx.statistics.release_accuracy(np.ones(40, bool), noise_multiplier=2.0, key=dpx.secret_key())
        >>> right.interval(0.95)[1] <= 1
        True
    """
    asked = {"noise_multiplier": noise_multiplier, "key": key, "noise": noise, "words": words}
    complete = not isinstance(correct, UserData)
    return release_mean(correct, low=0, high=1, complete=complete, **asked, ledger=ledger, part=part)


@names_arguments
class PrivateMetric:
    """A metric of private validation data, for `dpx.fit(..., evaluate_private=)` or to call with parameters.

    Each call is a release of the validation data, with noise of its own. The same parameters get the same noise, so a
    run that is interrupted and repeats its steps releases nothing twice.

    metric: (params) -> a value of each example, (N,), which depends on that example and on `params` alone; or a
        `dpx.UserData` of the values of records. The metric is their mean. A value that is not a number is left out: for
        a mean over some of the examples, such as a precision, return NaN for the others, with complete=False.
    low, high: floats, public bounds, to which values are clipped.
    noise_multiplier: float, of one call; or a `dpx.Budget` whose steps are the number of calls.
    complete: as for `release_mean`: True if every example has a value, which is then not NaN.
    The other arguments and errors are those of `dpx.statistics`. With a budget, the call after the last one raises
    ValueError, and so does a call with another number of examples than before, because that number is public.

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
        self._metric = require_function("metric", metric)
        self._key = keys.warn_if_guessable(keys.require_key(key))
        budget = noise_multiplier if isinstance(noise_multiplier, Budget) else None
        self.most = None if budget is None else budget.steps
        self._planned = 0 if budget is None or budget.public_stop else budget.steps  # calls that count, made or not
        self._left: dict[int, int] = {}  # calls that runs of `fit` have planned and not made, by the mark of their key
        self._given = {"low": low, "high": high, "complete": complete, "words": words, "ledger": ledger, "part": part}
        self._noise = {"noise_multiplier": noise_multiplier, "noise": noise}
        settings = f"{int(keys.mark_of_key(self._key))} {noise_multiplier!r} {noise!r}".encode()
        self._mark = hashlib.sha256(settings).hexdigest()[:16]  # of the key and the noise, in the names of releases
        self._units: int | None = None  # how many examples a call measured
        self._released: dict[bytes, Statistic] = {}
        self._names: dict[bytes, str] = {}  # of the same releases
        self._earlier: set[str] = set()  # names of what other programs released

    @property
    def released(self) -> tuple[Statistic, ...]:
        """What the calls released, in their order, each with its interval."""
        return tuple(self._released.values())

    def __call__(self, params: Tree) -> float:
        """The metric of `params`, released. Raises ValueError for one call more than the budget has."""
        digest = _digest_of(params)
        if digest not in self._released:
            self.require(self._made + all(digest.hex() not in name for name in self._earlier))
            key = functools.reduce(keys.fold_in, np.frombuffer(digest, np.uint32), keys.stream(self._key, "metric"))
            values = as_local_array(self._metric(params))
            if np.ndim(values) == 0:
                raise ValueError(
                    "metric must return one number for each example, (N,), got one number: leave out the mean, because "
                    "it has no noise"
                )
            self._require_all(records_of(values).units)
            found = release_mean(values, key=key, **self._noise, **self._given)
            self._noise = {"noise_multiplier": found.noise_multiplier, "noise": found.noise}
            name = f"{self._mark} {digest.hex()} {mark_of_answer(key)}"
            self.require(len({*self._names.values(), name} | self._earlier))
            self._released[digest], self._names[digest] = found, name
        return self._released[digest].value

    def _require_all(self, units: int):
        """Raises ValueError for another number of examples than in the first call: a release shows its divisor."""
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

    def name_of(self, params: Tree) -> str:
        """The name of the release of these parameters, which is made. `fit` writes it down before it shows the metric.
        The same parameters have another name where their values are others, because the noise is another one too."""
        self(params)
        return self._names[_digest_of(params)]

    def count_earlier(self, names: Iterable[str]):
        """Counts what other programs released of a run that continues, by the names. `fit` calls it. Raises ValueError
        if their metric had another key or noise, because epsilon counts all calls with the noise of this one."""
        if any(not name.startswith(self._mark) for name in names):
            raise ValueError(
                "evaluate_private must have the key and the noise multiplier of the program that began this run, whose "
                "releases it counts, got a metric with others"
            )
        self._earlier |= {*names}

    def expect(self, run: int, calls: int):
        """Counts calls that a run has planned and not made, in place of those before. `fit` calls it."""
        self._left[run] = calls

    def require(self, calls: int):
        """Raises ValueError if the budget is for fewer calls."""
        if self.most is not None and calls > self.most:
            raise ValueError(
                f"the dpx.Budget of a private metric must have a step for each call, steps={calls}, got {self.most}"
            )

    def epsilon(self, *, delta: float) -> float:
        """An upper bound on epsilon at `delta`, in (0, 1), of all calls, with those of other programs for runs that
        continued in this one. Raises ValueError if there are only such.

        The releases may decide when a run ends, so all calls that were planned count: the steps of the budget, and all
        evaluations of `fit`, unless the budget or `fit` says `public_stop=True`. Without a budget, count all calls that
        your own loop could have made.
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
        return profile_of_run(event, relation=RELATION, numbers=one.numbers).epsilon(delta)


def _digest_of(params: Tree) -> bytes:
    """A digest of the bytes of all arrays, 32 bytes."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(as_local_array(leaf))
        digest.update(f"{path_of(path)} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return digest.digest()
