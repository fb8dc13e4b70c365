"""Fine-tune a language model privately, and write private synthetic text from it.

    python -m examples.finetune --epsilon 3 --synthesize 100

trains a small decoder, which knows Python's own documentation, on the documentation of the installed packages, where
one module is the unit of privacy. With `--base FOLDER`, it takes a checkpoint of Llama, Gemma or GPT-2 (config.json,
safetensors, tokenizer.json), and with `--data`, a folder of texts, a file of JSON lines, or a saved Hugging Face data
set. `--resume --output-dir DIR` continues an interrupted run.
"""

import argparse
import json
import secrets
import sys
import time
from pathlib import Path

from examples import records
from examples.finetune.base import small_base
from examples.finetune.training import OPTIMIZERS, Settings, run
from examples.loop import CACHE


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m examples.finetune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = {field.name: field.default for field in Settings.__dataclass_fields__.values()}

    def add(name: str, words: str, **options):
        shown = default.get(name.replace("-", "_"))
        made.add_argument(f"--{name}", help=words + (f" (default {shown})" if shown is not None else ""), **options)

    add("base", "folder of a checkpoint; by default, a small public model that is made once")
    add("data", "'docs', a .jsonl file, or a folder of texts or of a saved Hugging Face data set")
    add("text", "field of the text in records")
    add("user", "field of the owner in records, who is the unit then; or any word, for a folder of folders of users")
    add("layout", "texts of one unit: one behind the other in rows, or a row for each", choices=("packed", "padded"))
    add("length", "tokens that a row predicts", type=int)
    add("most", "rows of a unit that take part, evenly spaced in its text", type=int)
    add("epsilon", "budget of one unit; inf trains WITHOUT privacy", type=float)
    add("delta", "best far below 1 divided by the number of units", type=float)
    add("steps", "steps of the whole run", type=int)
    add("batch-size", "units of a step, on average", type=int)
    add("clip-norm", "of the gradient of all rows of a unit together", type=float)
    add("optimizer", "behind the noisy gradient", choices=sorted(OPTIMIZERS))
    add("learning-rate", "of the optimizer", type=float)
    add("lora-rank", "0 trains all parameters", type=int)
    add("canaries", "units with a random number, to measure what the model leaks", type=int)
    add("units", "so many private units, chosen by a hash of their names; 0 is all", type=int)
    add("seed", "secret; drawn by the system if not given", type=int)
    made.add_argument("--synthesize", type=int, default=0, metavar="N", help="texts to write to synthetic.jsonl")
    made.add_argument("--temperature", type=float, default=1.0, help="of the texts")
    made.add_argument("--output-dir", type=Path, help="for the files of the run; some are secret, as the README says")
    made.add_argument("--resume", action="store_true", help="continue the run in --output-dir")
    made.add_argument("--checkpoint-every", type=int, default=20, help="steps")
    made.add_argument("--cache-dir", type=Path, default=CACHE, help="for the small public model")
    made.add_argument("--quiet", action="store_true")
    return made


def settings_of(given: argparse.Namespace) -> Settings:
    """Those asked for; with --resume, what is not given is as in the stored run."""
    named = {name: getattr(given, name) for name in Settings.__dataclass_fields__}
    fields = {name: value for name, value in named.items() if value is not None}
    if given.resume:
        if given.output_dir is None:
            raise ValueError("--resume needs --output-dir")
        file = given.output_dir.expanduser() / "config.json"
        if not file.is_file():
            raise ValueError(f"nothing to resume: {file} does not exist")
        return Settings(**(json.loads(file.read_text())["config"] | fields))
    if "base" not in fields:
        fields["base"] = str(small_base(given.cache_dir, progress=not given.quiet))
    fields.setdefault("seed", secrets.randbits(128))
    return Settings(**fields)


def main(arguments: list[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    try:
        settings = settings_of(given)
        folder = given.output_dir or Path("runs") / time.strftime("finetune-%Y%m%d-%H%M%S")
        result = run(
            settings,
            output_dir=folder,
            resume=given.resume,
            synthesize=given.synthesize,
            temperature=given.temperature,
            checkpoint_every=given.checkpoint_every,
            progress=not given.quiet,
        )
    except (ValueError, FileNotFoundError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"test loss {result['test_loss']:.4f} of a token ({result['base_test_loss']:.4f} before), epsilon "
        f"{records.rounded_up(result['epsilon'])} at delta {result['delta']:g} for one unit of {result['units']}, "
        f"{result['steps']} steps in {result['seconds']:.0f} s; files in {folder}"
    )
    print((folder / "samples.txt").read_text()[:1000])
    return 0


if __name__ == "__main__":
    sys.exit(main())
