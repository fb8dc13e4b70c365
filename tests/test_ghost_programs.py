"""The compiled steps of the zoos stay as small as tests/data/programs.json says, so that no norm becomes slow unseen.

`python -m tests.test_ghost_programs` records the numbers of this version of jax again. Say in the commit why one grew.
"""

import json
import re
from pathlib import Path

import jax
import pytest

import dpx
from dpx.xla.jaxprs import walk_equations
from tests import test_ghost_scans, test_ghost_zoo
from tests.ghost import QUICK, mechanism, noiseless

RECORDED = Path(__file__).parent / "data" / "programs.json"
ANIMALS = {name: made for zoo in (test_ghost_zoo.ZOO, test_ghost_scans.ZOO) for name, (made, *_) in zoo.items()}
COMMON = {"dense", "deep", "convolution", "embedding", "tied_weights", "stack", "remat_in_a_scan"}
SLACK, FEW_BYTES = 1.1, 512
PRODUCT = re.compile(r" = \S+ (?:dot|convolution)\(|custom_call_target=\"__onednn")


def measured(name: str) -> dict[str, int]:
    """Products of matrices and convolutions, bytes of temporaries, and equations of a step without noise."""
    loss, params, batch = ANIMALS[name]()
    made = noiseless(mechanism())
    step = dpx.private_updates(loss, made, norms="ghost")
    traced = jax.jit(step).trace(params, dpx.Batch(batch, None), made.init(params))
    program = traced.lower().compile(QUICK)
    return {
        "products": len(PRODUCT.findall(program.as_text())),
        "bytes": program.memory_analysis().temp_size_in_bytes,
        "equations": sum(1 for _ in walk_equations(traced.jaxpr)),
    }


def cases():
    return [name if name in COMMON else pytest.param(name, marks=pytest.mark.long) for name in ANIMALS]


@pytest.mark.parametrize("name", cases())
def test_the_program_does_not_grow(name):
    recorded = json.loads(RECORDED.read_text())
    if recorded["jax"] != jax.__version__:
        pytest.skip(f"programs.json is of jax {recorded['jax']}")
    found, before = measured(name), recorded["programs"][name]
    assert found["products"] <= before["products"]
    assert found["bytes"] <= SLACK * before["bytes"] + FEW_BYTES
    assert found["equations"] <= SLACK * before["equations"]


def test_every_animal_is_recorded():
    assert json.loads(RECORDED.read_text())["programs"].keys() == ANIMALS.keys() > COMMON


if __name__ == "__main__":
    jax.config.update("jax_numpy_rank_promotion", "raise")
    programs = ",\n".join(f'"{name}": {json.dumps(measured(name))}' for name in ANIMALS)
    RECORDED.write_text(f'{{"jax": "{jax.__version__}", "programs": {{\n{programs}\n}}}}\n')
