"""The step of every method compiles for accelerators on a machine that has none, without callbacks to the host."""

import contextlib
import os
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import dpx
from dpx import catalog
from dpx.gradients import clipped_gradients
from dpx.xla.place import Place, current_place, tracing_for_place
from tests.ghost import mechanism
from tests.mechanisms import PARAMS, case_of_method
from tests.problems import dp_sgd, poisson
from tests.test_ghost_zoo import ZOO

# Whose coordinates are selected by a threshold, which a loop searches.
SELECTED = ("random_freeze_sgd", "ranked_freeze_sgd", "ada_dpigu")
LOOPS = (*SELECTED, "tp_topk_sgd", "zeroth_order_sgd")  # the last takes one direction after another
PLATFORMS = ("cpu", "cuda")
PRODUCT = re.compile(r"stablehlo\.(dot_general|dot|convolution)\W")
OF_THE_LOSS = "high"  # the precision of the loss's own products, by which they are known in the program
ENTRIES = {entry.name: entry for entry in catalog.METHODS}


def loss(params, image):
    """A convolution, (6, 6, 1) -> (6, 6, 3), whose kernel is a view of a parameter."""
    kernel = params["kernel"].reshape(2, 2, 1, 3)
    numbers = ("NHWC", "HWIO", "NHWC")
    with jax.default_matmul_precision(OF_THE_LOSS):
        hidden = jax.lax.conv_general_dilated(image[None], kernel, (1, 1), "SAME", dimension_numbers=numbers)
    return jnp.sum(params["scale"] * jnp.tanh(hidden.mean((0, 1, 2)) + params["bias"]))


def dense_loss(params, image):
    with jax.default_matmul_precision(OF_THE_LOSS):
        hidden = image[0, :4, 0] @ params["kernel"]
    return jnp.sum(params["scale"] * jnp.tanh(hidden + params["bias"]))


def exported(mechanism, platform: str, *, loss=loss, dtype=jnp.float32) -> str:
    """The program of a step for another platform, as text."""
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, dtype), PARAMS)
    batch = dpx.Batch(jax.ShapeDtypeStruct((8, 6, 6, 1), dtype), jax.ShapeDtypeStruct((8,), bool))
    step = jax.jit(dpx.private_updates(loss, mechanism, platform=platform, norms="ghost"))
    # As a CPU would take a loop over microbatches that fit in its cache.
    with mock.patch.multiple(clipped_gradients, WHOLE_BATCH=0, CACHE_BYTES=1, EXAMPLE_BYTES_PER_SUM_BYTE=0):
        shapes = params, batch, jax.eval_shape(mechanism.init, params)
        return export.export(step, platforms=(platform,))(*shapes).mlir_module()


def callbacks(program: str) -> set[str]:
    return {name for name in re.findall(r"custom_call @(\w+)", program) if "callback" in name}


def precisions(program: str) -> set[str]:
    """Of all matrix products and convolutions, float32 or not: words, or the operands of a named algorithm."""
    products = [line for line in program.splitlines() if PRODUCT.search(line)]
    words = r"(?<=lhs_precision_type = )\w+|\b(?:DEFAULT|HIGHEST|HIGH)\b(?!.*algorithm)"
    # Operands of bfloat16 are as a unit takes them.
    found = [["bf16"] if "bf16>, tensor<" in line else re.findall(words, line) for line in products]
    assert all(found), "a product that says no precision has the default one"
    return set(sum(found, []))


UNITS = {"cuda": "tf32", "tpu": "bf16"}  # what matrix units multiply exactly


