"""jax_privacy's trainer, which only its repository has: `training.DPTrainer`, as its docs show it."""

import dp_accounting
import optax
from jax_privacy import execution_plan, training  # pyrefly: ignore

from benchmarks.peers.data import BATCH_SIZE, CLIP_NORM, DELTA, EPSILON, EXAMPLES, LEARNING_RATE, STEPS, train
from benchmarks.peers.flax_model import accuracy, loss, params

config = execution_plan.BandMFConfig.default(
    num_bands=1,
    iterations=STEPS,
    expected_participations=STEPS * BATCH_SIZE / EXAMPLES,
    l2_clip_norm=CLIP_NORM,
    normalize_by=BATCH_SIZE,
).calibrate(epsilon=EPSILON, delta=DELTA)
trainer = training.DPTrainer(
    config=config,
    performance_flags=execution_plan.PerformanceFlags(keep_batch_dim=False),
    loss_fn=lambda params, data, prng: (loss(params, data), ()),
    optimizer=optax.adam(LEARNING_RATE),
)
state = trainer.fit(train, params)
accountant = dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
epsilon = accountant.compose(trainer.plan.dp_event).get_epsilon(DELTA)
print(f"accuracy {accuracy(state.params):.3f}, epsilon {epsilon:.3f}")
