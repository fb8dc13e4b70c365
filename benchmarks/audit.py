"""Audits of every method, of broken ones, the figures of one-run audits, and the coverage of all confidence statements.

`python -m benchmarks.audit` writes results/audit.md. `--runs 0.02` is a short trial, in results/audit_trial.md.
"""

import argparse
import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import report, timing

DELTAS = (1e-3, 1e-5)
SEED = 20261122
MU = 0.83  # without sampling, DP-SGD's run costs as much as one release of noise multiplier 1 / MU
POISSON_NOISE = 1.3
REPETITIONS = 200
LEAST_SHARE = 0.7  # of the cost; a bound below it needs a reason
EMBEDDED = "the sum of embedding and residual hides part of both; the cost is for both seen apart"
DRAWN = "two directions, which rarely are the canary's"
COUNTED = "the counts of rows, of a fifth of the privacy, are not looked at"
FEEDBACK = "no attack is known that reaches the bound on how the error of one step moves all later releases"
STRETCH = "the cost counts the largest stretch, and a canary reaches it by chance only, because the draw is secret"


class Audit(NamedTuple):
    """make: (noise multiplier, steps, sampling, key) -> mechanism.

    noise: its multiplier at step 0, divided by DP-SGD's for the same number of steps.
    size: of the parameters, numbers or a shape. options: of `canary_scores`.
    runs: relative to the plan's; more than those in the first plan only.
    reason: why a bound is far below the cost, if it is.
    """

    name: str
    make: Callable[..., Any]
    noise: Callable[[int], float] = lambda steps: 1.0
    size: int | tuple[int, ...] = 2
    options: dict[str, Any] = {}
    runs: float = 1.0
    reason: str = ""


class Plan(NamedTuple):
    """How often, and with which batches, every method is run. noise: DP-SGD's noise multiplier."""

    name: str
    steps: int
    sampling: Any
    noise: float
    runs: int


def plans() -> list[Plan]:
    import dpx

    full, poisson = dpx.FullBatch(examples=10), dpx.PoissonSampling(examples=100, batch_size=20)
    return [
        Plan("all data, 5 steps", 5, full, math.sqrt(5) / MU, 4_000_000),
        Plan("all data, 50 steps", 50, full, math.sqrt(50) / MU, 400_000),
        Plan("Poisson at rate 0.2, 10 steps", 10, poisson, POISSON_NOISE, 2_000_000),
    ]


