"""scikit-learn's digits: 1,400 to train, 397 to test. Images float32 (N, 8, 8, 1) in [0, 1], labels int32 (N,)."""

from typing import Any

import numpy as np
from sklearn.datasets import load_digits

EXAMPLES, BATCH_SIZE, STEPS = 1400, 140, 100
EPSILON, DELTA, CLIP_NORM, LEARNING_RATE = 3.0, 1e-5, 1.0, 1e-2

found: Any = load_digits()
images, labels = (found.data.reshape(-1, 8, 8, 1) / 16).astype(np.float32), found.target.astype(np.int32)
train, test = (images[:EXAMPLES], labels[:EXAMPLES]), (images[EXAMPLES:], labels[EXAMPLES:])