@pytest.mark.parametrize(("name", "platform"), [(name, "cuda") for name in ENTRIES] + [("dp_sgd", "tpu")])
@pytest.mark.long_cases(
    *"""
    ada_dpigu ada_fest adaptive_clipping band_mf_sgd d2p2_sgd d2p_sgd dice_sgd dp2_sgd dynamic_dp_sgd gep_sgd lambda_cgd
    ranked_freeze_sgd tp_topk_sgd zeroth_order_sgd
    """.split()
)
def test_steps_lower_for_accelerators(name, platform):
    program = exported(case_of_method(ENTRIES[name]).mechanism, platform)
    assert not callbacks(program)
    assert "HIGH" in precisions(program) <= {"HIGH", "HIGHEST", UNITS[platform]}  # HIGH are those of the loss
    assert name in LOOPS or platform == "tpu" or "stablehlo.while" not in program  # a TPU's noise is a loop


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize(
    "name",
    ["dense", "heads", "transformer", "recurrent", "cnn", "convolution_grouped", "convolution_with_few_positions"],
)
@pytest.mark.long_cases(
    "transformer-",
    "cnn-",
    "convolution_with_few_positions-",
    "convolution_grouped-cuda",
    "dense-cuda",
    "heads-cuda",
    "recurrent-tpu",
)
def test_norms_and_sums_take_the_matrix_units_of_accelerators(name, platform):
    """No product of a norm or a sum is left to the default precision, with which a unit rounds its operands once more,
    and none is of float32 numbers, which would leave the unit. A CPU has one precision only, so the program is read.
    """
    assert lowered(name, platform) == {"HIGH", UNITS[platform]}
    assert lowered(name, platform, norms="vmap") == {"HIGH"}
    of_units = {"bf16"} if platform == "tpu" else set()
    assert lowered(name, platform, of_the_loss="highest") == {"HIGHEST"} | of_units


def lowered(name: str, platform: str, *, norms: str = "ghost", of_the_loss: str = OF_THE_LOSS) -> set[str]:
    """The `precisions` of a step of a model of the zoo, whose loss asks for this one."""
    loss, params, examples = ZOO[name][0]()

    def marked(params, example):
        with jax.default_matmul_precision(of_the_loss):
            return loss(params, example)

    made, batch = mechanism(), dpx.Batch(examples, None)
    # The unit follows the setting around the step: users who ask for exact products in it get exact sums.
    with jax.default_matmul_precision("highest") if of_the_loss == "highest" else contextlib.nullcontext():
        step = jax.jit(dpx.private_updates(marked, made, norms=norms, platform=platform))
        return precisions(step.trace(params, batch, made.init(params)).lower(lowering_platforms=(platform,)).as_text())


# The squares of a mask, a cotangent or a scale are long numbers, and rounding them up would raise the norm.
SCALED = ("kernel_masked", "kernel_that_is_positive", "kernel_of_one_given_twice")
# JAX traces these rules of the loss itself later, outside the precision that the loss asks for.
LATER = """
    under_a_custom_derivative backward_passes_of_their_own backward_passes_of_their_own_in_loops
    products_that_are_no_matrix_products gradients_of_the_forward_pass backward_pass_that_closes_over_constants
""".split()


@pytest.mark.long
@pytest.mark.parametrize("name", ZOO)
def test_no_product_of_a_step_for_a_gpu_is_of_plain_float32(name):
    allowed = (
        {"HIGH", "tf32", "bf16"}
        | ({"HIGHEST"} if name in SCALED else set())
        | ({"DEFAULT"} if name in LATER else set())
    )
    assert lowered(name, "cuda") <= allowed


