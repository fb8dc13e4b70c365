"""The request for a statistic, the records that it is computed from, and the record of its release."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, SelfComposedDpEvent
from numpy.typing import ArrayLike

from dpx import keys
from dpx.accounting.budget import Budget, calibrate
from dpx.accounting.checks import require_delta
from dpx.accounting.cost import event_epsilon, profile_of_run
from dpx.accounting.loss import PureDpEvent
from dpx.sampling.data import refuse_mask, require_plain_arrays
from dpx.sampling.schemes import FullBatch
from dpx.sampling.users import UserData
from dpx.statistics.noise import LARGEST_SUM, Noise, UnitSensitivity, key_of_query, padded_noise_count
from dpx.values import described, require_floats, require_number, require_open_fraction, require_text, warn_user

RELATION = "zero_out"
_LARGEST_USUAL, _SMALL_DELTA = 10.0, 1e-6  # a larger epsilon of one statistic at this delta warns
_ANSWERED: dict[int, int] = {}  # mark of a key -> mark of the noise that it has released


class StatisticRecords(NamedTuple):
    """The records of a statistic. values: (rows, columns). vector: whether the caller's array had a column axis.

    units: int, the public number of examples or users. most: int, the most records that one of them has. unit: what
    epsilon protects, in words.
    """

    values: np.ndarray
    vector: bool
    units: int
    most: int
    unit: str

    @property
    def most_rows(self) -> int:
        """A public bound on the number of records."""
        return self.units * self.most

    @property
    def without_values(self) -> "StatisticRecords":
        """A copy without the values, which a release may keep."""
        return self._replace(values=np.empty((0, self.values.shape[1]), self.values.dtype))

    def restore_shape(self, found: np.ndarray) -> Any:
        """Drops the column axis of (..., columns) if the caller's array had none, and turns a scalar into a float."""
        found = found if self.vector else found[..., 0]
        return float(found) if found.ndim == 0 else found


def records_of(data: Any, *, numbers: bool = True) -> StatisticRecords:
    """The records of each example or user. data: an array, (N,) or (N, columns), or a `dpx.UserData` of one.

    numbers: whether to require numbers and convert them to float64. Raises ValueError for other data.
    """
    users = isinstance(data, UserData)
    values = data.kept_rows if users else data
    refuse_mask(values)
    if isinstance(values, int | float | np.generic) or getattr(values, "shape", None) == ():
        words = "a count, a sum or a mean of them has lost what bounds one example"
        raise ValueError(f"data must hold a value of each example, (N,) or (N, columns), got one number: {words}")
    if numbers:
        require_plain_arrays(values)
    elif not (isinstance(getattr(values, "dtype", None), np.dtype) or hasattr(values, "__dlpack__")):
        # One record would decide how all are read: in a list, a 2 turns every bool into a number; in a table's column,
        # a missing value turns every integer into a float, so that large ones change.
        raise ValueError(
            "data must be an array whose dtype does not depend on the records, such as numpy.array(words, str), got "
            f"{type(values)}"
        )
    given, values = values, np.asarray(values)
    if values.ndim not in (1, 2) or values.shape[0] == 0 or values.dtype.kind not in ("fiub" if numbers else "fiubUS"):
        kinds = "numbers" if numbers else "numbers or words"
        words = described(values if values.ndim else given) + (
            ": for words, take column.to_numpy(str)" if values.dtype.kind == "O" and values.ndim else ""
        )
        raise ValueError(f"data must be {kinds}, (N,) or (N, columns) with N of at least 1; got {words}")
    units, most, unit = (len(data), data.most, data.privacy_unit) if users else (len(values), 1, "example")
    if units * most > LARGEST_SUM >> 24:
        raise ValueError(f"data must hold at most {LARGEST_SUM >> 24} records, got {units} times {most}")
    values = values.astype(np.float64) if numbers else values
    return StatisticRecords(values.reshape(len(values), -1), values.ndim == 2, units, most, unit)


