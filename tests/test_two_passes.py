"""Two backward passes: the numbers of one, no records of layers in bodies, and no contribution above its norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.gradients.clipped_gradients import choose_microbatches
from dpx.gradients.ghost import hooks
from dpx.gradients.ghost.plan import GhostPlan
from dpx.sums.rounding import FloatPair
from dpx.xla.jaxprs import walk_equations
from dpx.xla.place import Place, tracing_for_place
from tests import test_ghost_scans
from tests.ghost import QUICK, assert_same, key, mechanism, noiseless, normal
from tests.test_ghost import two_factors

BODIES = [
    "stack",
    "stack_of_few_positions",
    "stack_of_many_positions",
    "stack_unrolled",
    "stack_in_two_halves",
    "stacks_with_biases_and_data",
    "stack_of_tables",
    "scan_in_a_scan",
    "shared_by_iterations",
    "remat_in_a_scan",
    "remat_of_a_tied_weight",
    "dropout_in_a_scan_with_remat",
    "linen_scan_in_bfloat16",
    "linen_remat_scan",
    "mixture_of_experts",
    "functions_of_the_slices_of_a_stack",
]


def step(loss, params, made=None, **options):
    made = made or mechanism()
    step = dpx.private_updates(loss, made, norms="ghost", **options)
    return lambda params, batch, included=None: step(params, dpx.Batch(batch, included), made.init(params))


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.long_cases(
    "dropout_in_a_scan_with_remat",
    "linen_",
    "mixture_of_experts",
    "stack_in_two_halves",
    "stack_of_many_positions",
    "stack_unrolled",
    "scan_in_a_scan",
    "stacks_with_biases",
    "stack_of_tables",
    "remat_",
)
def test_the_numbers_of_one_pass(name):
    make, _, tolerance = test_ghost_scans.ZOO[name]
    loss, params, batch = make()
    included = np.arange(test_ghost_scans.SIZE) != 1
    one, two = (
        jax.jit(step(loss, params, backward_passes=passes), compiler_options=QUICK)(params, batch, included)
        for passes in (1, 2)
    )
    assert_same(two.updates, one.updates, tolerance)
    for name in ("losses", "norms"):
        np.testing.assert_allclose(getattr(two.unreleased, name), getattr(one.unreleased, name), rtol=1e-3)


def layers(params, x):
    def layer(x, p):
        return x + jnp.tanh(x @ p["w"] + p["b"][None]), None

    return jnp.sum(jnp.sin(jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, params)[0]))


LAYERS, WIDTH, POSITIONS, BATCH = 5, 6, 7, 4
PARAMS = {"w": 0.3 * normal(1, LAYERS, WIDTH, WIDTH), "b": 0.1 * normal(2, LAYERS, WIDTH)}
ROWS = normal(3, BATCH, POSITIONS, WIDTH)
GIVEN = PARAMS, mechanism().init(PARAMS), (ROWS,)


KEPT = 3


def stacked(passes, loss=layers, params=PARAMS, **options):
    """How many arrays of the program have the numbers of all layers, examples and positions."""
    made = jax.make_jaxpr(step(loss, params, backward_passes=passes, **options))(params, ROWS)
    results = [
        v.aval for equation in walk_equations(made.jaxpr) if equation.primitive.name == "scan" for v in equation.outvars
    ]
    return sum(aval.size == LAYERS * BATCH * POSITIONS * WIDTH for aval in results)


def test_keeps_the_carries_alone():
    """What `jax.checkpoint` keeps of each layer, in each pass; with one pass also the layer's input and cotangent."""
    assert stacked(1) == KEPT and stacked(2) == 2