@pytest.mark.parametrize(("platform", "convolutions"), [("cpu", 2), ("cuda", 1), ("rocm", 1)])
def test_a_gpu_adds_kernels_by_products(platform, convolutions):
    """cuDNN may compute a convolution by algorithms whose rounding is not bounded, so the loss alone has one there."""

    def loss(params, image):
        return jnp.sum(jnp.tanh(jax.lax.conv_general_dilated(image[None], params, (1, 1), "VALID")))

    made, rng = mechanism(), np.random.default_rng(0)
    params, batch = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 2, 4, 4), (8, 2, 4, 4)))
    with jax.default_matmul_precision("highest"):
        step = jax.jit(dpx.private_updates(loss, made, norms="ghost", platform=platform))
        found = step.trace(params, dpx.Batch(batch, None), made.init(params))
        program = found.lower(lowering_platforms=(platform,)).as_text()
        assert len(re.findall(r"stablehlo\.convolution\W", program)) == convolutions
        sums, expected = (
            jax.jit(dpx.private_updates(loss, made, norms="ghost", platform=each))(
                params, dpx.Batch(batch, None), made.init(params)
            )
            for each in (platform, "cpu")
        )
    np.testing.assert_allclose(sums.updates, expected.updates, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", [*SELECTED, "gaussian", "hadamard", "orthonormal"])
def test_scaled_norms_and_projections_are_exact_on_accelerators(name):
    if name in SELECTED:
        made = case_of_method(ENTRIES[name]).mechanism
    else:
        made = dpx.mechanisms.clip_then_project(mechanism(), kind=name, rank=4, every=1)
    assert {"HIGH"} <= precisions(exported(made, "cuda", loss=dense_loss)) <= {"HIGH", "HIGHEST", "tf32"}


def test_a_step_in_bfloat16_lowers():
    program = exported(case_of_method(ENTRIES["dp_sgd"]).mechanism, "cuda", dtype=jnp.bfloat16)
    assert "bf16" in program and not callbacks(program)


def test_only_a_cpu_takes_microbatches_for_its_cache():
    mechanism = case_of_method(ENTRIES["dp_sgd"]).mechanism
    loops = {
        platform: exported(mechanism, platform, loss=dense_loss).count("stablehlo.while") for platform in PLATFORMS
    }
    assert loops["cuda"] == 0 < loops["cpu"]


def test_an_unknown_platform_is_refused():
    with pytest.raises(ValueError, match="platform must be one of cpu, gpu, cuda, rocm, tpu, or None, got 'metal'"):
        dpx.private_updates(loss, case_of_method(ENTRIES["dp_sgd"]).mechanism, platform="metal")


def test_microbatches_fit_in_the_memory(monkeypatch):
    """A batch that would not fit in half of the device's memory is split, and `explain` says so."""
    mechanism = case_of_method(ENTRIES["dp_sgd"]).mechanism
    batch = dpx.Batch(np.ones((8, 6, 6, 1), np.float32), None)
    assert "microbatches" not in str(dpx.explain_norms(loss, mechanism, PARAMS, batch))
    with tracing_for_place(memory=1000):
        said = str(dpx.explain_norms(loss, mechanism, PARAMS, batch)).splitlines()[-1]
    assert said == "microbatches of 2 examples: all 8 would not fit in half of the device's memory"
    stats = mock.Mock(memory_stats=lambda: {"bytes_limit": 2**30})
    with mock.patch("jax.local_devices", lambda: [stats]):
        assert current_place().device_memory_bytes == 2**30
        with mock.patch("jax.default_backend", lambda: "gpu"):  # on a GPU of NVIDIA, whose platform has two names
            assert Place("cuda", 1).device_memory_bytes == 2**30 and Place("cpu", 1).device_memory_bytes is None
    assert Place("tpu", 1).device_memory_bytes is None and (current_place().device_memory_bytes or 0) > 2**28
    monkeypatch.delattr(os, "sysconf")  # as on Windows
    assert current_place().device_memory_bytes is None


@pytest.mark.parametrize("in_chunks", [False, True])
def test_the_noise_of_a_step_for_a_tpu_is_made_of_integers(in_chunks):
    def compiled(platform):
        params, made = jnp.ones(3), dp_sgd(poisson(100, 4))
        batch, state = dpx.Batch(jnp.ones((4, 3)), jnp.ones(4, bool)), made.init(params)
        build = dpx.private_updates_in_chunks if in_chunks else dpx.private_updates
        step: Any = build(lambda params, x: jnp.sum(params * x) ** 2, made, norms="vmap", platform=platform)

        def chunked(params, batch, state):
            return step.release(params, step.add(params, batch, state), state)

        traced = jax.jit(chunked if in_chunks else step).trace(params, batch, state)
        return traced.lower(lowering_platforms=("tpu",)).as_text()

    assert "f64" not in compiled("tpu")
    with pytest.raises(ValueError, match="must be traced for one"):
        compiled("cpu")
