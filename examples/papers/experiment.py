"""An experiment of a paper as data: the settings of its rows, the paper's figures, and what holds of its epsilon."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from examples.config import Config

TUNING_SEED = 100
Fields = Mapping[str, Any]  # fields of `Config`


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method at one epsilon.

    label: of the method, in the table and the plot. config: its fields beside those of the experiment, no budget.
    published: the paper's figure, in percent for accuracies. claimed: the epsilon that the paper states for it.
    noise: the noise multiplier that the paper's own accounting gives for `claimed`, or a function of (configuration,
        sampling rate, steps); None if the paper has none. "true": its accounting is exact, so its runs are those at
        `claimed`. The cost of the run with it is true.
    grid: changes of the configuration, of which the best on the tuning seed is taken.
    real: changes of config with the paper's own data.
    """

    label: str
    config: Fields = field(default_factory=dict)
    published: float | None = None
    claimed: float
    noise: float | Callable[[Config, float, int], float] | Literal["true"] | None = None
    grid: tuple[Fields, ...] = ({},)
    real: Fields = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One table or figure of a paper.

    name: "dynamic-table-3". title: what it compares, in words. common: the fields of all rows.
    truth: what the paper's epsilon is, and what holds, with figures and the command or the page they come from.
    stand_in: which data are used in place of the paper's, and why; "" where they are the paper's.
    real: changes of common for the paper's own data, which `--real` makes.
    smoke: changes that make a run last a second.
    tune_at: every label is tuned at this claimed epsilon; None: each row at its own.
    also: further metrics of the runs, in a table of their own.
    baseline: the label that the others are compared with, seed by seed.
    over_epochs: whether the page has a plot of the headline metric over the epochs. All else is in the table.
    same_runs_as: the name of the experiment that has these rows too, or "".
    """

    name: str
    title: str
    common: Fields
    rows: tuple[Row, ...]
    truth: str
    stand_in: str = ""
    real: Fields = field(default_factory=dict)
    smoke: Fields
    tune_at: float | None = None
    also: tuple[str, ...] = ()
    baseline: str = "DP-SGD"
    over_epochs: bool = False
    same_runs_as: str = ""

    def __post_init__(self):
        for label in {row.label for row in self.rows}:
            trials = {len(row.grid) for row in self.rows}
            if len(trials) > 1:
                raise ValueError(f"{self.name}: every row must have equally many trials, got {sorted(trials)}")
            epsilons = [row.claimed for row in self.rows if row.label == label]
            if len(set(epsilons)) < len(epsilons):
                raise ValueError(f"{self.name}: {label} has two rows at one epsilon, got {sorted(epsilons)}")
            if self.tune_at is not None and self.tune_at not in epsilons:
                raise ValueError(f"{self.name}: {label} has no row at tune_at {self.tune_at}, got {sorted(epsilons)}")
        if self.baseline not in {row.label for row in self.rows}:
            raise ValueError(f"{self.name}: the baseline {self.baseline} is none of the rows")

    def tuned_row(self, row: Row) -> Row:
        """The row of the same method at which its choice is made."""
        if self.tune_at is None:
            return row
        return next(one for one in self.rows if one.label == row.label and one.claimed == self.tune_at)

    @property
    def smoked(self) -> Row:
        """The row that `--smoke` runs: the paper's own method, which is the last label."""
        return self.rows[-1]

    @property
    def on_real_data(self) -> "Experiment":
        """The experiment as `--real` runs it."""
        rows = tuple(replace(row, config=merged(row.config, row.real)) for row in self.rows)
        common = merged(self.common, self.real)
        return replace(self, name=f"{self.name}-real", common=common, rows=rows, stand_in="")

    def config(self, row: Row, choice: Fields, seed: int, changes: Fields, **budget: Any) -> Config:
        """The run of a row. budget: epsilon or noise_multiplier. changes: of all rows."""
        return Config(**merged(self.common, row.config, choice, changes) | budget, seed=seed)


def merged(*parts: Fields) -> dict[str, Any]:
    """The last part that has a field says its value; options of the method and of the task are merged."""
    fields: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            options = name in ("method_options", "task_options") and name in fields
            fields[name] = {**fields[name], **value} if options else value
    return fields
