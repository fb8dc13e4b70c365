"""Table 4 of DiceSGD (https://arxiv.org/abs/2311.14632): GPT-2 learns to write descriptions from slots."""

from dpx.papers.dice_sgd import dice_theorem_noise
from examples.config import Config
from examples.papers.experiment import Experiment, Row

CLIP_NORM = 1.0
RATES = (1e-3, 3e-3, 1e-2)


def noise_by_theorem(config: Config, rate: float, steps: int) -> float:
    """The noise multiplier, in units of the clip norm in the sum, for which the paper's theorem claims epsilon."""
    assert config.epsilon is not None and config.batch_size is not None
    deviation = dice_theorem_noise(
        clip_norm=config.clip_norm,
        examples=round(config.batch_size / rate),
        steps=steps,
        epsilon=config.epsilon,
        delta=config.delta,
    )
    return deviation * config.batch_size / config.clip_norm


def dice(outer: float, reset: str) -> dict:
    options = {"feedback_norm": CLIP_NORM, "outer_clip_norm": CLIP_NORM * outer, "reset_every": reset}
    return dict(method="dice_sgd", method_options=options)


GRID = tuple({"learning_rate": rate} for rate in RATES)
TABLE_4 = Experiment(
    name="dice-table-4",
    title="error feedback when GPT-2 is fine-tuned to write texts from slots",
    common=dict(
        dataset="debian_packages",
        task="language",
        model="gpt2_mini",
        task_options=dict(vocabulary=800, width=48, length=28, pretrain=1000, generate=200),
        delta=8e-6,
        optimizer="adamw",
        epochs=2.0,
        batch_size=512,
        clip_norm=CLIP_NORM,
    ),
    rows=(
        Row(label="DP-SGD", claimed=8.0, grid=GRID),
        Row(label="DiceSGD, bounded error", config=dice(1.1, "epoch"), claimed=8.0, grid=GRID),
        Row(
            label="DiceSGD as published",
            config=dice(float("inf"), "none"),
            claimed=8.0,
            noise=noise_by_theorem,
            grid=GRID,
        ),
    ),
    truth=(
        "The paper's Table 4, at a claimed epsilon of 8: DP-SGD has BLEU 56.8, NIST 4.83, METEOR 36.2, ROUGE-L "
        "65.2, CIDEr 1.43; DiceSGD has 62.6, 7.05, 38.5, 66.6 and 1.83. Its theorem does not hold "
        "(`dpx.papers.dice_sgd.dice_theorem_noise` has a counterexample). The published method keeps an "
        "error without a bound, for which only a trivial cost is known: every step may move by twice the feedback "
        "norm, and sampling does not help. The row of the bounded error clips what enters the error at 1.1 times "
        "the clip norm, and forgets the error after each epoch. METEOR here knows equal words and stems, but no "
        "synonyms."
    ),
    stand_in=(
        "Debian's packages (`examples.text_data.debian_packages`): name, section and tags are the slots, the short "
        "description is the text. A GPT-2 of 2 layers and width 48, with 800 words, was trained for 1,000 steps on "
        "the public third without privacy, each description after the slots of another package, and is fine-tuned "
        "on the private packages, more than half of all: like the paper's, it knows the language, but not the task. "
        "The paper fine-tunes GPT-2 with 124 million parameters on the restaurants of E2E, so the figures cannot be "
        "compared; only the order of the methods can. Unlike the paper's, our learning rate does not change. "
        "`--real` runs the paper's setting if a checkpoint and e2e_cleaned are installed."
    ),
    real=dict(
        dataset="e2e_cleaned",
        model="gpt2",
        batch_size=1000,
        epochs=10.0,
        task_options=dict(examples=0, length=128, generate=630, beams=10),
    ),
    smoke=dict(
        dataset="random:40",
        batch_size=16,
        epochs=0.5,
        task_options=dict(examples=40, vocabulary=40, width=8, layers=1, heads=2, pretrain=2, length=16, generate=2),
    ),
    also=("bleu", "nist", "meteor", "rouge_l", "cider"),
)
EXPERIMENTS = (TABLE_4,)