def audits() -> list[Audit]:
    import jax.numpy as jnp

    import dpx
    from dpx import mechanisms, methods, strategies

    def method(build, **arguments):
        def make(noise, steps, sampling, key):
            return build(**arguments, noise_multiplier=noise, sampling=sampling, key=key)

        return make

    def dynamic(noise, steps, sampling, key):
        numbers = {"clip_norm": 1.0, "rho_mu": 2.0, "rho_c": 2.0, "steps": steps}
        return methods.dynamic_dp_sgd(**numbers, noise_multiplier=noise, sampling=sampling, key=key)

    def correlated(build, chance, **arguments):
        """chance: what takes the place of Poisson sampling."""

        def make(noise, steps, sampling, key):
            sampling = sampling if isinstance(sampling, dpx.FullBatch) else chance
            numbers = arguments | ({"steps": steps} if "bands" in arguments else {})
            return build(**numbers, clip_norm=1.0, noise_multiplier=noise, sampling=sampling, key=key)

        return make

    def moved(strategy_of):
        """The noise for all data, over that of DP-SGD: one example moves C G by the sensitivity, and G by the root."""

        def noise(steps):
            found = strategies.sensitivity(strategy_of(steps), steps=steps, participations=steps)
            return found / math.sqrt(steps)

        return noise

    def both_parts(updates, before, after, canary):
        return jnp.stack([updates["w"][0], updates["w"][1:].sum()])

    def with_count(updates, before, after, canary):  # the clip norms show the noisy count
        return jnp.stack([updates["w"].sum(), jnp.log(after.clip_norm / before.clip_norm)])

    def falling(steps):  # the noise of D2P2-SGD falls as the step's power -1/4
        return math.sqrt(2 / 3 * math.sqrt(steps))

    one_coordinate = {"canary": {"w": jnp.zeros(4).at[0].set(1e6)}}  # random signs cannot cancel it
    sketch, freeze = {"kind": "countsketch", "rank": 2}, {"clip_norm": 1.0, "freeze_rate": 0.5, "every": 2}
    dice = {"clip_norm": 1.0, "feedback_norm": 1.0, "outer_clip_norm": 1.1}
    adaptive = {"initial_clip_norm": 1.0, "indicator_noise": 13.0}
    gep = functools.partial(methods.gep_sgd, {"w": jnp.eye(1, 4)}, embedding_clip_norm=1.0, residual_clip_norm=0.5)
    last = {"order": "clip_then_project"}
    cyclic = dpx.sampling.CyclicPoissonSampling(examples=100, batch_size=20, bands=3)
    ordered = dpx.sampling.FixedOrder(examples=100, batch_size=20)
    return [
        Audit("dp_sgd", method(methods.dp_sgd, clip_norm=1.0), runs=5),
        Audit("dynamic_dp_sgd", dynamic, lambda steps: 1.6),
        Audit("d2p_sgd", method(methods.d2p_sgd), falling),
        Audit("dp2_sgd", method(methods.dp2_sgd, **sketch), size=4, options=one_coordinate, runs=0.4),
        Audit("d2p2_sgd", method(methods.d2p2_sgd, **sketch), falling, 4, one_coordinate, 0.4),
        Audit(
            "d2p2_sgd, projected last",
            method(methods.d2p2_sgd, **sketch, **last),
            falling,
            4,
            one_coordinate,
            0.4,
            STRETCH,
        ),
        Audit(
            "d2p2_sgd, projected last, gaussian",
            method(methods.d2p2_sgd, kind="gaussian", rank=2, **last),
            lambda steps: 1.3 * falling(steps),
            runs=0.4,
        ),
        Audit("random_freeze_sgd", method(methods.random_freeze_sgd, **freeze), size=4, runs=0.7),
        Audit("ranked_freeze_sgd", method(methods.ranked_freeze_sgd, **freeze), size=4),
        Audit("ada_dpigu", method(methods.ada_dpigu, clip_norm=1.0, warmup=2)),
        Audit("tp_topk_sgd", method(methods.tp_topk_sgd, clip_norm=1.0, warmup=2, keep=0.5)),
        Audit(
            "zeroth_order_sgd", method(methods.zeroth_order_sgd, clip_norm=1.0, directions=2), runs=0.4, reason=DRAWN
        ),
        Audit(
            "ada_fest",
            method(methods.ada_fest, clip_norm=1.0, threshold=2.0, most_rows=2),
            size=(4, 1),
            runs=0.4,
            reason=COUNTED,
        ),
        Audit("dice_sgd", method(methods.dice_sgd, **dice), reason=FEEDBACK),
        Audit("gep_sgd", method(gep), size=4, options={"observe": both_parts}, reason=EMBEDDED),
        Audit("adaptive_clipping", method(mechanisms.adaptive_clipping, **adaptive), options={"observe": with_count}),
        Audit(
            "band_mf_sgd",
            correlated(methods.band_mf_sgd, cyclic, bands=3),
            moved(lambda steps: strategies.optimized(bands=3, steps=steps)),
        ),
        Audit(
            "lambda_cgd",
            correlated(methods.lambda_cgd, ordered, correlation=0.5),
            moved(lambda steps: strategies.lambda_cgd(correlation=0.5)),
        ),
    ]


class FullBatches(NamedTuple):
    """DP-SGD whose batches all have one size: where the canary is missing, another example has its place.

    The other examples' gradients are the opposite of the canary's, so that the batch in which it should be shows
    (Chua et al. 2024, https://arxiv.org/abs/2403.17673).
    """

    inner: Any

    @property
    def init(self):
        return self.inner.init

    @property
    def event(self):
        return self.inner.event

    @property
    def sampling(self):
        return self.inner.sampling

    def update(self, grads, state, params, *, included):
        import jax
        import jax.numpy as jnp

        size = int(self.sampling.divisor)
        rows = jax.tree.map(lambda leaf: jnp.concatenate([leaf, jnp.full((size, *leaf.shape[1:]), -1e6)]), grads)
        counts = jnp.arange(size + 1) < size
        return self.inner.update(rows, state, params, included=jnp.where(included[0], counts, counts[::-1]))


