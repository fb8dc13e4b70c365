"""One training step in torch: without privacy, and private in the three ways of Opacus."""

import copy
import importlib.util
import os
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import problems, torch_models

LIBRARIES = ("torch", "opacus")
FLOOR = "torch, not private"
STACKED = ("Opacus hooks", "Opacus functorch")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

torch.set_num_threads(len(os.sched_getaffinity(0)))
torch.set_float32_matmul_precision("high")  # as JAX has it on a GPU; no difference on a CPU


def device() -> str:
    return torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"


def rows(model: str, size: int) -> dict[str, Callable]:
    """name -> (() -> run): `run()` makes one step."""
    module = torch_models.build(model).to(DEVICE)
    x, labels = (torch.from_numpy(array).to(DEVICE) for array in problems.draw(model, size))
    # Opacus 1.6.0 computes wrong gradients of unpadded convolutions on channels-last data, as one channel counts unless
    # its strides say otherwise
    x = x.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format) if x.dim() == 4 else x.long()
    batch = x, labels.long()

    def not_private():
        return running(copy.deepcopy(module), torch_models.Loss(), batch)

    found: dict[str, Callable] = {FLOOR: not_private}
    if importlib.util.find_spec("opacus"):
        for mode in ("hooks", "functorch", "ghost"):
            found[f"Opacus {mode}"] = with_opacus(module, batch, mode)
    return found


def with_opacus(module, batch, mode) -> Callable:
    import opacus
    from opacus.grad_sample.utils import register_grad_sampler, register_norm_sampler

    # as its manual has it for layers of one's own; without, torch.func would do them
    @register_grad_sampler(torch_models.Positions)
    def positions_gradients(layer, activations, backprops):
        return {layer.weight: backprops}

    @register_norm_sampler(torch_models.Positions)
    def positions_norms(layer, activations, backprops):
        return {layer.weight: backprops.flatten(1).norm(2, dim=1)}

    def make():
        private = copy.deepcopy(module)
        private, optimizer, *rest = opacus.PrivacyEngine().make_private(
            module=private,
            optimizer=torch.optim.SGD(private.parameters()),
            criterion=torch_models.Loss(),
            data_loader=DataLoader(TensorDataset(*batch), batch_size=len(batch[0])),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        criterion = rest[0] if mode == "ghost" else torch_models.Loss()
        return running(private, criterion, batch, optimizer)

    return make


def running(module, criterion, batch, optimizer=None) -> Callable:
    """Steps that end with the gradients, before they are applied. All memory is given back."""
    parameters = list(module.parameters())

    def run():
        criterion(module(batch[0]), batch[1]).backward()
        if optimizer is not None:
            optimizer.pre_step()
        gradients = [parameter.grad for parameter in parameters]
        (module if optimizer is None else optimizer).zero_grad(set_to_none=True)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        return gradients

    return run
