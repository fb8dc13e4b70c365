"""Computes the clipped sum of a batch by a plan: a backward pass, norms, clip factors, weighted sums."""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from dpx.gradients.ghost import interpreter, kernels
from dpx.gradients.ghost.hooks import (
    EXAMPLES,
    BackwardHook,
    CapturedArrays,
    Part,
    compute_tied_gradients,
    convolutions_of_small_data,
    equations_of_tied_tables,
    hooked_equations,
    hooks_take_gradients,
    join_part_sums,
    make_capture_hooks,
    make_gradient_hooks,
    make_norm_hooks,
    make_sum_hooks,
    merge_captured,
    norm_of_parts,
    part_norm,
    part_sum,
    replace_captured,
    round_captured,
)
from dpx.gradients.ghost.plan import GhostPlan
from dpx.gradients.ghost.program import assemble_parts
from dpx.mechanism import Mechanism
from dpx.sums.clipped_sum import norms_in_range, zero_excluded
from dpx.sums.rounding import FloatPair, pair_of_trees
from dpx.values import Tree
from dpx.xla.ordering import compute_after, compute_after_each, opaque_false
from dpx.xla.place import current_place
from dpx.xla.rewrites import with_fast_products, with_uninitialized_stacks


def sum_by_plan(
    plan: GhostPlan,
    mechanism: Mechanism,
    params: Tree,
    examples: Tree,
    state: Tree,
    included: jax.Array,
    *,
    backward_passes: int = 1,
    apart: Callable[[Callable], Callable] = lambda function: function,
) -> tuple[tuple[FloatPair, ...], tuple[jax.Array, Tree, Tree]]:
    """Computes sum_i f(|z_i|) z_i for each factor f, as in `dpx.sums.clipped_sum.sum_contributions`.

    params: arrays. examples: arrays with the B examples on axis 0. state: the mechanism's. included: bool (B,).
    backward_passes: int, 2 to keep no inputs and cotangents of layers in scans and checkpoints: see `hooks`.
    apart: `xla.rows_apart.with_rows_apart`, if the function of one example needs it under `jax.vmap`.
    Returns one `FloatPair` for each factor, like the encoded gradient of one example; and, for each example, the
    losses, (B,), the norms, float32 (B,) in each leaf, and the auxiliary results of the loss.
    """
    leaves = jax.tree.leaves(params)
    reads = frozenset(number for site in plan.sites for number in site.reads)
    values = interpreter.compute_public_values(plan.program, leaves, reads)
    scales = _coordinate_scales(plan, mechanism, params, state, values)
    once, twice = hooked_equations(plan, backward_passes)
    take_kept = make_gradient_hooks if hooks_take_gradients() else functools.partial(make_norm_hooks, keep=True)
    hooks = take_kept(plan, once, included.shape[0]) | make_norm_hooks(plan, twice, included.shape[0], keep=False)
    hooks |= make_capture_hooks(plan, hooks, included.shape[0])
    losses, aux, captured, found = _backward_pass(plan, leaves, examples, hooks, apart)
    captured = replace_captured(plan, merge_captured(plan, once, captured, found), values)
    captured = round_captured(compute_tied_gradients(plan, captured))
    rest = plan.program, leaves, scales
    backwards = [(kernels.gradients_through_kernels(group, *rest), keep) for group, keep in plan.kernel_groups]
    leaf_norms, captured = _norms_by_leaf(plan, leaves, captured, scales, found, backwards)
    norms, factors = _norms_and_factors(plan, mechanism, leaf_norms, state, included.shape[0])
    included &= norms_in_range(norms)
    of_leaves = [_factors_of_leaves(plan, factor, included) for factor in factors]
    sums: tuple[dict[Part, FloatPair], ...] = ()
    without = frozenset(part for choices in twice.values() for part in choices)
    for factor in of_leaves:
        factor = compute_after(sums, factor)  # so that only one set of weighted cotangents is in memory
        sums += (_weighted_sums(plan, leaves, captured, factor, scales, without, backwards),)
    if twice:
        by_leaf = {encoded.leaf: [f[encoded.leaf] for f in of_leaves] for encoded in plan.encoded}
        of_first = {part: norms for part, (_, norms) in found.items()}
        make_hooks = functools.partial(make_sum_hooks, plan, twice, leaves, of_first, by_leaf)
        before = [total for of_factor in sums for total in of_factor.values()]
        for part, totals in _second_pass(plan, leaves, examples, make_hooks, included, before, apart).items():
            for of_factor, total in zip(sums, totals, strict=True):
                of_factor[part] = total
    return tuple(_join_parts_of_leaves(plan, leaves, of_factor) for of_factor in sums), (losses, norms, aux)