def bounds_per_column(low: ArrayLike, high: ArrayLike, records: StatisticRecords) -> tuple[np.ndarray, np.ndarray]:
    """The bounds of each column, float64 (columns,). Raises ValueError unless low < high, both finite."""
    columns = records.values.shape[1]
    # Arrays are not shown, because someone may have passed data by mistake.
    got = f"{low=}, {high=}" if {type(low), type(high)} <= {int, float} else "other bounds"
    low, high = (require_floats(name, value) for name, value in (("low", low), ("high", high)))
    if any(bound.shape not in ((), (columns,)) for bound in (low, high)):
        raise ValueError(f"low and high must be numbers, or one for each column, got shapes {low.shape}, {high.shape}")
    low, high = np.broadcast_to(low, columns), np.broadcast_to(high, columns)
    with np.errstate(over="ignore", invalid="ignore"):
        if not (np.isfinite(high - low) & (low < high)).all():
            raise ValueError(f"low must be below high, with a finite difference, in every column; got {got}")
    return low, high


@dataclass(frozen=True, eq=False, kw_only=True)
class Release:
    """What was released, which anyone may see.

    value: float, or float64 (...). words: what it is. unit: what epsilon protects, such as "example"; neighbors have a
        null in place of one.
    event: what the release costs. numbers: int, for how many elements epsilon covers the arithmetic of Gaussian noise.
    noise: "gaussian", "laplace" or "exponential". noise_multiplier: float, the multiplier of this noise.
    """

    value: Any
    words: str
    unit: str
    event: DpEvent
    numbers: int
    noise: str
    noise_multiplier: float

    def epsilon(self, *, delta: float) -> float:
        """Returns an upper bound on epsilon at `delta`, in [0, 1), for this release; inf at 0 for Gaussian noise."""
        if delta == 0:
            return event_epsilon(self.event, delta=0, relation=RELATION)
        return profile_of_run(self.event, relation=RELATION, numbers=self.numbers).epsilon(require_delta(delta))


@dataclass(frozen=True, eq=False, kw_only=True)
class Statistic(Release):
    """A `Release` of a statistic with its error bounds."""

    interval_at: Callable[[float], Any] = field(repr=False)

    def interval(self, confidence: float = 0.95) -> tuple[Any, Any]:
        """Returns bounds on the true statistic of these records, each a float or float64 (...), like `value`.

        The bounds cover the noise and the rounding of the release, but not sampling error: if the records are a sample
        of a population, add its variance. The confidence holds for each element separately.

        confidence: in (0, 1). Raises ValueError outside this range.
        """
        return self.interval_at(1 - require_open_fraction("confidence", confidence))