def broken() -> list[tuple[str, Plan, Audit, dict[str, Any]]]:
    """Mechanisms whose cost is wrong, and how their batches are truly drawn."""
    import jax
    import jax.numpy as jnp

    import dpx

    def dp_sgd(noise, steps, sampling, key):
        return dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise, sampling=sampling, key=key)

    def too_little_noise(noise, steps, sampling, key):
        return dp_sgd(2 / 3 * noise, steps, sampling, key).replace(event=dp_sgd(noise, steps, sampling, key).event)

    def without_clip(noise, steps, sampling, key):
        return dp_sgd(noise, steps, sampling, key).replace(clip_factors=lambda norms, state: (jnp.ones_like(norms),))

    def one_key(noise, steps, sampling, key):
        return dp_sgd(noise, steps, sampling, jax.random.key(0))

    def same_noise(noise, steps, sampling, key):
        correct = dp_sgd(noise, steps, sampling, key)

        def release(sums, state, params):
            updates, after = correct.release(sums, state._replace(step=jnp.zeros_like(state.step)), params)
            return updates, after._replace(step=state.step + 1)

        return correct.replace(release=release)

    def shuffled(noise, steps, sampling, key):
        return FullBatches(dp_sgd(noise, steps, sampling, key))

    all_data, _, poisson = plans()
    epoch = Plan("one epoch of 20 batches", 20, dpx.PoissonSampling(examples=100, batch_size=5), 0.8, 0)
    once = {"sampling_truth": dpx.ShuffledEpochs(examples=100, batch_size=5), "instead": {"w": jnp.zeros(2)}}
    return [
        ("noise of 2/3 of what the cost counts", all_data, Audit("", too_little_noise), {}),
        ("no clip, a gradient of norm 3", all_data, Audit("", without_clip), {"canary": {"w": jnp.array([3.0, 0.0])}}),
        ("the same noise in every run", all_data, Audit("", one_key), {}),
        ("the same noise at every step", poisson, Audit("", same_noise), {}),
        ("shuffled batches, at the cost of Poisson", epoch, Audit("", shuffled), once),
    ]


def scores_of(plan: Plan, audit: Audit, runs: int, **options: Any):
    """The scores of an audit, and the cost of its mechanism at each delta."""
    import jax
    import jax.numpy as jnp

    import dpx
    from dpx import audit as audits_of

    make = functools.partial(audit.make, plan.noise * audit.noise(plan.steps), plan.steps, plan.sampling)
    params = {"w": jnp.zeros(audit.size)}
    key, options = jax.random.key(SEED), audit.options | options
    scores = audits_of.canary_scores(make, steps=plan.steps, key=key, runs=runs, params=params, **options)
    return scores, [dpx.epsilon(make(key), plan.steps, delta=delta) for delta in DELTAS]


def rows_of_methods(scale: float) -> tuple[list[list[str]], list[list[str]]]:
    """The rows of the table of all methods, and of the table of broken mechanisms."""
    from dpx.audit import lower_bound_from_scores

    rows, wrong = [], []
    every = plans()
    for plan in every:
        for audit in audits():
            start = time.process_time()
            runs = int(scale * plan.runs * (audit.runs if plan is every[0] else min(1.0, audit.runs)))
            scores, costs = scores_of(plan, audit, runs)
            for delta, cost in zip(DELTAS, costs, strict=True):
                bound = lower_bound_from_scores(*scores, delta=delta, cost=cost)
                raw, gaussian = bound.epsilon / cost, bound.gaussian_epsilon / cost
                reason = "" if raw >= LEAST_SHARE else audit.reason or "few runs"
                row = [audit.name, plan.name, f"{delta:g}", f"{bound.runs[0]:,}", f"{cost:.3f}"]
                row += [f"{bound.epsilon:.3f} ({raw:.0%})", f"{bound.gaussian_epsilon:.3f} ({gaussian:.0%})", reason]
                rows.append(row)
                print(*row, f"{time.process_time() - start:.1f} s", sep=" | ", flush=True)
    for name, plan, audit, options in broken():
        scores, costs = scores_of(plan, audit, int(scale * 400_000), **options)
        bounds = [lower_bound_from_scores(*scores, delta=d, cost=b) for d, b in zip(DELTAS, costs, strict=True)]
        found = [(f"{b.cost:.3f}", f"{b.epsilon:.3f}{' **wrong**' if b.exceeds_cost else ''}") for b in bounds]
        wrong.append([name, plan.name, *found[0], *found[1]])
        print(*wrong[-1], sep=" | ", flush=True)
    return rows, wrong


def rows_of_one_run(scale: float) -> list[list[str]]:
    import numpy as np

    from dpx.accounting import gdp
    from dpx.audit import one_run

    canaries, delta, rows = 10_000, 1e-5, []
    for epsilon in (8.0, 2.0):
        for guesses, name in ((None, "six numbers, paid for"), (5000, "5,000"), (7500, "7,500")):
            found = []
            for seed in range(max(1, int(9 * min(1.0, scale)))):
                rng = np.random.default_rng([SEED, seed])
                members = rng.random(canaries) < 0.5
                scores = members + rng.normal(size=canaries) / gdp.mu(epsilon=epsilon, delta=delta)
                bound = one_run(scores, members, delta=delta, guesses=guesses)
                found.append((bound.epsilon, bound.trade_off_epsilon, bound.gaussian_epsilon))
            middle = np.median(np.array(found), axis=0)
            rows.append([f"{epsilon:g}", name, *(f"{value:.2f}" for value in middle)])
            print(*rows[-1], sep=" | ", flush=True)
    return rows