def _second_pass(
    plan: GhostPlan,
    leaves,
    examples: Tree,
    make_hooks: Callable,
    included: jax.Array,
    made: list[FloatPair],
    apart: Callable,
) -> dict[Part, Any]:
    """Computes the hooks' sums in a second backward pass. It runs after `included`, which needs all norms, and after
    the sums in `made`. The pass is a branch of a conditional whose other branch is never taken, whatever the data.
    Otherwise XLA would keep what both passes share, such as the initial zeros of a scan, in memory between them."""
    first = compute_after_each(made, included.astype(jnp.float32))

    def find():
        return _backward_pass(plan, leaves, examples, make_hooks(), apart, only_hooks=True)[-1]

    def slots():
        return {part: slot for hook in make_hooks().values() for part, slot in hook.slot.items()}

    return jax.lax.cond(opaque_false(first), slots, find)


def _backward_pass(
    plan: GhostPlan,
    leaves: list[jax.Array],
    examples: Tree,
    hooks: dict[int, BackwardHook],
    apart: Callable,
    *,
    only_hooks: bool = False,
) -> tuple[jax.Array, Tree, CapturedArrays, dict[Part, Any]]:
    """Runs one backward pass. Returns the losses, (B,), their auxiliary results, what was captured, and what the hooks
    computed. only_hooks: capture nothing else."""
    pieces = {leaf: plan.choices[leaf][0].pieces for leaf in plan.differentiated_leaves if not only_hooks}
    differentiated = {leaf: leaves[leaf] for leaf in pieces if not pieces[leaf]}
    sliced = [equation for of_leaf in pieces.values() for _, equations in of_leaf for equation in equations]
    kept = [] if only_hooks else [site.use.equation for site in plan.sites if site.use.equation not in hooks]
    products = {} if only_hooks else plan.product_shapes
    outputs = {n: plan.program.output_shape(n) for n in [*kept, *sliced] if n not in products}
    outputs |= products
    exact = {*sliced, *equations_of_tied_tables(plan)}
    fixed = {number: leaf for number, leaf in enumerate(leaves) if number not in differentiated}
    instruments = interpreter.InterpreterHooks(
        plan.unread_operands | {equation: {0} for equation in sliced},
        {equation: hook.attach_to_output for equation, hook in hooks.items()},
        interpreter.slice_starts(plan.program, fixed),
        interpreter.cotangents_to_compute_once(plan.program, kept),
        frozenset(products),
        frozenset(exact | convolutions_of_small_data(plan, len(jax.tree.leaves(examples)[0]))),
    )

    def assemble_sliced_gradient(leaf, cotangents):
        """Assembles a parameter's gradient from its slices; otherwise each would be padded to full size and added."""
        found = [
            functools.reduce(jnp.add, [cotangents[n].astype(jnp.float32) for n in each]) for _, each in pieces[leaf]
        ]
        return assemble_parts([view for view, _ in pieces[leaf]], found, leaves[leaf].shape)

    def of_one_example(example):
        def loss(differentiated, added):
            of_params = (differentiated.get(number, leaf) for number, leaf in enumerate(leaves))
            inputs = [*of_params, *jax.tree.leaves(example)]
            results, seen = interpreter.run_block(plan.program, instruments, plan.program.block, inputs, added)
            return results[0], (jax.tree.unflatten(plan.program.aux, results[1:]), seen)

        added: dict[int, Any] = {equation: hook.added for equation, hook in hooks.items()}
        zeros = jax.tree.map(lambda output: jnp.zeros(output.shape, output.dtype), outputs)
        stored = current_place().matrix_unit.round_to_store
        added |= {
            equation: zero if equation in exact else jax.tree.map(stored, zero) for equation, zero in zeros.items()
        }
        value, pullback, (aux, inputs) = jax.vjp(loss, differentiated, added, has_aux=True)
        grads, cotangents = pullback(jnp.ones_like(value))
        gradients = {(leaf, 0): grad.astype(jnp.float32) for leaf, grad in grads.items()}
        gradients |= {(leaf, 0): assemble_sliced_gradient(leaf, cotangents) for leaf in pieces if pieces[leaf]}
        found = {part: sums for equation in hooks for part, sums in cotangents[equation][0].items()}
        inputs, cotangents = ({n: array[n] for n in axis} for array in (inputs, cotangents))
        return value, aux, CapturedArrays(gradients, inputs, cotangents), found

    axis: Any = {equation: len(plan.program.equations[equation].counts) for equation in kept}
    axes = (0, 0, CapturedArrays(cast(Any, 0), axis, axis), None)
    of_all: Callable = jax.vmap(apart(of_one_example), out_axes=axes, axis_name=EXAMPLES)
    if current_place().platform == "cpu" and any(leaf.ndim > 1 for leaf in differentiated.values()):
        of_all = with_fast_products(of_all)
    of_all = with_uninitialized_stacks(of_all) if hooks_take_gradients() else of_all
    losses, aux, captured, found = of_all(examples)
    return losses, aux, captured, found


