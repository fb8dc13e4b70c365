"""The memory and the communication of a private step of a sharded model, from abstract arrays: nothing is computed.

    python -m benchmarks.sharded

One step with Adam is lowered and compiled for eight devices of a CPU, each case in a process of its own. The
parameters, Adam's moments and the batch are shapes with shardings. FSDP: the examples and every large array are sharded
over eight devices. Tensor parallel: the layers are sharded as in Megatron-LM (arXiv:1909.08053), over as many devices
as divide the heads; the examples over the others. Private: dpx with ghost norms. Not private: the gradient of the mean
loss. Memory is what the compiled program says of one device, and a collective in a loop counts in each turn. XLA orders
a program for a CPU such that its threads have work early, and for a GPU such that little memory is in use. So the
programs here are compiled in the latter order, and again in the former, for one column.
Writes benchmarks/results/sharded.md.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import report

DEVICES, MIB = 8, 2**20
SMALLEST = 2**14  # numbers of an array that is sharded under FSDP
COLUMNS = {"query", "key", "value", "gate", "up", "attn.qkv", "mlp.fc1"}  # layers that are sharded by their outputs
ROWS = {"out", "down", "attn.proj", "mlp.fc2"}  # by their inputs


class Model(NamedTuple):
    """params: shapes. loss: of one example. batch: shapes. stacked: whether `blocks` has an axis for its layers.
    outputs_first: whether kernels are (outputs, inputs). split: over how many devices a layer is sharded."""

    params: Any
    loss: Callable
    batch: Any
    stacked: bool
    outputs_first: bool
    split: int
    trained: Callable[[str], bool] | None = None


def decoder(family: str, *, length: int, batch: int, remat: bool, split: int, **sizes) -> Model:
    """The decoder of examples.finetune, with its layers in a scan."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from examples.finetune.model import Architecture, Block, Norm, is_lora

    of = Architecture(family=family, positions=length, **sizes)

    def shapes(build):
        graphdef, state = nnx.split(nnx.eval_shape(build))
        return graphdef, nnx.to_pure_dict(state)

    rngs = lambda: nnx.Rngs(params=0, lora=1)  # noqa: E731
    block, of_block = shapes(lambda: Block(of, rngs()))
    norm, of_norm = shapes(lambda: Norm(of))
    table = jax.ShapeDtypeStruct((of.vocabulary, of.width), jnp.float32)
    stack = lambda x: jax.ShapeDtypeStruct((of.layers, *x.shape), x.dtype)  # noqa: E731
    params = {"embedding": table, "blocks": jax.tree.map(stack, of_block), "norm": of_norm}
    if not of.rotary:
        params["places"] = jax.ShapeDtypeStruct((length, of.width), jnp.float32)

    def loss(params, tokens):
        def layer(x, p):
            return nnx.merge(block, p)(x), None

        x = params["embedding"][tokens[:-1]]
        x = x + params["places"] if "places" in params else x
        x = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False) if remat else layer, x, params["blocks"])[0]
        logits = jax.nn.log_softmax(nnx.merge(norm, params["norm"])(x) @ params["embedding"].T)
        return -jnp.take_along_axis(logits, tokens[1:, None], 1).mean()

    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    return Model(params, loss, tokens, True, False, split, is_lora if of.lora_rank else None)


def image_model(layers: int, batch: int) -> Model:
    """ViT-small, whose layers have arrays of their own, with timm's layouts."""
    import dataclasses

    import jax
    import jax.numpy as jnp
    import optax

    from examples import vit

    sizes = dataclasses.replace(vit.SMALL, layers=layers)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in vit.shapes_of(sizes, 1000).items()}

    def loss(params, example):
        image, label = example
        return optax.softmax_cross_entropy_with_integer_labels(vit.apply(params, image, sizes), label)

    images = jax.ShapeDtypeStruct((batch, sizes.side, sizes.side, 3), jnp.float32)
    return Model(params, loss, (images, jax.ShapeDtypeStruct((batch,), jnp.int32)), False, True, 2)


