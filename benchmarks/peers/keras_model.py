"""The CNN in Keras, with JAX below it."""

# ruff: noqa: E402

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
)
