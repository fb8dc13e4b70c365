"""The words that people type into the search box, each with the page and the heading that it must find first.

Search would order pages with equal counts of a word by their titles. An entry of the index is found before them.
"""

import re

WORDS = {
    "docs/start": {"Start": "install, getting started, quickstart, tutorial, example, first run, pip"},
    "docs/epsilon": {
        "Epsilon in five sentences": "epsilon, differential privacy, what is differential privacy",
        "Which epsilon?": "which epsilon, good epsilon",
        "Glossary": "glossary, delta, noise multiplier, privacy budget, neighbors",
    },
    "docs/choose": {
        "Batch size, epochs and sampling": "batch size, plan_noise, epochs",
        "Clip norm": "clip norm, clipping, max_grad_norm",
        "Learning rate": "learning rate",
    },
    "docs/recipes": {
        "Log to a CSV file, TensorBoard, or Weights & Biases": "tensorboard, wandb, weights and biases, csv, logging",
        "Early stopping": "early stopping, callback",
        "Keras 3": "keras",
        "Equinox": "equinox",
        "Haiku": "haiku",
        "A pandas table with missing values, categories and users": "pandas, dataframe, missing values",
        "Streams: grain, torch DataLoader, tf.data": "dataloader, torch dataloader, tf.data, grain, dataset",
        "safetensors, PEFT adapters and torch weights": "safetensors, peft, torch, pytorch",
        "Gradient accumulation": "gradient accumulation, multisteps, large batch, microbatch",
        "Freeze layers, or train only the biases": "freeze, freeze layers, frozen, bitfit, biases",
        "Mixed precision": "mixed precision, bfloat16",
        "Private accuracy": "accuracy, validation",
        "Pairs and contrastive losses": "contrastive, pairs, siamese",
        "Profile a step": "profile, profiler",
        "Ask for more budget": "more budget, continue training, train further, more epochs, new budget, more steps",
        "Several runs on the same data": "several runs",
        "A model card for a hub": "model card",
    },
    "docs/coming_from": {"Opacus": "opacus", "TensorFlow Privacy": "tensorflow, tensorflow privacy"},
    "docs/loops": {
        "Resume": "resume, checkpoint, checkpoints, restart",
        "By hand": "training loop, custom loop, augmentation",
        "Users instead of examples": "users, user-level, user-level privacy, user level privacy, federated, fedavg",
    },
    "docs/other_loops": {"Flax: nnx.Optimizer": "nnx.optimizer", "Flax: TrainState": "trainstate"},
    "docs/flax": {
        "NNX": "nnx, dropout, flax",
        "Linen, with tied embeddings": "linen",
        "BatchNorm": "batchnorm, batch norm, batch normalization",
        "Hugging Face": "hugging face, huggingface, transformers",
    },
    "docs/fine_tuning": {"Fine-tuning with LoRA": "lora, fine-tuning, finetuning, fine-tune, freeze base, frozen base"},
    "docs/devices": {
        "Data parallel": "gpu, multi gpu, multi-gpu, multiple gpus, data parallel, tpu",
        "Sharded parameters (FSDP)": "fsdp, sharding",
        "Several processes": "two processes, several processes, multi-host, multihost, distributed",
        "What a step needs": "memory, out of memory, oom",
    },
    "docs/sharp_edges": {"Keys": "secret key, seed, random seed", "Models": "nan, inf"},
    "docs/ship_it": {"What to ship": "privacy report, report, publish"},
    "docs/tuning": {"A search": "hyper-parameters, hyperparameters, hyperparameter search, tuning, tune"},
    "docs/auditing": {
        "Check the contract": "custom mechanism, check_contract",
        "What a trained model leaks": "membership inference, membership, canary, leak",
    },
    "docs/ledger": {"One budget for a data set": "ledger, privacy ledger, composition, total budget, two data sets"},
    "docs/speed": {"What `dpx.explain_norms` says": "explain_norms, gram matrices, per-example gradients, ghost norms"},
    "docs/statistics": {
        "A table with missing values": "mean, private mean, median, quantiles, histogram, count",
        "How good a model is": "private metric, log private accuracy, private accuracy, accuracy per epoch",
    },
}


def add_entries(app, docname, source) -> None:
    for heading, words in WORDS.get(docname, {}).items():
        entries = ", ".join(f"! {word}" for word in words.split(", "))
        line = re.compile(rf"^(#+ {re.escape(heading)})$", re.MULTILINE)
        source[0] = line.sub(lambda found: f"{found[1]}\n\n```{{index}} {entries}\n```", source[0], count=1)  # noqa: B023


def setup(app):
    app.connect("source-read", add_entries)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
