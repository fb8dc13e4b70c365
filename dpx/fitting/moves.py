"""Which steps count as made, although no parameters have them, when a run continues on other devices.

Steps that were made since the last checkpoint cannot be made again there. Other devices round sums in another order,
and both releases of a step have the same noise, so their difference shows bits of the data. Therefore all steps that
may have been made since then are counted and skipped: their batches and their noise are never used again.

Proof that the bill of the whole run covers it. Let the checkpoint be of step s. Steps up to some q were made after it.
Before they were made, a number r was written to the folder, and q <= r. The run continues with step r + 1, on the
parameters of step s. Each step was made at most once, with the batch and the noise of its own number. Its parameters
are a function of earlier releases: of 1 .. t - 1 for t <= q, and of 1 .. s for the first t > r. So this is one run
whose functions are chosen adaptively, which composition allows, and of which the releases q + 1 .. r are not shown.

Settings and libraries may change too. Then a step t > r has another function of the same data, and perhaps other
random numbers in its loss, its items or its projection; the function of a step may be chosen as one likes. But its
noise and its batch must be those of the run: the batches of an epoch share one order. Both are whole numbers of dpx's
own cipher, which no setting of jax changes (tests/test_moves.py).

It needs a state that is a function of releases, and noise that is independent of that of other steps. So error feedback
and correlated noise are refused, and projections whose draw is billed, because they are numbered by the steps that
trained and would be drawn twice.
"""

from typing import Any

import jax

from dpx.accounting.ledger import from_event
from dpx.accounting.loss import event_of
from dpx.fitting.settings import RunPlan
from dpx.fitting.step import Carry
from dpx.scalars import over
from dpx.states.reading import steps_taken
from dpx.states.record import ReleaseState
from dpx.trees import Tree, map_states, path_of


def require_skippable(run: RunPlan, state: Tree, first: int, reach: int):
    """Raises ValueError unless the steps after `first` may be skipped up to `reach`, and one is left to train.

    state: of any step.
    """
    unproved = [event_of(loss) for loss in from_event(run.optimizer.event(1)).counts if not loss.fresh]
    private = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(state) if "unreleased" in path_of(path)]
    if run.optimizer.correlated is not None:
        problem = "the mechanism's noise is correlated: later noise has parts of that of skipped steps"
    elif private:
        problem = f"the state is not a function of releases alone: it has {private[0]}"
    elif unproved:
        problem = f"the mechanism is billed as {unproved[0]}, for which skipped steps have no proof"
    elif reach >= run.steps:
        problem = f"no step is left to train, because all {run.steps} may have been made"
    else:
        return
    raise ValueError(
        f"on_other_devices must be False for this run, whose checkpoint is of step {first}, and which may have made "
        f"steps up to {reach}: {problem}. Continue it with the devices that it had; or begin a new run at the stored "
        "parameters, with a new key, and bill both by dpx.compose_runs, this one for all steps that it may have made"
    )


def skipped(carry: Carry, run: RunPlan, reach: int) -> Carry:
    """`carry`, whose state counts the steps up to `reach` with their noise, and nothing else of it changes."""
    multipliers = over(run.optimizer.noise_multiplier, reach)[steps_taken(carry.state) :]

    def count(record: ReleaseState) -> ReleaseState:
        layout = jax.tree.map(lambda leaf: leaf.sharding, record)
        steps = multipliers.astype("float32")
        counted = jax.jit(
            lambda record: jax.lax.scan(lambda kept, sigma: (kept.after(sigma), None), record, steps)[0],
            out_shardings=layout,
        )
        return counted(record)

    return carry._replace(state=map_states(count, carry.state, ReleaseState))


def in_words(names: list[str], first: int, reach: int) -> str:
    """Of a warning. names: of the facts that changed."""
    return (
        f"the run continues with another value of {', '.join(names)}. Its steps {first + 1} to {reach} may have been "
        "made before. So they count as made, and change no parameters"
    )


def in_report(report: Any, skipped_steps: int) -> tuple[str, ...]:
    """The caveats of a privacy report, of a run that skipped so many steps."""
    words = (
        f"{skipped_steps} of the steps are billed, but the parameters do not have them: the run was interrupted and "
        "continued on other devices, and these steps may have been made before."
    )
    return (*report.caveats, words) if skipped_steps else report.caveats
