"""Private fine-tuning of a decoder language model, and private synthetic text from it: `python -m examples.finetune`.

* `model`: the decoder, in Flax NNX. `checkpoints`: its files, in the layouts of Llama, Gemma and GPT-2.
* `documents`: texts with their units of privacy. `rows`: tokens, and rows that hold the text of one unit each.
* `training`: the loss of a unit, the run and its files. `writing`: texts from a model.
* `base`: the small public model that the command fine-tunes where no checkpoint is named.
"""