GPT2: dict[str, Any] = {
    "vocabulary": 50_304,
    "width": 768,
    "heads": 12,
    "kv_heads": 12,
    "head_width": 64,
    "hidden": 3072,
}
GPT2 |= {"length": 512, "batch": 16, "remat": False, "split": 4}
LLAMA: dict[str, Any] = {
    "vocabulary": 128_256,
    "width": 2048,
    "heads": 32,
    "kv_heads": 8,
    "head_width": 64,
    "hidden": 8192,
}
LLAMA |= {"length": 512, "batch": 16, "remat": True, "split": 8}
MODELS: dict[str, Callable[[], Model]] = {
    "GPT-2, 2 layers": lambda: decoder("gpt2", layers=2, **GPT2),
    "Llama, 2 layers": lambda: decoder("llama", layers=2, **LLAMA),
    "ViT, 2 layers": lambda: image_model(2, 64),
    "GPT-2 small": lambda: decoder("gpt2", layers=12, **GPT2),
    "ViT-small": lambda: image_model(12, 64),
    "Llama 1B": lambda: decoder("llama", layers=16, **LLAMA),
    "Llama 1B, LoRA": lambda: decoder("llama", layers=16, lora_rank=8, **LLAMA),
}
SHARDINGS = ("FSDP", "tensor parallel")
PLAIN, PRIVATE, TWICE, IN_PARTS = "not private", "dpx", "dpx, two passes", "dpx, microbatches of 4"
PARTED = ("Llama 1B", "tensor parallel")  # where all devices have all examples, and one pass has too many records
STEPS = (PLAIN, PRIVATE, TWICE, IN_PARTS)
ORDERS = {"memory": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED", "default": "CPU_SCHEDULER_TYPE_DEFAULT"}


def axis_of(path: str, shape: tuple[int, ...], model: Model, kind: str, split: int) -> int | None:
    """The axis along which an array is sharded, or None."""
    first = 1 if model.stacked and "blocks" in path else 0
    able = [axis for axis in range(first, len(shape)) if shape[axis] % split == 0]
    if kind == "FSDP":
        large = math.prod(shape[first:]) >= SMALLEST
        return max(able, key=lambda axis: shape[axis], default=None) if large else None
    if path.startswith("embedding"):
        return 0
    columns = any(name in path for name in COLUMNS) and "norm" not in path
    rows = any(name in path for name in ROWS) and "norm" not in path
    vector = path.endswith("bias")
    if "lora_a" in path or not (columns or rows) or (rows and vector):
        return None
    last = len(shape) - 1
    axis = last if vector or columns != model.outputs_first else last - 1
    return axis if axis in able else None


def case(name: str, kind: str, row: str, devices: Any = None, platform: str | None = None) -> tuple[Any, tuple, Model]:
    """The jitted step, and its arguments as shapes with shardings.

    devices: of this platform; None is DEVICES of those at hand. The batch has a row for each of them at least.
    """
    import jax
    import optax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import dpx
    from dpx.values import leaf_path

    model = MODELS[name]()
    count = DEVICES if devices is None else len(devices)
    split = count if kind == "FSDP" else model.split
    axes, sizes = (("data",), (count,)) if kind == "FSDP" else (("data", "model"), (count // split, split))
    mesh = jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)
    everywhere, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    def placed(path, leaf):
        axis = axis_of(leaf_path(path), leaf.shape, model, kind, split)
        return everywhere if axis is None else NamedSharding(mesh, PartitionSpec(*[None] * axis, axes[-1]))

    shardings = jax.tree_util.tree_map_with_path(placed, model.params)
    by_path = {leaf_path(path): (leaf.shape, one) for (path, leaf), one in zip(
        jax.tree_util.tree_leaves_with_path(model.params), jax.tree.leaves(shardings), strict=True)}  # fmt: skip

    def of_state(path, leaf):
        """A moment is sharded as its parameter, whose path is the end of its own."""
        ends = [one for end, (shape, one) in by_path.items() if leaf_path(path).endswith(end) and shape == leaf.shape]
        return ends[0] if ends else everywhere

    batch_size = max(count, jax.tree.leaves(model.batch)[0].shape[0])
    model = model._replace(batch=jax.tree.map(lambda x: x.update(shape=(batch_size, *x.shape[1:])), model.batch))
    if row != PLAIN:
        sampling = dpx.PoissonSampling(examples=1_000_000, batch_size=batch_size)
        mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=dpx.secret_key(7))
        if model.trained:
            mechanism = dpx.in_coordinates(mechanism, dpx.coordinates.trainable(mask=model.trained))
        optimizer: Any = dpx.chain(mechanism, optax.adam(1e-3))
        options: Any = {"backward_passes": 2 if row == TWICE else 1, "sharding": rows}
        options |= {"microbatch_size": 4} if row == IN_PARTS else {}
        gradient = dpx.private_updates(model.loss, optimizer, norms="ghost", platform=platform, **options)

        def step(params, batch, included, state):
            updates, state, _ = gradient(params, dpx.Batch(batch, included), state)
            return optax.apply_updates(params, updates), state

    else:
        optimizer = optax.adam(1e-3)
        if model.trained:
            labels = jax.tree_util.tree_map_with_path(lambda p, _: model.trained(leaf_path(p)), model.params)
            optimizer = optax.partition({True: optimizer, False: optax.set_to_zero()}, labels)

        def step(params, batch, included, state):
            held = lambda p: jax.tree_util.tree_map_with_path(  # noqa: E731
                lambda at, x: x if not model.trained or model.trained(leaf_path(at)) else jax.lax.stop_gradient(x), p
            )
            mean = lambda p: jax.numpy.mean(jax.vmap(model.loss, (None, 0))(held(p), batch), where=included)  # noqa: E731
            updates, state = optimizer.update(jax.grad(mean)(params), state, params)
            return optax.apply_updates(params, updates), state

    def abstract(shapes, shardings):
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)

    shapes = jax.eval_shape(optimizer.init, model.params)
    places = jax.tree_util.tree_map_with_path(of_state, shapes)
    included = jax.ShapeDtypeStruct((batch_size,), bool, sharding=rows)
    batch = abstract(model.batch, jax.tree.map(lambda _: rows, model.batch))
    arguments = abstract(model.params, shardings), batch, included, abstract(shapes, places)
    return jax.jit(step, out_shardings=(shardings, places), donate_argnums=(0, 3)), arguments, model