def test_the_memory_decides_how_many_passes_there_are():
    """Two where one pass over the fewest examples would not fit in half of it; the sums are the same."""
    plan, cost = dpx.private_updates(layers, mechanism(), norms="ghost").row_sum.plan_and_cost(*GIVEN)

    def chosen(memory, **options):
        return choose_microbatches(cost, plan, PARAMS, BATCH, Place("cpu", 1, memory=memory), **options)

    (smallest,) = [m for m in range(1, 5000) if (chosen(m).passes, chosen(m + 1).passes) == (2, 1)]
    assert chosen(smallest + 1)[:2] == (1, "all 4 would not fit in half of the device's memory")
    assert chosen(None).passes == chosen(BATCH * (smallest + 1)).passes == 1 < chosen(smallest).size
    assert [chosen(BATCH * smallest, microbatch_size=size).passes for size in (BATCH - 1, BATCH, 100)] == [1, 2, 2]
    assert chosen(1, backward_passes=1).passes == 1 and chosen(None, backward_passes=2).passes == 2
    said = "two backward passes: one pass over one example would not fit in half of the device's memory"
    expected = step(layers, PARAMS)(PARAMS, ROWS)
    with tracing_for_place(memory=smallest):
        assert said in str(dpx.explain_norms(layers, mechanism(), PARAMS, dpx.Batch(ROWS, None), norms="ghost"))
        assert_same(step(layers, PARAMS)(PARAMS, ROWS).updates, expected.updates)
        assert [stacked(passes, microbatch_size=BATCH) for passes in (None, 2, 1)] == [2, 2, KEPT]


def test_what_a_scan_keeps_of_its_layers_decides_what_fits():
    """Inputs and cotangents, of which a scan of products writes nothing else."""

    def products(params, x):
        return jnp.sum(jnp.sin(jax.lax.scan(lambda x, w: (x @ w, None), x, params["w"])[0]))

    params, rows, of_example = {"w": normal(1, 3, 20, 20)}, normal(2, BATCH, 2, 20), 4 * 3 * 2 * (20 + 20)
    given = params, mechanism().init(params), (rows,)
    plan, cost = dpx.private_updates(products, mechanism(), norms="ghost").row_sum.plan_and_cost(*given)
    places = (Place("cpu", 1, memory=2 * BATCH * of_example - less) for less in (0, 1))
    assert [choose_microbatches(cost, plan, params, BATCH, place).size for place in places] == [BATCH, 2]
    assert 4 * plan.count_captured_elements() == of_example and plan.count_captured_elements({0}) == 0


def test_one_pass_where_two_would_save_nothing():
    """A mask of the mechanism needs the layers' records."""
    masked = dpx.coordinates.random_freeze(freeze_rate=0.4, every=1, key=key(3))
    made = dpx.in_coordinates(mechanism(), masked)
    with tracing_for_place(memory=1):
        said = dpx.explain_norms(layers, made, PARAMS, dpx.Batch(ROWS, None), norms="ghost")
    assert said.microbatches.startswith("microbatches of 1") and not said.backward_passes


@pytest.mark.long
def test_small_gradients_are_taken_in_one_pass(monkeypatch):
    """On several devices, a low-rank layer keeps its gradients, and neither an input nor a cotangent."""

    def loss(params, x):
        def layer(x, p):
            return x + jnp.tanh(x @ p["a"]) @ p["b"], None

        return jnp.sum(jnp.sin(jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, params)[0]))

    params = {"a": 0.3 * normal(1, LAYERS, WIDTH, 2), "b": 0.3 * normal(2, LAYERS, 2, WIDTH)}
    expected = step(loss, params)(params, ROWS)
    assert stacked(1, loss, params) == KEPT and stacked(2, loss, params) == 1
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    assert stacked(1, loss, params) == 1
    assert_same(step(loss, params)(params, ROWS).updates, expected.updates)


def test_broken_rows_and_microbatches():
    rows = ROWS.at[2].set(jnp.nan)
    included = np.array([True, True, False, True])
    expected = step(layers, PARAMS)(PARAMS, rows, included)
    for size in (None, 2):
        found = jax.jit(step(layers, PARAMS, backward_passes=2, microbatch_size=size))(PARAMS, rows, included)
        assert_same(found.updates, expected.updates)


INPUTS = normal(4, BATCH, POSITIONS, WIDTH)