KernelPasses = list[tuple[kernels.GradientsThroughKernels, bool]]  # of each group, and whether to keep gradients


def _norms_by_leaf(
    plan: GhostPlan,
    leaves: list[jax.Array],
    captured: CapturedArrays,
    scales: dict[Part, jax.Array],
    found: dict,
    backwards: KernelPasses,
):
    """Returns the norms of the parameters' per-example gradients, float32 (B,), by leaf, and `captured` with the kept
    gradients. found: kept gradients, (..., B, ...), and norms, (..., B), of the parts with hooks."""
    norms, gradients = {}, {}
    of_part = _share_traces(plan, leaves, scales, lambda choice, shape, *of: part_norm(choice, *of))
    for backward, keep in backwards:
        first, *_ = of_group = backward.made.leaves
        records = captured.captured_arrays(first, 0, plan.choices[first][0])
        gradients[first, 0], of_leaves = kernels.measure_gradients(backward, records, keep=keep)
        norms |= dict(zip(of_group, of_leaves, strict=True))
    for leaf in (*plan.followed_leaves, *plan.differentiated_leaves):
        if leaf in norms:
            continue
        of_parts = []
        for number in range(len(plan.choices[leaf])):
            if (leaf, number) in found:
                kept, of_slices = found[leaf, number]
                norm = norm_of_parts(of_slices.reshape(-1, of_slices.shape[-1]))
            else:
                kept, norm = of_part(leaf, number)(captured.captured_arrays(leaf, number, plan.choices[leaf][number]))
            of_parts.append(norm)
            if kept is not None:
                gradients[leaf, number] = kept
        norms[leaf] = norm_of_parts(jnp.stack(of_parts)) if len(of_parts) > 1 else of_parts[0]
    return norms, captured._replace(gradients=captured.gradients | gradients)


def _share_traces(plan: GhostPlan, leaves: list[jax.Array], scales: dict[Part, jax.Array], function: Callable):
    """Maps a part to `function(choice, shape, scale, ...)`. Parts with equal `program_key`s share one trace."""
    programs: dict[tuple, Callable] = {}

    def of_part(leaf: int, number: int) -> Callable:
        choice = plan.choices[leaf][number]
        shape, scale = choice.view.shape_at_use(leaves[leaf].shape), scales.get((leaf, number))
        if scale is not None:
            return functools.partial(function, choice, shape, scale)
        key, of_batch = plan.program_key(choice, shape), functools.partial(function, choice, shape, None)
        return of_batch if key is None else programs.setdefault(key, jax.jit(of_batch))

    return of_part


def _norms_and_factors(plan: GhostPlan, mechanism: Mechanism, norms: dict[int, jax.Array], state: Tree, size: int):
    """The mechanism's norms and factors, each a tree of float32 (B,), from the norms of the leaves."""

    def of_one_example(norms):
        leaf_norms = [norms.get(encoded.leaf, jnp.float32(0)) for encoded in plan.encoded]
        whole = mechanism.norm(jax.tree.unflatten(plan.structure, leaf_norms))
        return whole, mechanism.clip_factors(whole, state)

    return jax.vmap(of_one_example, axis_size=size)(norms)


