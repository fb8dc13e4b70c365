"""Train an image classifier with differential privacy: `python -m examples.train --dataset digits --epsilon 3`."""

import argparse
import json
import secrets
import sys
import textwrap
import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpx import catalog
from examples import config as configuration
from examples import data, records
from examples.config import Config
from examples.data import BUNDLED, IDX
from examples.loop import CACHE, Result, run
from examples.methods import METHODS, options
from examples.models import ACTIVATIONS
from examples.recipes import RECIPES
from examples.tasks import TASKS
from examples.whitening import PUBLIC

CHOICES = {
    "method": METHODS,
    "accountant": configuration.ACCOUNTANTS,
    "sampling": catalog.SAMPLINGS,
    "optimizer": configuration.OPTIMIZERS,
    "task": TASKS,
    "model": {name: None for kind in TASKS.values() for name in kind.models},
    "activation": ACTIVATIONS,
    "features": configuration.FEATURES,
    "whitening": PUBLIC,
}
OPTIONS = ("method_options", "task_options")  # fields of `Config` whose entries are options of their own
HELP = {
    "task": "what is trained; the other options of a task are listed below",
    "dataset": f"{', '.join([*BUNDLED, *IDX])}, features:NAME for features in NAME.npz, "
    "or a name tensorflow-datasets knows, such as cifar10",
    "seed": "decides parameters, batches and noise: a secret; drawn by the system if not given",
    "epsilon": "the budget; the least noise that meets it is found, unless --noise-multiplier is given too",
    "noise_multiplier": "noise standard deviation over the clip norm",
    "epochs": "planned passes over the data",
    "sampling": "how batches are drawn; the cost follows",
    "batch_size": "expected batch size (default 256)",
    "microbatch_size": "examples worked on at once (default: as dpx.private_updates chooses)",
    "per_layer": "of dp_sgd: every layer has a clip norm of its own, --clip-norm divided by the root of their number",
    "masked_loss": "of ada_dpigu: take the loss at the masked parameters",
    "public": "of gep_sgd: the data set whose gradients, public, span the subspace (with random labels)",
    "public_examples": "of gep_sgd: how many of its images",
    "public_rank": "of gep_sgd: dimension of the subspace, which is kept for the run",
    "features": "a fixed transform of the images, computed once and kept in the cache directory",
    "whitening": "of features whitened: the public images that they are whitened by",
    "filters": "of features whitened: there are 9 features of each",
}


def parser() -> argparse.ArgumentParser:
    """One option for every field of `Config`, the options of the methods, and where files are."""
    made = argparse.ArgumentParser(
        prog="python -m examples.train",
        usage="%(prog)s --dataset NAME --epsilon EPSILON [options]",
        description=__doc__,
    )
    for name, field in Config.__dataclass_fields__.items():
        if name in OPTIONS:
            continue
        kind = type_of(name)
        default = "" if not isinstance(field.default, int | float | str) else f"(default {field.default})"
        made.add_argument(
            option(name),
            type=kind,
            default=argparse.SUPPRESS,
            metavar=None if name in CHOICES else kind.__name__.upper(),
            choices=list(CHOICES[name]) if name in CHOICES else None,
            help=f"{HELP.get(name, '')} {default}".strip(),
        )
    own = {method: options(method) for method in METHODS}
    for name in {name: None for known in own.values() for name in known}:
        said = [f"{m} (default {known[name].default}): {known[name].help}" for m, known in own.items() if name in known]
        made.add_argument(option(name), default=argparse.SUPPRESS, help="; ".join(said).replace("%", "%%"))
    for name in {name: None for kind in TASKS.values() for name in kind.options}:
        defaults = {task: kind.options[name] for task, kind in TASKS.items() if name in kind.options}
        said = "; ".join(f"of task {task} (default {default})" for task, default in defaults.items())
        kind = reader(next(iter(defaults.values())))
        made.add_argument(option(name), type=kind, default=argparse.SUPPRESS, help=said)
    made.add_argument("--recipe", choices=list(RECIPES), help="defaults for --epsilon; other options change them")
    made.add_argument("--output-dir", type=Path, help="default runs/DATASET-METHOD-TIME")
    made.add_argument("--resume", action="store_true", help="continue the run in --output-dir")
    made.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    made.add_argument("--data-dir", type=Path, help="the folder of idx files or of tensorflow-datasets")
    made.add_argument("--cache-dir", type=Path, default=CACHE, help="for features (default %(default)s)")
    made.add_argument("--quiet", action="store_true", help="no progress bar")
    return made


