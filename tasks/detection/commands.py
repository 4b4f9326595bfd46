"""Arguments of the commands in this folder, see tasks/common/parsers.py."""

from functools import partial

from tasks.common.parsers import mm_compare_parser, mm_evaluate_parser, mm_train_parser

train = partial(mm_train_parser, "detection")
evaluate = partial(mm_evaluate_parser, "detection")
compare = partial(mm_compare_parser, "detection")
