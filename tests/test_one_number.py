"""One run has one number: every way to the cost of a run answers the same float, however the run ends."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from orbax import checkpoint

import dpx
from dpx import accounting, reports
from dpx.fitting.step import first_carry
from dpx.reports import curves
from dpx.states.record import ReleaseState, set_run_plan
from dpx.values import map_nodes_of_type, rounded_up
from tests.problems import cut_at
from tests.problems import inner_product as loss

DATA = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
PARAMS = {"w": jnp.zeros(3)}
pytestmark = pytest.mark.filterwarnings("ignore:the state has taken no step")  # as of a run that was killed at once
NUMBERS = 3  # of a release: the state knows them
SAMPLING = dpx.PoissonSampling(examples=40, batch_size=8)
PLAN, ENDS, DELTA = 8, 3, 1e-5
OF = {"delta": DELTA, "accountant": "rdp"}
WAYS = ("by plan", "by a callback", "by Ctrl-C", "by a kill", "by a kill, then by plan", "by a callback, then shorter")


def made(noise_multiplier=2.0, seed=5, transform=None):
    key = dpx.secret_key(seed)
    private = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise_multiplier, sampling=SAMPLING, key=key)
    return dpx.chain(private, transform or optax.sgd(0.1))


class Run:
    """A run that ended in one of WAYS: its result or None, its last state, its history, and what was seen last."""

    def __init__(self, way, optimizer, folder, **options):
        self.optimizer, self.folder, self.seen, self.result = optimizer, folder, [], None
        self.options = {"steps": PLAN, "delta": DELTA, "accountant": "rdp", "checkpoints": folder} | options
        if way == "by Ctrl-C":
            with cut_at(ENDS):
                self.fit()
        elif way == "by plan":
            self.fit()
        elif way.startswith("by a callback"):
            self.fit(lambda progress: progress.step == ENDS)
        else:
            with pytest.raises(MemoryError):
                self.fit(self.killed)
        if "then" in way:
            self.options |= {"steps": ENDS} if way.endswith("shorter") else {}
            self.fit()
        like = first_carry(PARAMS, optimizer, None)
        as_stored = checkpoint.args.StandardRestore({"params": like.params, "optimizer_state": like.state})
        with checkpoint.CheckpointManager(folder) as manager:
            tree = manager.restore(manager.latest_step(), args=as_stored)
        self.state, self.history = tree["optimizer_state"], json.loads((folder / "history.json").read_text())

    def fit(self, ended=lambda progress: None):
        calls = [self.seen.append, ended]
        self.result = dpx.fit(loss, self.optimizer, PARAMS, DATA, callbacks=calls, evaluate_every=1, **self.options)

    def killed(self, progress):
        if progress.step == ENDS + 1:
            raise MemoryError


def numbers(optimizer, state):
    """Every cost of a state, by the way that leads to it."""
    report = dpx.privacy_report(optimizer, state, delta=DELTA)
    shown = dpx.publishable_state(state)
    return {
        "state": dpx.epsilon(optimizer, state, **OF),
        "public state": dpx.epsilon(optimizer, shown, **OF),
        "report": report.epsilon["rdp"],
        "stored report": json.loads(report.to_json())["epsilon"]["rdp"],
        "composition": dpx.compose_runs((optimizer, state), shared_batches=False).epsilon(**OF),
        "public composition": dpx.compose_runs((optimizer, shown), shared_batches=True).epsilon(**OF),
    }


def others(optimizer, spent):
    """Costs that are no epsilon, of a state, also of one that was made otherwise."""
    return (
        accounting.delta(optimizer, spent, epsilon=1.0, accountant="rdp"),
        reports.attack_bounds(optimizer, spent, **OF),
        curves.delta_over_epsilon(optimizer, spent, epsilons=[0.5, 2.0], accountant="rdp").delta.tolist(),
        curves.trade_off(optimizer, spent, accountant="rdp", points=5).type_two.tolist(),
        accounting.best_of((optimizer, spent), trials=3, score_on="public").epsilon(delta=DELTA),
    )


def require_one_number(optimizer, state, steps):
    expected = dpx.epsilon(optimizer, steps, numbers=NUMBERS, **OF)
    assert numbers(optimizer, state) == dict.fromkeys(numbers(optimizer, state), expected)
    made_steps = accounting.steps_taken(state)
    report = dpx.privacy_report(optimizer, state, delta=DELTA)
    assert (report.made, report.steps) == (made_steps, steps)
    words = f"{made_steps} of {steps} planned steps were taken, and epsilon covers all {steps}, because"
    flowing = " ".join(str(report).split())
    assert (words in flowing) == (words in repr(report)) == (made_steps < steps)
    for text in (flowing, report.to_html(), report.to_markdown()):
        assert f" is {rounded_up(report.spent, 6)} at delta" in " ".join(text.split()) and f"for {steps} steps" in text
    return expected


@pytest.mark.parametrize("public_stop", [False, True], ids=["planned", "public"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.long_cases(
    *("by Ctrl-C-planned", "by plan", "by a kill-public", "by a callback, then shorter", "by a kill, then by plan")
)
def test_one_run_has_one_number(way, public_stop, tmp_path, capsys):
    budget = dpx.Budget(epsilon=4.0, steps=PLAN, public_stop=public_stop, **OF)
    by_budget = WAYS.index(way) % 2 == 0
    optimizer = made(budget if by_budget else 2.0)
    options = {} if by_budget else {"public_stop": public_stop}
    run = Run(way, optimizer, tmp_path / "run", progress=True, **options)
    steps = accounting.steps_taken(run.state)
    last = {"by plan": PLAN, "by a kill": 0, "by a kill, then by plan": PLAN}.get(way, ENDS)
    assert steps == last
    expected = require_one_number(optimizer, run.state, steps if public_stop else PLAN)
    if way == "by a callback":
        promised = set_run_plan(run.state, 0 if public_stop else PLAN)
        assert others(optimizer, run.state) == others(optimizer, dpx.publishable_state(promised))
        steps_alone = others(optimizer, steps if public_stop else PLAN)
        assert others(optimizer, run.state)[0] == pytest.approx(steps_alone[0], rel=1e-3)
    seen = [progress for progress in run.seen if progress.step <= steps]
    for progress in seen[-1:]:
        assert progress.epsilon == dpx.epsilon(optimizer, progress.state, **OF) == expected
    if not public_stop:
        assert {progress.epsilon for progress in run.seen} | {row["epsilon"] for row in run.history} <= {expected}
    assert [row["epsilon"] for row in run.history[-1:]] == [expected] * bool(run.history)
    assert f"epsilon {rounded_up(expected, 4)}, " in capsys.readouterr().err or not steps
    if run.result is not None:
        for leaf, other in zip(jax.tree.leaves(run.result.state), jax.tree.leaves(run.state), strict=True):
            np.testing.assert_array_equal(leaf, other)
        assert run.result.epsilon == run.result.report.epsilon["rdp"] == run.result.history[-1]["epsilon"] == expected
        assert (run.result.steps, run.result.report.steps) == (steps, steps if public_stop else PLAN)
        composed = dpx.compose_runs((optimizer, run.result), shared_batches=False)
        assert composed.epsilon(**OF) == expected


def test_the_longest_plan_counts(tmp_path, monkeypatch):
    """Of all programs, also of one that was killed before it stored anything; a promise that comes later counts not."""
    optimizer = made()
    run = Run("by a callback", optimizer, tmp_path)
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(dpx.PoissonSampling, "draw", lambda *given, **named: (_ for _ in ()).throw(MemoryError))
        run.options["steps"] = 2 * PLAN
        run.fit()
    run.options |= {"steps": ENDS, "public_stop": True}
    run.fit()
    assert run.result.steps == ENDS
    expected = require_one_number(optimizer, run.result.state, 2 * PLAN)
    assert {row["epsilon"] for row in run.result.history} == {run.result.epsilon} == {expected}


@pytest.mark.parametrize("of", ["a budget", "a public stop", "nothing"])
@pytest.mark.long_cases("a public stop")
def test_of_a_loop_by_hand(of):
    """A budget is a plan; beyond it, the steps that were made are billed, and without one they are."""
    budget = dpx.Budget(epsilon=4.0, steps=ENDS, public_stop=of == "a public stop", **OF)
    optimizer = made(2.0 if of == "nothing" else budget)
    record = jax.jit(
        lambda state: map_nodes_of_type(lambda r: r.after_release(optimizer.noise_multiplier), state, ReleaseState)
    )
    state = optimizer.init(PARAMS)
    for steps in range(1, ENDS + 2):
        state = record(state)
        planned_steps = max(steps, ENDS) if of == "a budget" else steps
        require_one_number(optimizer, state, planned_steps)
        ending = dpx.privacy_report(optimizer, state, delta=DELTA).ending
        covers = f"Epsilon covers the {steps} steps taken and no others"
        assert ending.startswith(covers) == (steps != ENDS and planned_steps == steps or of == "nothing")


def test_a_budget_is_the_plan_of_a_fit_with_fewer_steps(tmp_path):
    """Because a loop of such calls can end after a look at any of them."""
    optimizer, options = made(dpx.Budget(epsilon=4.0, steps=PLAN, **OF)), {"checkpoints": tmp_path}
    for steps in (2, 4):
        result = dpx.fit(loss, optimizer, PARAMS, DATA, steps=steps, **options)
        assert require_one_number(optimizer, result.state, PLAN) == result.epsilon
    promised = dpx.fit(loss, made(optimizer.budget, seed=6), PARAMS, DATA, steps=2, public_stop=True)
    assert require_one_number(made(optimizer.budget, seed=6), promised.state, 2) == promised.epsilon < result.epsilon


def test_the_schedule_of_the_plan_is_billed():
    """Also the noise of steps that were not made; the record is checked for those that were."""
    falling, other = (made(lambda step, s=s: 4.0 - s * jnp.minimum(step, 6) / 6) for s in (2.0, 1.0))
    state = set_run_plan(falling.init(PARAMS), PLAN)
    for step in range(ENDS):
        noise = falling.noise_multiplier(jnp.int32(step))
        state = map_nodes_of_type(lambda node, noise=noise: node.after_release(noise), state, ReleaseState)
    require_one_number(falling, state, PLAN)
    with pytest.raises(ValueError, match="other noise"):
        dpx.epsilon(other, state, **OF)


def test_composed_runs_cost_their_plans():
    states = [set_run_plan(made(seed=seed).init(PARAMS), PLAN) for seed in (5, 6)]
    runs = list(zip([made(seed=5), made(seed=6)], states, strict=True))
    for shared in (False, True):
        found = dpx.compose_runs(*runs, shared_batches=shared).epsilon(**OF)
        in_numbers = dpx.compose_runs(*((m, PLAN) for m, _ in runs), shared_batches=shared)
        assert found == dataclasses.replace(in_numbers, numbers=NUMBERS).epsilon(**OF) < in_numbers.epsilon(**OF)


def test_only_a_bool_is_a_promise():
    with pytest.raises(ValueError, match="public_stop must be True or False, got 'no'"):
        dpx.fit(loss, made(), PARAMS, DATA, steps=2, delta=DELTA, public_stop="no")
    with pytest.raises(ValueError, match="public_stop must be True or False, got 1"):
        dpx.Budget(epsilon=1.0, delta=DELTA, steps=2, public_stop=1)
