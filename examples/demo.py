"""A private training run in under a minute on real data: `python -m examples.demo`.

It runs `python -m examples.train` with the arguments below. Arguments on the command line are added to these, or
replace them.
"""

import sys

from examples.train import main

ARGUMENTS = (
    "--dataset digits --method dp_sgd --epsilon 3 --delta 1e-5 --epochs 30 --batch-size 512 --model mlp "
    "--clip-norm 0.1 --learning-rate 4 --momentum 0.9 --checkpoint-every 20"
).split()

if __name__ == "__main__":
    print("python -m examples.train", *ARGUMENTS, *sys.argv[1:])
    sys.exit(main([*ARGUMENTS, *sys.argv[1:]]))
