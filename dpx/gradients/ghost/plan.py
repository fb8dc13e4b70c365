"""Which way every parameter's norm and sum are had, decided while tracing from shapes alone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from dpx.gradients.ghost import rules, shared, trace
from dpx.mechanism import Mechanism

Tree = Any

# What things cost in floating-point operations of a large product, measured on a CPU core.
BYTE = 12.0  # moving a byte of fresh memory
GRAM = 4.0  # an operation of a Gram matrix: they are small
GRADIENT = 1.1  # an operation of a per-example gradient: dense layers,
GRADIENT_CONVOLUTION = 4.0  # and convolutions, which become grouped ones

METHODS = {
    "outer": "norm from |a| |b|",
    "gram": "norm from Gram matrices",
    "product": "per-example product, kept for the sum",
    "rows": "norm from the rows used",
    "shared": "norm from Gram matrices of all its uses",
    "gradient": "per-example gradients",
    "unused": "has no gradient",
    "dropped": "not trained",
}


class Encoded(NamedTuple):
    """One leaf of what the mechanism's `encode` gives: parameter leaf `leaf`, unchanged or scaled."""

    leaf: int
    scaled: bool


class Choice(NamedTuple):
    """sites: where the parameter is used, if it is followed; sharing: how several of them meet."""

    method: str
    reason: str = ""
    sites: tuple[rules.Site, ...] = ()
    sharing: shared.Sharing | None = None


class Plan(NamedTuple):
    program: trace.Program
    choices: tuple[Choice, ...]  # per parameter leaf
    encoded: tuple[Encoded, ...]
    structure: Any  # the treedef of what `encode` gives

    @property
    def follows(self) -> bool:
        """Whether any parameter takes another way than per-example gradients."""
        return any(choice.sites for choice in self.choices)


def make_plan(
    loss: Callable, mechanism: Mechanism, params: Tree, example: Tree, state: Tree, *, force: bool
) -> Plan | str:
    """The plan, or why the mechanism needs whole per-example gradients. force: follow whatever can be, at any cost."""
    if not mechanism.supports_ghost_norms:
        return "the mechanism's coordinates mix the coordinates of a gradient"
    found = _encoded(mechanism, params, state)
    if isinstance(found, str):
        return found
    encoded, structure = found
    program, weights = trace.trace(loss, params, example), jax.tree.leaves(params)
    scaled = {part.leaf: part.scaled for part in encoded}

    def choose(leaf, uses):
        if leaf not in scaled:
            return Choice("dropped")
        if not uses:
            return Choice("unused")
        sites = []
        for use in uses:
            site = rules.recognize(use, program.equations)
            if isinstance(site, str):
                return Choice("gradient", site)
            sites.append(site)
        if len(sites) == 1:
            return cheapest(sites[0], scaled=scaled[leaf], force=force)
        if scaled[leaf]:
            return Choice("gradient", f"used {len(uses)} times, under a mask or a scale")
        return several(tuple(sites), weights[leaf].shape, force=force)

    choices = tuple(choose(leaf, uses) for leaf, uses in enumerate(program.uses))
    if not trace.differentiates(program, weights + jax.tree.leaves(example)):
        return "a custom derivative closes over values of the loss"
    return Plan(program, choices, encoded, structure)


def cheapest(site: rules.Site, *, scaled: bool, force: bool) -> Choice:
    costs = estimate(site, scaled=scaled)
    if force:
        costs.pop("gradient")
    method = min(costs, key=lambda name: costs[name])
    if method == "gradient":
        return Choice("gradient", "cheaper than following it")
    return Choice(method, sites=(site,))


def several(sites: tuple[rules.Site, ...], shape: tuple[int, ...], *, force: bool) -> Choice:
    """For a parameter used more than once."""
    sharing = shared.find_sharing(sites, shape)
    if isinstance(sharing, str):
        return Choice("gradient", sharing)
    sums = sum(2.0 * site.sizes[1] * (site.sizes[3] if site.lookup else _weight(site)) for site in sites)
    gradient = sum(estimate(site, scaled=False)["gradient"] for site in sites)
    if not force and gradient < shared.cost(sharing, GRAM) + sums:
        return Choice("gradient", "cheaper than following it")
    return Choice("shared", sites=sites, sharing=sharing)


def _weight(site: rules.Site) -> int:
    groups, _, fan_in, fan_out = site.sizes
    return groups * fan_in * fan_out


def estimate(site: rules.Site, *, scaled: bool) -> dict[str, float]:
    """The cost for one example of each way that is right for this site: norm and sum, in floating-point operations."""
    groups, positions, fan_in, fan_out = site.sizes
    weight = _weight(site)
    once = 2.0 * positions * weight  # the gradient, or its sum over the examples
    stored = 3 * 4 * BYTE * weight  # a per-example gradient written, read for the norm, read for the sum
    if site.lookup:
        width = positions * fan_out
        return {"rows": 2.0 * positions * width + 4 * BYTE * 2 * width, "gradient": stored}
    again = GRADIENT_CONVOLUTION if site.expands else GRADIENT
    costs = {"gradient": again * once + stored}
    if positions == 1:
        costs["outer"] = once + (weight if scaled else groups * (fan_in + fan_out)) * 2.0
    if not scaled:
        squares = groups * positions * positions
        costs["gram"] = 2.0 * GRAM * squares * (fan_in + fan_out) + 4 * BYTE * (2 * squares + site.expands) + once
    if site.expands or positions > 1:
        costs["product"] = once + stored + 4 * BYTE * site.expands
    return costs


def _encoded(mechanism: Mechanism, params: Tree, state: Tree) -> tuple[tuple[Encoded, ...], Any] | str:
    """What `encode` makes of every leaf, read from its equations."""
    grad = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
    closed, out = jax.make_jaxpr(mechanism.encode, return_shape=True)(grad, state)
    leaves = len(jax.tree.leaves(grad))
    depends = {var: {leaf} for leaf, var in enumerate(closed.jaxpr.invars[:leaves])}
    for equation in closed.jaxpr.eqns:
        of = set().union(*(depends.get(v, set()) for v in equation.invars if not isinstance(v, core.Literal)))
        depends.update(dict.fromkeys(equation.outvars, of))
    encoded = []
    for var, out_shape in zip(closed.jaxpr.outvars, map(jnp.shape, jax.tree.leaves(out)), strict=True):
        of = set() if isinstance(var, core.Literal) else depends.get(var, set())
        if len(of) != 1:
            return "a coordinate of the mechanism is not one parameter's"
        (leaf,) = of
        source: Any = closed.jaxpr.invars[leaf]
        if out_shape != source.aval.shape:
            return "a coordinate of the mechanism has another shape than its parameter"
        encoded.append(Encoded(leaf, scaled=var is not source))
    if len({part.leaf for part in encoded}) != len(encoded):
        return "a parameter has several coordinates in the mechanism"
    return tuple(encoded), jax.tree.structure(out)


class Explanation(NamedTuple):
    """rows: (parameter, way, reason) for every parameter; `str` is a table of them."""

    rows: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        widths = [max(len(row[i]) for row in self.rows) for i in range(2)]
        return "\n".join(f"{name:{widths[0]}}  {way:{widths[1]}}  {why}".rstrip() for name, way, why in self.rows)


def explain(plan: Plan | str, params: Tree) -> Explanation:
    """The plan in words, a row for every parameter; a plan that is only a reason means the same for all."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    choices = [Choice("gradient", plan)] * len(paths) if isinstance(plan, str) else plan.choices
    return Explanation(
        tuple((path, METHODS[choice.method], choice.reason) for path, choice in zip(paths, choices, strict=True))
    )