@pytest.mark.parametrize("name", ["groups", "mask", "two factors"])
def test_every_mechanism_gives_the_same_sums(name):
    masked = dpx.coordinates.random_freeze(freeze_rate=0.4, every=1, key=key(3))
    made = {
        "groups": mechanism({"w": 0.1, "b": 0.2}),
        "mask": noiseless(dpx.in_coordinates(mechanism(), masked)),
        "two factors": two_factors(mechanism()),
    }[name]
    one, two = (step(layers, PARAMS, made, backward_passes=passes)(PARAMS, ROWS) for passes in (1, 2))
    assert_same(two.updates, one.updates)
    assert len(two.updates) == (2 if name == "two factors" else 1)


def sums_after(norms, inputs=INPUTS):
    """How long each example's contribution to a layer's weights is in a second pass, if the first found these norms."""
    cotangents = normal(5, BATCH, POSITIONS, WIDTH)
    plan = _plan()
    ((equation, choices),) = [
        item for item in hooks.hooked_equations(plan, 2)[1].items() if any(part[0] == 1 for part in item[1])
    ]
    leaves = jax.tree.leaves(PARAMS)
    (part,) = choices
    given = {part: jnp.broadcast_to(norms, (LAYERS, BATCH))}
    factors = {part[0]: [jnp.ones(BATCH)]}
    tap = hooks.make_sum_hooks(plan, {equation: choices}, leaves, given, factors)[equation]
    of_one = jax.tree.map(lambda x: x[0], tap.given)

    def of(row):
        some = [jnp.where((jnp.arange(BATCH) == row)[:, None, None], x, 0) for x in (inputs, cotangents)]
        (total,) = tap.compute(((some[0], None), some[1]), of_one)[part]
        assert isinstance(total, FloatPair)
        return np.linalg.norm(np.asarray(total.high, np.float64))

    return [of(row) for row in range(BATCH)]


def _plan() -> GhostPlan:
    plan, _ = dpx.private_updates(layers, mechanism(), norms="ghost").row_sum.plan_and_cost(*GIVEN)
    assert isinstance(plan, GhostPlan)
    return plan


def test_no_contribution_is_longer_than_in_the_first_pass():
    alone = sums_after(jnp.full(BATCH, 2.0**60))
    for share in (0.999, 0.5, 1e-6, 0.0):
        norms = share * np.asarray(alone)
        found = sums_after(jnp.asarray(norms, jnp.float32))
        assert np.all(found <= norms) and np.all(found >= 0.99 * norms)


@pytest.mark.parametrize("broken", [jnp.nan, jnp.inf, 2.0**70])
def test_what_leaves_the_range_in_the_second_pass_adds_nothing(broken):
    found = sums_after(jnp.full(BATCH, 2.0**60), INPUTS.at[1, 2, 3].set(broken))
    assert found[1] == 0 and min(found[0], *found[2:]) > 0


@pytest.mark.parametrize("norms", ["vmap", "auto"])
def test_refuses_what_has_one_pass(norms):
    with pytest.raises(ValueError, match="backward_passes must be 1, 2 or None"):
        dpx.private_updates(layers, mechanism(), norms=norms, backward_passes=2 if norms == "vmap" else 3)


@pytest.mark.parametrize("positions", [1, 3])
def test_half_precision_is_the_same_in_norms_and_sums(positions):
    """XLA may leave out a rounding to half precision where one consumer wants float32 again, also inside of a scan."""

    def loss(params, x):
        def layer(x, w):
            y = x @ w.astype(x.dtype)
            return x + jnp.tanh((y * jax.nn.sigmoid(y)).astype(jnp.float32)).astype(x.dtype), None

        result, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, params["w"])
        return jnp.sum(jnp.sin(result.astype(jnp.float32)))

    params, rows = {"w": PARAMS["w"]}, normal(3, 16, positions, WIDTH).astype(jnp.bfloat16)
    made = jax.jit(step(loss, params, backward_passes=2))
    for row in range(len(rows)):
        (total,) = jax.tree.leaves(made(params, rows, np.arange(len(rows)) == row).updates)
        assert 0.999e-3 <= np.linalg.norm(np.asarray(total, np.float64)) <= 1e-3
