"""Opacus: `PrivacyEngine.make_private_with_epsilon`, as in its tutorials."""

import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers.data import BATCH_SIZE, CLIP_NORM, DELTA, EPSILON, EXAMPLES, LEARNING_RATE, STEPS
from benchmarks.peers.torch_model import accuracy, model, train

epochs = STEPS * BATCH_SIZE // EXAMPLES
engine, criterion = PrivacyEngine(), torch.nn.CrossEntropyLoss()
private, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=torch.optim.Adam(model.parameters(), lr=LEARNING_RATE),
    data_loader=DataLoader(TensorDataset(*train), batch_size=BATCH_SIZE),
    target_epsilon=EPSILON,
    target_delta=DELTA,
    epochs=epochs,
    max_grad_norm=CLIP_NORM,
)
for _ in range(epochs):
    for images, labels in loader:
        optimizer.zero_grad()
        criterion(private(images), labels).backward()
        optimizer.step()
print(f"accuracy {accuracy(private):.3f}, epsilon {engine.get_epsilon(DELTA):.3f}")