@dataclass(frozen=True)
class StatisticRequest:
    """The arguments that every statistic takes (`dpx.statistics`)."""

    words: str
    key: jax.Array = field(repr=False)
    noise_multiplier: float | Budget
    noise: str | None
    ledger: Any
    part: str | None

    def __post_init__(self):
        keys.warn_if_guessable(keys.require_key(self.key))
        require_text("words", self.words)
        if self.ledger is not None and not hasattr(self.ledger, "terms"):
            raise ValueError(f"ledger must be a dpx.PrivacyLedger, got {described(self.ledger)}")
        require_text("part", "all" if self.part is None else self.part)
        if self.noise not in (None, "gaussian", "laplace"):
            raise ValueError(f'noise must be "gaussian", "laplace" or None, got {described(self.noise)}')
        if not isinstance(self.noise_multiplier, Budget):
            require_number("noise_multiplier", self.noise_multiplier, minimum=0, exclusive=True)
        elif self.noise_multiplier.records != 1 or self.noise_multiplier.epochs is not None:
            words = "steps, how many such releases it is for, and one record; for persons with several, take "
            raise ValueError(
                f"the dpx.Budget of a statistic must have {words}dpx.UserData; got {self.noise_multiplier}"
            )

    def choose_noise(self, records: StatisticRecords, effect: UnitSensitivity, size: int) -> tuple[Noise, float]:
        """Returns noise for `size` sums and its multiplier. If two kinds are possible, takes the smaller deviation."""
        kinds: list[Any] = [self.noise or "gaussian"]
        if self.noise is None and isinstance(self.noise_multiplier, Budget) and self.ledger is None:
            kinds = ["laplace", "gaussian"]
        found, refusals = [], []
        for kind in kinds:
            try:
                multiplier = self.resolve_multiplier(
                    records, lambda multiplier, kind=kind: event_of_noise(kind, multiplier), padded_noise_count(size)
                )
                found.append((Noise.from_multiplier(kind, multiplier, effect), multiplier))
            except ValueError as error:  # beyond the proof of this kind, and perhaps not of the other
                refusals.append(error)
        if not found:
            raise refusals[-1]
        return min(found, key=lambda each: each[0].deviation)

    def resolve_multiplier(self, records: StatisticRecords, event: Callable[[float], DpEvent], numbers: int) -> float:
        """Returns the noise multiplier, or the least in the budget. event: noise multiplier -> event of a release."""
        budget = self.noise_multiplier
        if not isinstance(budget, Budget):
            return float(budget)
        if budget.steps == 1 and isinstance(event(1.0), PureDpEvent):  # at delta 0
            return 1 / budget.epsilon
        sampling = FullBatch(examples=records.units)
        price = {"epsilon": budget.epsilon, "delta": budget.delta, "accountant": budget.accountant}

        def make(multiplier: float) -> SimpleNamespace:  # what `calibrate` needs of a mechanism
            return SimpleNamespace(event=lambda steps: SelfComposedDpEvent(event(multiplier), steps), sampling=sampling)

        numbers = numbers if budget.numbers is None else max(numbers, budget.numbers)
        return calibrate(make, steps=budget.steps, **price, numbers=numbers)

    def release_noisy_sums(
        self, records: StatisticRecords, sums: np.ndarray, effect: UnitSensitivity, low: int, high: int, *, query: str
    ) -> tuple[np.ndarray, Noise, dict[str, Any]]:
        """Charges a release, and adds noise to sums, int64 (...). Returns the sums, the noise and `Statistic` fields.

        effect: that of one record. low, high: public bounds on the sums. query: the question and all public arguments.
        """
        effect = UnitSensitivity(
            effect.one * records.most, effect.two * records.most, min(sums.size, effect.moves * records.most)
        )
        noise, multiplier = self.choose_noise(records, effect, sums.size)
        numbers, query = padded_noise_count(sums.size), f"{query} {noise} {effect}"
        event, own = self.charge(
            records, lambda each: event_of_noise(noise.kind, each), multiplier, numbers, query, sums
        )
        noisy = noise.noisy_sums(own, sums.reshape(-1), low, high).reshape(sums.shape)
        facts = {"noise": noise.kind, "noise_multiplier": multiplier, "event": event, "numbers": numbers}
        return noisy, noise, facts | {"words": self.words, "unit": records.unit}

    def charge(
        self,
        records: StatisticRecords,
        event: Callable[[float], DpEvent],
        multiplier: float,
        numbers: int,
        query: str,
        sums: np.ndarray,
    ) -> tuple[DpEvent, jax.Array]:
        """Charges a release to the ledger, for all k records of a person, which change the sums k times as much.
        Returns its event and its noise key. Raises ValueError for a used key, and if the ledger does."""
        own = key_of_query(self.key, query, sums)
        mark, answer = int(keys.mark_of_key(self.key)), int(keys.mark_of_key(own))
        if _ANSWERED.get(mark, answer) != answer:
            raise ValueError(
                f"key must be used for only one release, but this one made another before {self.words}: take a new "
                "dpx.secret_key() for each"
            )
        if self.ledger is None and not isinstance(self.noise_multiplier, Budget):
            _warn_of_large_cost(self.noise_multiplier, event(multiplier))
        if self.ledger is not None:
            if self.ledger.terms.relation == "add_or_remove":
                raise ValueError(
                    'relation of the ledger of a statistic must be "zero_out" or "replace_one", because the number of '
                    'examples is public; got "add_or_remove"'
                )
            of = {"words": self.words, "numbers": numbers, "unit": records.unit, "part": self.part}
            cost = event(multiplier / self.ledger.terms.records)
            self.ledger.spend(cost, key=self.key, holder=str(answer), **of)
        _ANSWERED[mark] = answer
        return event(multiplier), own