def _factors_of_leaves(plan: GhostPlan, factor: Tree, included: jax.Array) -> dict[int, jax.Array]:
    """Gives each leaf the factor of its group, float32 (B,), which is 0 for examples that are not included."""
    groups = jax.tree.unflatten(plan.structure, [encoded.leaf for encoded in plan.encoded])
    factor = jax.tree.map(lambda f: zero_excluded(f, included), factor)
    spread = jax.tree.map(lambda f, group: jax.tree.map(lambda _: f, group), factor, groups)
    return dict(zip(jax.tree.leaves(groups), jax.tree.leaves(spread), strict=True))


def _weighted_sums(
    plan: GhostPlan,
    leaves,
    captured: CapturedArrays,
    factor: dict[int, jax.Array],
    scales,
    without: frozenset[Part],
    backwards: KernelPasses,
) -> dict[Part, FloatPair]:
    """Computes sum_i f_i z_i for one factor f from what was captured, by part of a parameter, but not for the parts in
    `without`. On several devices, parts outside scans come last, because a device may hold a whole sum before it is
    sharded, and the sum of an embedding is large."""
    sums, of_part = {}, _share_traces(plan, leaves, scales, part_sum)
    for backward, keep in backwards:
        of_group = backward.made.leaves
        kept, factors = captured.gradients[of_group[0], 0], [factor[leaf] for leaf in of_group]
        found = kernels.sum_kernel_gradients(backward, kept, factors, keep=keep)
        sums.update(zip(((leaf, 0) for leaf in of_group), found, strict=True))
    wanted = [(one.leaf, number) for one in plan.encoded for number in range(len(plan.choices[one.leaf]))]
    wanted = [part for part in wanted if part not in without and part not in sums]
    stacked = [part for part in wanted if plan.choices[part[0]][part[1]].view.slice_counts]
    for leaf, number in [*stacked, *(part for part in wanted if part not in stacked)]:
        of_leaf = factor[leaf]
        if current_place().devices > 1 and (leaf, number) not in stacked:
            of_leaf = compute_after_each([sums[part] for part in stacked], of_leaf)
        arrays = captured.captured_arrays(leaf, number, plan.choices[leaf][number])
        sums[leaf, number] = of_part(leaf, number)(arrays, of_leaf)
    return sums


def _join_parts_of_leaves(plan: GhostPlan, leaves: list[jax.Array], sums: dict[Part, FloatPair]) -> FloatPair:

    def of_leaf(leaf):
        choices = plan.choices[leaf]
        totals = [sums[leaf, number] for number in range(len(choices))]
        return join_part_sums([choice.view for choice in choices], totals, leaves[leaf].shape)

    return pair_of_trees(jax.tree.unflatten(plan.structure, [of_leaf(encoded.leaf) for encoded in plan.encoded]))


def _coordinate_scales(
    plan: GhostPlan, mechanism: Mechanism, params: Tree, state: Tree, values
) -> dict[Part, jax.Array]:
    """The factors of all coordinates, float32, by part: the mechanism's scale times the slopes of the kernel that the
    loss makes from the part. values: public values, by index."""
    scales: dict[Part, jax.Array] = {}
    choices = plan.part_choices
    if any(encoded.scaled for encoded in plan.encoded):
        ones = jax.tree.map(lambda p: jnp.ones(p.shape, jnp.float32), params)
        found = zip(plan.encoded, jax.tree.leaves(mechanism.encode(ones, state)), strict=True)
        of_leaf = {encoded.leaf: scale for encoded, scale in found if encoded.scaled}
        scales = {part: one.view.apply_steps(of_leaf[part[0]]) for part, one in choices.items() if part[0] in of_leaf}
    for part, choice in choices.items():
        for slopes in (site.slopes(values) for site in choice.uses.sites if site.slopes):  # at most one: see the plan
            scales[part] = scales.get(part, 1) * jnp.broadcast_to(slopes, (*choice.view.slice_counts, *slopes.shape))
    return scales