def worker(name: str, kind: str, row: str, dump: str | None = None) -> dict[str, Any]:
    """The facts of one case, in a process with eight devices."""
    import jax
    from jax import export

    from benchmarks import programs

    assert jax.device_count() == DEVICES
    began = time.process_time()
    step, arguments, model = case(name, kind, row)
    lowered = step.lower(*arguments)
    seconds = [time.process_time() - began]
    exported = export.export(step, platforms=("cuda",))(*arguments)
    assert exported.nr_devices == DEVICES
    began = time.process_time()
    compiled = lowered.compile(compiler_options={"xla_cpu_scheduler_type": ORDERS["memory"]})
    seconds.append(time.process_time() - began)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    default = lowered.compile(compiler_options={"xla_cpu_scheduler_type": ORDERS["default"]}).memory_analysis()
    if dump:
        with open(dump, "w") as file:
            file.write(text)
    found = programs.instructions(text)
    most = programs.largest(found)
    leaves = jax.tree.leaves(model.params)
    shards = [math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(arguments[0])]
    return {
        "seconds": seconds,
        "temporary": memory.temp_size_in_bytes,
        "temporary, default order": default.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "parameters": 4 * sum(x.size for x in leaves),
        "largest parameter": 4 * max(x.size for x in leaves),
        "a device": 4 * sum(shards),
        "largest buffer": [most.largest, most.shape, most.source],
        "collectives": programs.collectives(found),
        "exported": len(exported.mlir_module_serialized),
    }


