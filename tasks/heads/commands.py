"""Arguments of the commands in this folder, see tasks/common/parsers.py."""

from functools import partial

from tasks.common.parsers import compare_parser, evaluate_parser, train_parser

TRAINS = "a head of transformers on one of our backbones"
EVAL_BATCH_SIZE = 16

train = partial(train_parser, "heads", TRAINS)
evaluate = partial(evaluate_parser, "heads", TRAINS, EVAL_BATCH_SIZE)
compare = partial(compare_parser, "heads")