def type_of(name: str) -> Callable[[str], Any]:
    """How a word on the command line is read."""
    declared = typing.get_type_hints(Config)[name]
    return truth if declared is bool else next((k for k in (int, float) if declared in (k, k | None)), str)


def reader(default: Any) -> Callable[[str], Any]:
    """How an option of a task is read: as its default's type, or as text where that is None."""
    return truth if isinstance(default, bool) else str if default is None else type(default)


def truth(word: str) -> bool:
    return bool(("false", "true").index(word.lower()))


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def configure(given: dict[str, Any]) -> Config:
    """The configuration asked for; with --resume, what is not given is as in the stored run."""
    fields: dict[str, Any] = {name: given[name] for name in Config.__dataclass_fields__ if name in given}
    own = {
        "method_options": {name for method in METHODS for name in options(method)},
        "task_options": {name for kind in TASKS.values() for name in kind.options},
    }
    fields |= {field: {name: given[name] for name in sorted(names & set(given))} for field, names in own.items()}
    if given["resume"]:
        if given.get("recipe"):
            raise ValueError("--recipe must not be given with --resume, because the stored run has its settings")
        if given["output_dir"] is None:
            raise ValueError("--resume needs --output-dir")
        stored_file = given["output_dir"].expanduser() / "config.json"
        if not stored_file.is_file():
            raise ValueError(f"nothing to resume: {stored_file} does not exist")
        stored = json.loads(stored_file.read_text())["config"]
        fields |= {field: stored[field] | fields[field] for field in OPTIONS}
        return Config(**(stored | fields))
    if "dataset" not in fields:
        raise ValueError("--dataset must be given")
    if given.get("recipe"):
        if fields.get("epsilon") is None:
            raise ValueError("--recipe needs --epsilon")
        if (task := fields.get("task", "images")) != "images":
            raise ValueError(f"--recipe must be given with --task images, got {task}")
        examples = len(data.load(fields["dataset"], given["data_dir"]).train_images)
        fields = RECIPES[given["recipe"]](fields["epsilon"], examples) | fields
    fields.setdefault("seed", secrets.randbits(128))
    return Config(**fields)


def command(config: Config) -> str:
    """The command line of a configuration, without what is default, in lines of 80 characters."""
    words = ["python -m examples.train"]
    for name, field in Config.__dataclass_fields__.items():
        value = getattr(config, name)
        if name not in OPTIONS and value != field.default:
            words.append(f"{option(name)} {value:g}" if isinstance(value, float) else f"{option(name)} {value}")
    own = config.method_options | {k: v for k, v in config.task_options.items() if v != TASKS[config.task].options[k]}
    words += [f"{option(name)} {value}" for name, value in own.items()]
    whole = " ".join(word.replace(" ", "\0") for word in words)  # an option and its value stay in one line
    lines = textwrap.wrap(whole, 78, subsequent_indent="    ", break_on_hyphens=False)
    return " \\\n".join(lines).replace("\0", " ")


def summary(result: Result) -> str:
    value, name = result.metrics[result.headline], result.headline.replace("_", " ")
    said = f"{value:.2%}" if "accuracy" in name else f"{value:.4g}"
    return (
        f"{name} {said}, epsilon {records.rounded_up(result.epsilon)} at delta {result.delta:g}, "
        f"{result.steps} steps in {result.seconds:.0f} s; files in {result.output_dir}"
    )


def main(arguments: list[str] | None = None) -> int:
    given = vars(parser().parse_args(arguments))
    try:
        config = configure(given)
        moment = time.strftime("%Y%m%d-%H%M%S")
        output_dir = given["output_dir"] or Path("runs") / f"{config.dataset}-{config.method}-{moment}"
        result = run(
            config,
            output_dir=output_dir,
            resume=given["resume"],
            data_dir=given["data_dir"],
            cache_dir=given["cache_dir"],
            checkpoint_every=given["checkpoint_every"],
            progress=not given["quiet"],
        )
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(summary(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
