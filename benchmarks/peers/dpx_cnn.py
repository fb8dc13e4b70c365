"""dpx: `dpx.fit`."""

import optax

import dpx
from benchmarks.peers.data import BATCH_SIZE, CLIP_NORM, DELTA, EPSILON, EXAMPLES, LEARNING_RATE, STEPS, train
from benchmarks.peers.flax_model import accuracy, loss, params

budget = dpx.Budget(epsilon=EPSILON, delta=DELTA, steps=STEPS)
sampling = dpx.PoissonSampling(examples=EXAMPLES, batch_size=BATCH_SIZE)
mechanism = dpx.dp_sgd(clip_norm=CLIP_NORM, noise_multiplier=budget, sampling=sampling, key=dpx.secret_key())
optimizer = dpx.chain(mechanism, optax.adam(LEARNING_RATE))
result = dpx.fit(loss, optimizer, params, train)
print(f"accuracy {accuracy(result.params):.3f}, epsilon {result.epsilon:.3f}")
