"""jax_privacy in Keras: `keras_api.make_private`, as in its examples/keras_api_example.py."""

import secrets

from jax_privacy import keras_api

from benchmarks.peers.data import BATCH_SIZE, CLIP_NORM, DELTA, EPSILON, EXAMPLES, LEARNING_RATE, STEPS, test, train
from benchmarks.peers.keras_model import keras, model

config = keras_api.DPKerasConfig(
    epsilon=EPSILON,
    delta=DELTA,
    clipping_norm=CLIP_NORM,
    batch_size=BATCH_SIZE,
    gradient_accumulation_steps=1,
    train_steps=STEPS,
    train_size=EXAMPLES,
    poisson_sampling_in_fit=True,
    seed=secrets.randbits(63),  # in 2.0.0, half of its own seeds are negative, which NumPy refuses
)
private = keras_api.make_private(model, config)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
private.compile(optimizer=keras.optimizers.Adam(LEARNING_RATE), loss=loss, metrics=["accuracy"])
private.fit(*train, epochs=STEPS * BATCH_SIZE // EXAMPLES, verbose=0)
accuracy = private.evaluate(*test, verbose=0, return_dict=True)["accuracy"]
print(f"accuracy {accuracy:.3f}, epsilon {EPSILON:.3f}")