def rows_of_coverage(scale: float) -> list[list[Any]]:
    """How often each bound exceeds the truth, in simulations whose epsilon is known exactly."""
    import numpy as np

    from dpx.accounting import gdp
    from dpx.audit import lower_bound_from_scores, one_run

    repetitions, runs, canaries, delta, mu = max(10, int(REPETITIONS * min(1.0, scale))), 4000, 2000, 1e-3, 1.0
    gaussian = gdp.epsilon(mu, delta=delta)
    response, right = 1.0, 1 / (1 + math.exp(-1.0))  # randomized response: (1, 0)-private, and no bound has slack
    above = np.zeros((2, 5), int)
    for seed in range(repetitions):
        rng = np.random.default_rng([SEED, seed])
        many = lower_bound_from_scores(rng.normal(mu, 1, runs), rng.normal(0, 1, runs), delta=delta)
        members = rng.random(canaries) < 0.5
        one = one_run(mu * members + rng.normal(size=canaries), members, delta=delta)
        bounds = [many.epsilon, many.gaussian_epsilon, one.epsilon, one.trade_off_epsilon, one.gaussian_epsilon]
        above[0] += np.array(bounds) > gaussian
        answers = [rng.random(runs) < p for p in (right, 1 - right)]
        many = lower_bound_from_scores(*answers, delta=1e-12)
        truthful = np.where(rng.random(canaries) < right, members, ~members) + 0.1 * rng.random(canaries)
        one = one_run(truthful, members, delta=1e-12, guesses=canaries // 2)
        above[1] += np.array([many.epsilon, -1, one.epsilon, -1, -1]) > response
    allowed = f"{0.05 + 2 * math.sqrt(0.05 * 0.95 / repetitions):.1%}"
    names = (f"Gaussian scores, epsilon {gaussian:.3f}", f"randomized response, epsilon {response:g}")
    rows = []
    for name, counts in zip(names, above, strict=True):
        shares = [f"{count / repetitions:.1%}" for count in counts]
        if name == names[1]:
            shares = [share if place in (0, 2) else "" for place, share in enumerate(shares)]
        rows.append([name, repetitions, *shares, allowed])
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--runs", type=float, default=1.0, help="the share of the runs")
    options = parser.parse_args()
    timing.pin(options.core)
    start = time.process_time()
    coverage, one = rows_of_coverage(options.runs), rows_of_one_run(options.runs)
    methods, wrong = rows_of_methods(options.runs)
    facts = {"seed": SEED, "CPU_minutes": round((time.process_time() - start) / 60, 1)}
    heading = report.heading(
        "benchmarks.audit", ("jax", "jaxlib", "optax", "scipy"), **report.load(options.core), **facts
    )
    shares = "bounds at confidence 0.95; in brackets their share of the cost; runs are those counted in each world"
    method_columns = ["method", "batches", "delta", "runs", "cost", "raw (proof)", "Gaussian (hypothesis)"]
    method_columns += [f"why the raw bound is below {LEAST_SHARE:.0%}"]
    wrong_columns = ["fault", "batches", "cost at 1e-3", "raw bound", "cost at 1e-5", "raw bound"]
    one_columns = ["true epsilon", "guesses", "raw (proof)", "trade-off (hypothesis)", "Gaussian (hypothesis)"]
    kinds = ["many runs, raw", "many runs, Gaussian", "one run, raw", "one run, trade-off", "one run, Gaussian"]
    coverage_columns = ["scores", "repetitions", *kinds, "5% and two standard deviations"]
    tables = {
        f"All methods ({shares})": report.grid(method_columns, methods),
        "Wrong costs, with DP-SGD's clip norm of 1": report.grid(wrong_columns, wrong),
        "One run with 10,000 canaries of independent Gaussian scores, delta 1e-5, medians of 9 seeds": report.grid(
            one_columns, one
        ),
        "How often a bound at confidence 0.95 is above the truth": report.grid(coverage_columns, coverage),
    }
    notes = [
        "Raw bounds are proofs: if the cost is right, a raw bound exceeds it with a probability of at most 5%. The "
        "others are hypotheses: they hold if the trade-off function is that of two Gaussians, which no count shows. "
        "With Poisson sampling it is another function.",
        "Where the reason is few runs, events of probability delta are too rare in them for a raw bound near the cost; "
        "without sampling, the Gaussian bound, which does not need such events, is near it.",
    ]
    name = "audit" if options.runs >= 1 else "audit_trial"
    report.write(name, heading, tables, notes=notes)


if __name__ == "__main__":
    main()