def _warn_of_large_cost(noise_multiplier: float, event: DpEvent) -> None:
    """Warns the user if a noise multiplier, perhaps meant as epsilon, makes a statistic unusually expensive."""
    if noise_multiplier < 1 and (cost := event_epsilon(event, delta=_SMALL_DELTA, relation=RELATION)) > _LARGEST_USUAL:
        warn_user(
            f"noise_multiplier = {noise_multiplier:g} gives epsilon = {cost:.3g} at delta = {_SMALL_DELTA:g}, which "
            f"promises little: less noise costs more. For epsilon = {noise_multiplier:g}, pass noise_multiplier="
            f"dpx.Budget(epsilon={noise_multiplier:g}, delta={_SMALL_DELTA:g}, steps=1)"
        )


def mark_of_released_noise(key: jax.Array) -> int:
    """A fingerprint of a key's released noise, which differs between releases of different sums or bounds."""
    return _ANSWERED[int(keys.mark_of_key(key))]


def event_of_noise(kind: str, noise_multiplier: float) -> DpEvent:
    """The event of one release: Gaussian, or a pure mechanism with epsilon 1 / noise_multiplier."""
    return GaussianDpEvent(noise_multiplier) if kind == "gaussian" else PureDpEvent(1 / noise_multiplier)


def weighted_mean_bounds(
    cells: np.ndarray, weights: tuple[float, ...], noise: Noise, error: float, off: float
) -> tuple:
    """Bounds on sum_i w_i S_i / sum_i S_i, in [0, 1], float64 (...) each, from noisy cells of the sums S.

    The true ratio f has sum_i (w_i - f) S_i = 0, so sum_i (w_i - f) cells_i is pure noise of a known half width. The
    values of f that fit this noise include the true one with a probability of at least 1 - error (Fieller 1954,
    https://doi.org/10.1111/j.2517-6161.1954.tb00159.x). If they are not an interval, the bounds are 0 and 1.

    cells: float64 (number of weights, ...). weights: in [0, 1]. off: the most that rounding moves the weighted sum.
    """
    w = np.asarray(weights)
    total, weighted = cells.sum(axis=0), np.tensordot(w, cells, 1)
    if noise.kind == "gaussian":
        squared = noise.half_width(error) ** 2
        a = total**2 - squared * len(w)

        def end(sign: int) -> np.ndarray:
            top = weighted + sign * off
            half = top * total - squared * w.sum()
            root = half**2 - a * (top**2 - squared * np.square(w).sum())
            return (half + sign * np.sqrt(np.maximum(root, 0))) / a

    else:
        a, most = total, max(w.sum(), (1 - w).sum())
        width = noise.half_width(error / len(w)) * most + off

        def end(sign: int) -> np.ndarray:
            return (weighted + sign * width) / a

    with np.errstate(divide="ignore", invalid="ignore"):
        known = (a > 0) & (total > 0)
        low, high = (np.where(known, np.clip(end(sign), 0, 1), (sign + 1) / 2) for sign in (-1, 1))
    return low, high


def safe_ratio(top: np.ndarray, bottom: np.ndarray, otherwise: float) -> np.ndarray:
    """Returns top / bottom, clipped to [0, 1], and `otherwise` where bottom is not positive."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(bottom > 0, np.clip(top / bottom, 0, 1), otherwise)
