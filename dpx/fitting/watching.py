"""Looks at a run every few steps: its metrics, its bill, its callbacks and its progress bar."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from dpx.accounting.words import upper, whose
from dpx.fitting import processes
from dpx.fitting.records import RESERVED, Progress
from dpx.fitting.settings import Terms
from dpx.fitting.steps import Carry, OfBatch, copied
from dpx.trees import Tree, described
from dpx.validation import require_function, require_whole

MOST_EVALUATIONS = 40  # by default, because each waits for the step and computes a bill


@dataclass(kw_only=True)
class Watcher:
    """evaluate: the user's. every: int, steps from one look to the next. history: a row for each look so far."""

    terms: Terms
    evaluate: Callable[[Tree], Any] | None
    every: int
    callbacks: Sequence[Callable[[Progress], Any]]
    loss_at: Callable[[Tree, Tree], Tree]
    bar: Any
    history: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, terms: Terms, evaluate: Any, every: Any, callbacks: Any, progress: bool, loss_at: Callable) -> Self:
        """With the defaults filled in. Raises ValueError for what is not a function, and for other periods."""
        if evaluate is not None:
            require_function("evaluate", evaluate)
        if not isinstance(callbacks, list | tuple):
            raise ValueError(f"callbacks must be a list of functions, got {described(callbacks)}")
        for callback in callbacks:
            require_function("each of the callbacks", callback)
        if every is None:
            sampling = terms.optimizer.sampling
            every = max(round(sampling.examples / sampling.divisor), math.ceil(terms.steps / MOST_EVALUATIONS))
        every, bar = require_whole("evaluate_every", every), _bar(terms.steps, progress)
        return cls(terms=terms, evaluate=evaluate, every=every, callbacks=callbacks, loss_at=loss_at, bar=bar)

    def look(self, step: int, carry: Carry, batch: OfBatch) -> bool:
        """Adds a row to the history. Whether a callback asks to stop."""
        shown = self.evaluate is not None or self.callbacks
        params, loss = copied(carry.params) if shown else carry.params, float(batch.mean)
        epsilon = self.terms.epsilon(carry.state)
        metrics = {}
        if self.evaluate is not None:
            with processes.together():
                metrics = metrics_of(self.evaluate(self.loss_at(params, carry.state)))
            metrics = processes.everyone(metrics)[0]  # of process 0, if each measured on data of its own
        self.history.append({"step": step, "epsilon": epsilon, **metrics, "unreleased_loss": loss})
        spent = f"epsilon {upper(epsilon, 4)}{whose(self.terms.records)}"
        words = [spent, *(f"{name} {value:.4g}" for name, value in metrics.items())]
        self.bar.set_postfix_str(", ".join([*words, f"loss {loss:.4g} (not private)"]))
        if not self.callbacks:
            return False
        unreleased, included = jax.tree.map(processes.readable, (batch.unreleased, batch.included))
        progress = Progress(step, epsilon, params, copied(carry.state), metrics, loss, unreleased, included)
        with processes.together():
            asked = [_asks_to_stop(callback(progress)) for callback in self.callbacks]  # a list, because all are called
        return any(processes.everyone(any(asked)))

    def rhythm(self) -> dict[str, Any]:
        """What all processes must do at the same steps."""
        watched = {"evaluate": self.evaluate, "callbacks": self.callbacks}
        return {"evaluate_every": self.every} | {name: "given" if of else "none" for name, of in watched.items()}


def metrics_of(found: Any) -> dict[str, float]:
    """The numbers that `evaluate` returned, by name. Raises ValueError for anything else."""
    named = found if isinstance(found, Mapping) else {"metric": found}
    for name, value in named.items():
        if not isinstance(name, str) or name in RESERVED:
            raise ValueError(f"names of evaluate must be strings other than {sorted(RESERVED)}, got {described(name)}")
        if not isinstance(value, int | float | np.generic | np.ndarray | jax.Array) or jnp.shape(value) != ():
            words = f"{described(value)} for {described(name)}"
            raise ValueError(f"evaluate must return a number, or a dict of numbers, got {words}")
    return {name: float(value) for name, value in named.items()}


def _asks_to_stop(answer: Any) -> bool:
    """Whether a callback returned True. Raises ValueError unless it returned a bool or None."""
    if answer is None or isinstance(answer, bool):
        return bool(answer)
    if isinstance(answer, np.generic | np.ndarray | jax.Array) and answer.shape == () and answer.dtype == np.bool_:
        return bool(answer)
    raise ValueError(f"a callback must return None, or a bool (True ends the run); got {described(answer)}")


class _NoBar:
    """In place of a progress bar."""

    def update(self, steps: int = 1):
        pass

    def set_postfix_str(self, words: str):
        pass

    def close(self):
        pass


def _bar(steps: int, progress: bool) -> Any:
    with contextlib.suppress(ImportError):
        if progress and jax.process_index() == 0:
            from tqdm import tqdm

            return tqdm(total=steps)
    return _NoBar()
