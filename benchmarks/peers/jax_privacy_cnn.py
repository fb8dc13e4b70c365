"""jax_privacy in JAX: an execution plan and a loop, as in its examples/dp_logistic_regression.py."""

import dp_accounting
import jax
import optax
from jax_privacy import batch_selection
from jax_privacy.experimental import execution_plan

from benchmarks.peers.data import BATCH_SIZE, CLIP_NORM, DELTA, EPSILON, EXAMPLES, LEARNING_RATE, STEPS, train
from benchmarks.peers.flax_model import accuracy, loss, params

plan = execution_plan.BandMFExecutionPlanConfig.default(
    num_bands=1,
    iterations=STEPS,
    epsilon=EPSILON,
    delta=DELTA,
    l2_clip_norm=CLIP_NORM,
    normalize_by=BATCH_SIZE,
    sampling_prob=BATCH_SIZE / EXAMPLES,
).plan
clipped_grad = plan.clipped_grad(loss, keep_batch_dim=False)
optimizer = optax.adam(LEARNING_RATE)


@jax.jit
def step(params, batch, is_padding_example, noise_state, optimizer_state):
    gradient = clipped_grad(params, batch, is_padding_example=is_padding_example)
    gradient, noise_state = plan.noise_addition_transform.update(gradient, noise_state)
    updates, optimizer_state = optimizer.update(gradient, optimizer_state)
    return optax.apply_updates(params, updates), noise_state, optimizer_state


noise_state, optimizer_state = plan.noise_addition_transform.init(params), optimizer.init(params)
for drawn in plan.batch_selection_strategy.batch_iterator(EXAMPLES):
    rows = batch_selection.pad_to_multiple_of(drawn, 32)
    batch = train[0][rows], train[1][rows]
    params, noise_state, optimizer_state = step(params, batch, rows == -1, noise_state, optimizer_state)
accountant = dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
epsilon = accountant.compose(plan.dp_event).get_epsilon(DELTA)
print(f"accuracy {accuracy(params):.3f}, epsilon {epsilon:.3f}")
