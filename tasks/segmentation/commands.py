"""Arguments of the commands in this folder, see tasks/common/parsers.py."""

from functools import partial

from tasks.common.parsers import mm_compare_parser, mm_evaluate_parser, mm_train_parser

train = partial(mm_train_parser, "segmentation")
evaluate = partial(mm_evaluate_parser, "segmentation")
compare = partial(mm_compare_parser, "segmentation")
