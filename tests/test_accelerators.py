"""What the compiled programs of other devices say, read from their text; and steps for them, if their compilers are here."""

# ruff: noqa: E501

import jax
import numpy as np
import pytest
from jax.extend import core

import dpx
from benchmarks import accelerators, adders, on_a_gpu, programs
from dpx.xla.jaxprs import walk_equations
from dpx.xla.place import tracing_for_place
from tests import mechanisms
from tests.test_export import callbacks, precisions

# Lines of programs for a TPU and for a GPU: a loop of five turns each.
TPU = """
%body.1 (arg: f32[8,4]) -> f32[8,4] {
  %arg = f32[8,4]{1,0:T(8,128)} parameter(0)
  %other = f32[4,4]{1,0:T(8,128)} constant({...})
  ROOT %fusion.1 = f32[8,4]{1,0} fusion(%arg, %other), kind=kOutput, calls=%inner.1, backend_config={"estimated_cycles":"100"}
}
%inner.1 (a: f32[8,4], b: f32[4,4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[4,4]{1,0} parameter(1)
  ROOT %convolution.1 = f32[8,4]{1,0} convolution(%a, %b), dim_labels=bf_io->bf, operand_precision={highest,highest}
}
%condition.1 (arg: s32[]) -> pred[] {
  %arg.1 = s32[] parameter(0)
  %constant.1 = s32[] constant(5)
  ROOT %lt.1 = pred[] compare(%arg.1, %constant.1), direction=LT
}
ENTRY %main (x: f32[8,4]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %copy.1 = f32[8,4]{1,0} copy(%x), backend_config={"estimated_cycles":"7"}
  ROOT %while.1 = f32[8,4]{1,0} while(%copy.1), condition=%condition.1, body=%body.1
}
"""
GPU = """
ENTRY %main (x: bf16[8,4], y: bf16[4,16], k: f32[3,3,2,6], im: f32[1,5,5,2]) -> f32[8,16] {
  %x = bf16[8,4]{1,0} parameter(0)
  %y = bf16[4,16]{1,0} parameter(1)
  %k = f32[6,3,3,2]{3,2,1,0} parameter(2)
  %im = f32[1,5,5,2]{3,2,1,0} parameter(3)
  %conv = (f32[1,5,5,6]{3,2,1,0}, u8[0]{0}) custom-call(%im, %k), window={size=3x3}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
  %dot.1 = f32[8,16]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}, algorithm=dot_bf16_bf16_f32_x3
  ROOT %dot.2 = bf16[8,16]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_products_and_cycles_of_a_loop_count_once_a_turn():
    (product,) = programs.products(TPU)
    assert product == programs.Product("f32 HIGHEST", 5 * 2 * 8 * 4 * 4, "f32[8,4]")
    assert programs.cycles(TPU) == 5 * 100 + 7
    assert programs.traffic(TPU) == 4 * (2 * 32 + 5 * (32 + 16 + 32))


def test_products_have_their_algorithm_and_its_rate():
    convolution, named, plain = programs.products(GPU)
    assert convolution == programs.Product("f32 DEFAULT", 2 * 25 * 6 * 9 * 2, convolution.shape)
    assert (named.algorithm, plain.algorithm) == ("BF16_BF16_F32_X3", "bf16 DEFAULT")
    assert named.flops == plain.flops == 2 * 8 * 16 * 4
    rates = accelerators.DEVICES["h100"].rates
    assert accelerators.rate_of(rates, "f32 HIGHEST") == 67e12 and accelerators.rate_of(rates, "f32 DEFAULT") == 495e12
    assert accelerators.rate_of(rates, "BF16_BF16_F32_X3") == 330e12


CUTS = """
%inner.2 (a: f32[9,8,4], b: f32[8,4], c: f32[9,8,4], n: s32[]) -> (f32[9,8,4], f32[8]) {
  %a = f32[9,8,4]{2,1,0} parameter(0)
  %b = f32[8,4]{1,0} parameter(1)
  %c = f32[9,8,4]{2,1,0} parameter(2)
  %n = s32[] parameter(3)
  %flat = f32[9,32]{1,0} bitcast(%a)
  %cut = f32[1,32]{1,0} dynamic-slice(%flat, %n, %n), dynamic_slice_sizes={1,32}
  %row = f32[1,8,4]{2,1,0} bitcast(%cut)
  %put = f32[9,8,4]{2,1,0} dynamic-update-slice(%c, %row, %n, %n, %n)
  %sum = f32[8]{0} reduce(%b, %n), dimensions={1}
  ROOT %both = (f32[9,8,4]{2,1,0}, f32[8]{0}) tuple(%put, %sum)
}
ENTRY %main (x: f32[9,8,4], y: f32[8,4], z: f32[9,8,4], i: s32[]) -> f32[2,8,4] {
  %x = f32[9,8,4]{2,1,0} parameter(0)
  %y = f32[8,4]{1,0} parameter(1)
  %z = f32[9,8,4]{2,1,0} parameter(2)
  %i = s32[] parameter(3)
  %fusion.2 = (f32[9,8,4]{2,1,0}, f32[8]{0}) fusion(%x, %y, %z, %i), kind=kLoop, calls=%inner.2
  %first = f32[9,8,4]{2,1,0} get-tuple-element(%fusion.2), index=0
  ROOT %slice.1 = f32[2,8,4]{2,1,0} slice(%first), slice={[0:2], [0:8], [0:4]}
}
"""


def test_of_an_array_that_is_cut_the_part_counts():
    read, written, number = 32 + 32, 32 + 8, 1
    assert programs.traffic(CUTS) == 4 * (read + written + number + 2 * 64)


COMPILERS = {"v5e": "libtpu", "h100": "jax_cuda12_plugin"}  # the packages that they come in


@pytest.mark.long
@pytest.mark.parametrize("model", ["mlp", "adadpigu_cnn", "gpt of 4 layers, scanned"])
@pytest.mark.parametrize("device", COMPILERS)
def test_a_private_step_compiles_for_a_device_that_is_not_here(device, model):
    """No product of the compiled step is of plain float32, also none of its norms and sums."""
    pytest.importorskip(COMPILERS[device])
    found = accelerators.in_its_process(device, model, accelerators.PRIVATE)
    assert "failure" not in found, found
    assert sum(found["flops"].values()) > 1e8 and not {"f32 HIGHEST", "F32_F32_F32"} & {*found["flops"]}
    assert model != "mlp" or device == "h100" or found["MiB"] < 0.05 * 1_796_010 * 4 / 2**20 + 1


WIDE = {"float64", "int64", "uint64", "complex128"}
PROJECTS = {"gaussian projection", "clip, then project", "d2p2_sgd", "dp2_sgd", "gep_sgd"}  # by matrices of float32
NEEDS_FLOAT64 = {"dice_sgd", "band_mf_sgd", "lambda_cgd", "clip, then project"}


def types(jaxpr: core.Jaxpr) -> set[str]:
    """Of all numbers of a program."""
    return {str(v.aval.dtype) for equation in walk_equations(jaxpr) for v in (*equation.invars, *equation.outvars)}


def traced(mechanism: dpx.Mechanism, platform: str, sharding: jax.sharding.Sharding | None = None) -> jax.stages.Traced:
    """A step on sums of eight examples."""

    def step(grads, state, included):
        return mechanism.update(grads, state, mechanisms.PARAMS, included=included)

    with tracing_for_place(platform=platform, devices=1):
        grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct((8, *p.shape), p.dtype), mechanisms.PARAMS)
        inputs = grads, jax.eval_shape(mechanism.init, mechanisms.PARAMS), jax.ShapeDtypeStruct((8,), bool)
        inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), inputs)
        return jax.jit(step, out_shardings=sharding).trace(*inputs)


@pytest.mark.parametrize("case", mechanisms.ALL)
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.long_cases("cuda-")  # tests/test_export.py has the steps of all methods
def test_a_step_lowers_for_accelerators_or_its_state_is_refused(case, platform):
    name = case.like or case.name
    if platform == "tpu" and name in NEEDS_FLOAT64:
        with (
            tracing_for_place(platform="tpu"),
            pytest.raises(ValueError, match="must be computed in IEEE's float64, which a TPU lacks"),
        ):
            case.mechanism.init(mechanisms.PARAMS)
        return
    step = traced(case.mechanism, platform)
    program = step.lower(lowering_platforms=(platform,)).as_text()
    assert platform == "cuda" or not types(step.jaxpr.jaxpr) & WIDE
    assert not callbacks(program)
    assert precisions(program) <= ({"HIGHEST"} if name in PROJECTS else set())  # other sums leave products to the loss


@pytest.mark.long
@pytest.mark.parametrize("case", mechanisms.ALL)
@pytest.mark.parametrize("device", COMPILERS)
def test_a_step_compiles_for_accelerators(device, case, monkeypatch):
    pytest.importorskip(COMPILERS[device])
    platform = "tpu" if accelerators.DEVICES[device].topology else "cuda"
    if platform == "tpu" and (case.like or case.name) in NEEDS_FLOAT64:
        pytest.skip("a TPU has no float64, so the test above sees a refusal")
    for name, value in accelerators.TPU.items():
        monkeypatch.setenv(name, value)
    place = jax.sharding.SingleDeviceSharding(accelerators.described(device)[0])
    assert traced(case.mechanism, platform, place).lower(lowering_platforms=(platform,)).compile().as_text()


def test_on_a_gpu_says_in_words_that_there_is_none(monkeypatch):
    monkeypatch.setattr("sys.argv", ["on_a_gpu"])
    if jax.default_backend() != "gpu":
        with pytest.raises(SystemExit, match="No GPU is here: JAX has found 'cpu'"):
            on_a_gpu.main()
    device = jax.devices("cpu")[0]
    assert on_a_gpu.noise_that_differs(device, device, 1000) == (0, 0.0)


def test_a_gpu_is_compared_with_an_emulator_of_its_adder(monkeypatch):
    """As if the emulator were the GPU, for one instruction and for several."""
    monkeypatch.setattr(on_a_gpu, "multiplied", lambda core, left, right: products_of(core, left, right))

    def products_of(core, left, right):
        exponents = np.frexp(left)[1][:, None] + np.frexp(right.T)[1] - 2
        return adders.emulated(core, left[:, None] * right.T, exponents)

    for name in ("H100, TF32", "H100, bfloat16"):
        equal, here, emulated, float32 = map(float, on_a_gpu.of_the_adder(name, 40, size=16)[2:])
        assert equal == 100 and here == emulated < 1 and float32 < 1
        assert float(on_a_gpu.moved_block(name, 8, 5)[2]) < 1


@pytest.mark.long
def test_on_a_gpu_measures_steps_and_sums(monkeypatch):
    monkeypatch.setattr(on_a_gpu, "MODELS", {"mlp": (8,)})
    lines = on_a_gpu.of_steps(["mlp"], 1, lambda lines: None)
    assert [line[0] for line in lines][:3] == ["mlp, 8, not private", "mlp, 8, by hand", "mlp, 8, dpx"]
    assert all(float(cell) > 0 for line in lines[:4] for cell in line[1:3])
    assert all(float(cell) < 1 for line in on_a_gpu.moved_sums(1, most=64) for cell in line[2:])
    assert 0 < float(on_a_gpu.raised_norms((16,))[0][1]) < 0.1