def measured(name: str, kind: str, row: str, limit: float, dump: str | None) -> dict[str, Any]:
    """`worker` in a process of its own; {"error": words} if it fails or takes longer than `limit` seconds."""
    command = [sys.executable, "-m", "benchmarks.sharded", "--worker", json.dumps([name, kind, row])]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    path = f"{dump}/{name}-{kind}-{row}.txt".replace(" ", "_") if dump else None
    try:
        done = subprocess.run(
            command + (["--dump", path] if path else []), env=env, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not compiled in {limit:.0f} s"}
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        return {"error": done.stderr.strip().splitlines()[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def tables(results: dict[str, dict[str, dict[str, Any]]]) -> dict[str, str]:
    """results: by case, the facts of its rows."""

    def mib(row, fact):
        return f"{row[fact] / MIB:.0f}"

    memory, sent, compiling = [], [], []
    for name, rows in results.items():
        for row, facts in rows.items():
            if "error" in facts:
                memory.append([f"{name}, {row}", facts["error"], *["-"] * 7])
                continue
            buffer, shape, source = facts["largest buffer"]
            where = "/".join(source.split("/")[-2:])
            cells = [mib(facts, fact) for fact in ("parameters", "largest parameter", "arguments", *TEMPORARY)]
            memory.append([f"{name}, {row}", *cells, f"{buffer / MIB:.0f}", f"`{shape}`", f"`{where}`"])
            cells = [f"{count}, {size / MIB:.0f}" if count else "-" for count, size in facts["collectives"].values()]
            sent.append([f"{name}, {row}", *cells])
            compiling.append(
                [f"{name}, {row}", *(f"{x:.0f}" for x in facts["seconds"]), f"{facts['exported'] / MIB:.2f}"]
            )
    ratios = [
        [f"{name}, {row}", *(f"{x:.2f}" for x in divided(rows[row], rows[PLAIN]))]
        for name, rows in results.items()
        for row in rows
        if row != PLAIN and not any("error" in rows.get(one, {"error": ""}) for one in (row, PLAIN))
    ]
    columns = ["model, MiB", "parameters", "largest parameter", "arguments, a device", "temporary, a device"]
    columns.append("in a CPU's default order")
    return {
        "Private, divided by not private": report.grid(["model", *RATIOS], ratios),
        "Memory": report.grid([*columns, "largest buffer, a device", "its shape", "made by"], memory),
        "Collectives of a step: how many, and MiB": report.grid(
            ["model", "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"], sent
        ),
        "CPU seconds, and the program for eight CUDA devices": report.grid(
            ["model", "to trace and lower", "to compile", "exported MiB"], compiling
        ),
    }


NOTES = (
    "Memory and collectives are those of XLA's compiler for CPUs. It makes no reduce-scatter, but an all-reduce and a "
    "slice. On another platform the numbers differ; the lowering for eight CUDA devices succeeds for every row here.",
    "A CPU's default order gives work to all threads early: it draws noise and writes zeros before the forward pass. "
    "All other columns are of an order for little memory, as XLA has it on GPUs.",
    "The largest buffer is compared with the largest parameter: under FSDP, also a step that is not private gathers a "
    "whole parameter where it is used, and adds a whole gradient before it is sharded.",
    "The arguments are the parameters, both moments and the batch. The noise is made where its shard is.",
    "With one backward pass, dpx keeps the inputs and the cotangents of all layers until the norms are known. A step "
    "that is not private frees them layer by layer, and with jax.checkpoint (Llama 1B) it never has them all. For "
    "Llama 1B they are 2.8 GiB a device under FSDP, hardly more than what the logits and the whole table need before. "
    "With tensor parallel, every device has the residual stream of all examples, so they are 7.7 GiB, of which 1 GiB "
    "is also in the step that is not private. Microbatches divide them, and send no byte more, because no parameter is "
    "gathered and no sum is added up over the devices.",
    "With `backward_passes=2`, dpx has those of one layer at a time. It gathers parameters, or adds activations, in "
    "two passes, so it sends about twice as much. With LoRA, a step of one pass keeps the gradients of each example, "
    "which are smaller, so it needs no second one. ViT-small has its layers in a Python loop without jax.checkpoint, "
    "so its two passes would be one.",
)
TEMPORARY = ("temporary", "temporary, default order")
RATIOS = (*TEMPORARY, "arguments", "temporary and arguments", "largest buffer", "collectives", "bytes of collectives")


def divided(facts: dict[str, Any], plain: dict[str, Any]) -> list[float]:
    """The ratios of a row and the one that is not private, in the order of RATIOS."""

    def of(facts):
        sums = list(zip(*facts["collectives"].values(), strict=True))
        numbers = [*(facts[fact] for fact in TEMPORARY), facts["arguments"], facts["temporary"] + facts["arguments"]]
        return [*numbers, facts["largest buffer"][0], *map(sum, sums)]

    return [a / b if b else math.nan for a, b in zip(of(facts), of(plain), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["GPT-2 small", "ViT-small", "Llama 1B", "Llama 1B, LoRA"])
    parser.add_argument("--shardings", nargs="+", default=list(SHARDINGS), choices=SHARDINGS)
    parser.add_argument("--rows", nargs="+", default=list(STEPS), choices=STEPS)
    parser.add_argument("--limit", type=float, default=900, help="seconds for one case")
    parser.add_argument("--dry", action="store_true", help="print the page and do not write it")
    parser.add_argument("--dump", help="a folder for the compiled programs")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, kind, row = json.loads(options.worker)
        print(json.dumps(worker(name, kind, row, options.dump)))
        return
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for name in options.models:
        for kind in options.shardings:
            for row in options.rows:
                if (row == TWICE and name.startswith("ViT")) or (row == IN_PARTS and (name, kind) != PARTED):
                    continue
                facts = measured(name, kind, row, options.limit, options.dump)
                print(name, kind, row, facts, file=sys.stderr, flush=True)
                results.setdefault(f"{name}, {kind}", {})[row] = facts
    found = tables(results)
    if options.dry:
        print("\n\n".join(f"{title}:\n\n{body}" for title, body in found.items()))
    else:
        print(report.write("sharded", report.heading("benchmarks.sharded", ("jax", "jaxlib")), found, notes=NOTES))


if __name__ == "__main__":
    main()
