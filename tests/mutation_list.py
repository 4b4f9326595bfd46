"""The mistakes that are made on purpose: 40 chosen ones, each with the tests that have to fail, and what is known of
those that are drawn (`mutations.drawn`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A mistake that some test has to notice.

    what: in words.
    place: path and function, PATH::CLASS.METHOD.
    operator, node: as of `Site`. number: where the function has several such nodes.
    tests: names of test files in any folder: "test_x.py", "priors/test_x.py", "test_x_*.py". select: pytest's -k.
    """

    what: str
    place: str
    operator: str
    node: str
    tests: str
    select: str = ""
    number: int | None = None


OPS, ALL_OPS = "matches_loops or reference", "test_ops.py test_backend_*.py"
RUNS = "test_run_folder.py classification/test_run.py"
OF_FOLDERS = "folder or differences or configuration or overwrite or finished or skipped"

ATTENTION = (
    Mutation(
        "masked pairs get another logit",
        "hf_sparseprior/attention/dense.py::reference",
        *("constant", "0.0", ALL_OPS, OPS),
    ),
    Mutation(
        "prefix tokens decay",
        "hf_sparseprior/attention/dense.py::dense_decay",
        *("constant", "1.0", ALL_OPS, OPS),
    ),
    Mutation(
        "residual placement with the wrong sign",
        "hf_sparseprior/attention/dense.py::_decayed_logits",
        *("arithmetic", "+", "test_placement.py", "formula", 1),
    ),
    Mutation(
        "sdpa without its mask",
        "hf_sparseprior/attention/dense.py::sdpa",
        *("drop_keyword", "attn_mask", ALL_OPS, OPS),
    ),
    Mutation(
        "dropped keys keep their weight",
        "hf_sparseprior/attention/dense.py::_softmax_of_present",
        *("constant", "1e-06", "test_token_pruning.py"),
    ),
    Mutation(
        "diagonal adds the floor instead of taking it away",
        "hf_sparseprior/attention/diagonal.py::_diagonal_head",
        *("arithmetic", "-", ALL_OPS, "diagonal", 6),
    ),
    Mutation(
        "diagonal takes the prefix away",
        "hf_sparseprior/attention/diagonal.py::_diagonal_head",
        *("arithmetic", "+", ALL_OPS, "diagonal", 8),
    ),
    Mutation(
        "gather forgets the softmax's sum in its gradient",
        "hf_sparseprior/attention/gather.py::GatheredAttention.backward",
        *("drop_call", "sum", ALL_OPS, "gather", 1),
    ),
    Mutation(
        "frames forgets the softmax's sum in its gradient",
        "hf_sparseprior/attention/frames.py::PlaceAttention.backward",
        *("drop_call", "sum", "test_time.py", "", 1),
    ),
)

PATTERNS = (
    Mutation(
        "windows end too early",
        "hf_sparseprior/patterns/fibottention.py::window_sizes",
        *("arithmetic", "-", "test_supports.py", "", 2),
    ),
    Mutation(
        "layers are shuffled by another seed",
        "hf_sparseprior/patterns/supports.py::layer_order",
        *("arithmetic", "+", "test_supports.py"),
    ),
    Mutation(
        "the window's end is left out",
        "hf_sparseprior/patterns/sequences.py::head_sequence",
        *("compare", "<=", "test_sequences.py test_supports.py", "", 2),
    ),
    Mutation(
        "the snake turns too late",
        "hf_sparseprior/patterns/curves.py::snake_curve",
        *("constant", "1", "test_curves.py", "", 1),
    ),
    Mutation(
        "patches from two ends of the image are neighbours",
        "hf_sparseprior/patterns/windows.py::window_regions",
        *("arithmetic", "-", "test_modeling_sparseprior_swin.py"),
    ),
    Mutation(
        "the sum over curves, not their mean",
        "hf_sparseprior/patterns/decay.py::decay_weights",
        *("arithmetic", "/", "patterns/test_decay.py"),
    ),
    Mutation(
        "distances have a sign",
        "hf_sparseprior/patterns/decay.py::pair_distances",
        *("drop_call", "abs", "patterns/test_decay.py"),
    ),
    Mutation(
        "gamma is not the sigmoid of beta",
        "hf_sparseprior/patterns/decay.py::initial_beta",
        *("arithmetic", "-", "test_placement.py", "gamma"),
    ),
    Mutation(
        "beta in half precision",
        "hf_sparseprior/patterns/decay.py::Decay._apply.keep_precision",
        *("drop_keyword", "dtype", "patterns/test_decay.py"),
    ),
)

MODELS = (
    Mutation(
        "two layouts share a plan",
        "hf_sparseprior/priors/layer.py::PriorAttention._constant_plan",
        *("drop_element", "layout", "priors/test_attention.py", "plan"),
    ),
    Mutation(
        "two ways to see time share the decay's positions",
        "hf_sparseprior/attention/plan.py::AttentionPlan.__init__",
        *("drop_element", "self.time", "test_attention_plan.py"),
    ),
    Mutation(
        "saved code has modules in the wrong order",
        "hf_sparseprior/saving/code.py::_Code.in_order.add",
        *("negate", "for", "test_code.py"),
    ),
    Mutation(
        "a stock model's mask is lost",
        "hf_sparseprior/adapters/stock_attention.py::prior_attention",
        *("drop_keyword", "bias", "test_stock_attention.py test_stock.py"),
    ),
    Mutation(
        "a disabled adapter acts",
        "hf_sparseprior/adapters/violin.py::DecayLayer._active_name",
        *("drop_sign", "not", "test_violin.py"),
    ),
    Mutation(
        "a distillation token has no position in timm's files",
        "hf_sparseprior/convert/timm_vit.py::_grid",
        *("arithmetic", "+", "test_checkpoint.py"),
    ),
)

TRAINING = (
    Mutation(
        "layer decay is two layers off",
        "hf_sparseprior/training/layer_decay.py::parameter_groups",
        *("arithmetic", "+", "training/test_layer_decay.py"),
    ),
    Mutation(
        "micro-batches do not weigh by their samples",
        "hf_sparseprior/training/trainer.py::SparsePriorTrainer.share_of_step",
        *("arithmetic", "*", "training/test_training.py", "mean_over_its_samples or shorter_last", 1),
    ),
    Mutation(
        "beta decays",
        "hf_sparseprior/training/layer_decay.py::decayed_names",
        *("logic", "and", "test_trainer.py", "no_decay"),
    ),
    Mutation(
        "mixed labels sum to more than one",
        "hf_sparseprior/training/mixing.py::SoftTargetCollator._mix",
        *("arithmetic", "-", "test_mixing.py", "", 1),
    ),
    Mutation(
        "every epoch has the same order",
        "hf_sparseprior/training/sampling.py::DrawSampler.__iter__",
        *("drop_element", "epoch", "training/test_training.py test_sampling.py", "order"),
    ),
    Mutation(
        "the averaged weights stay in the model",
        "hf_sparseprior/training/ema.py::WeightAverage.swapped_in",
        *("drop_call", "clone", "test_ema.py"),
    ),
)

TASKS = (
    Mutation(
        "another run's folder is taken",
        "hf_sparseprior/runs/run_folder.py::finished_results",
        *("drop_statement", "raise", RUNS, OF_FOLDERS, 2),
    ),
    Mutation(
        "a cut checkpoint counts as whole",
        "hf_sparseprior/runs/run_folder.py::checkpoint_damage",
        *("return_none", "return", RUNS, OF_FOLDERS, 1),
    ),
    Mutation(
        "another run's results are read",
        "hf_sparseprior/runs/run_folder.py::folder_differences",
        *("logic", "or", "test_run_folder.py common/test_compare.py"),
    ),
    Mutation(
        "a second record of a run may differ",
        "tasks/common/records.py::_put",
        *("drop_statement", "raise", "common/test_records.py"),
    ),
    Mutation(
        "a claim holds if its interval ends above 0",
        "tasks/claims/kinds.py::outcome_of",
        *("arithmetic", "-", "test_claims.py"),
    ),
    Mutation(
        "the spread over seeds is divided by n",
        "tasks/common/paired.py::Difference.error",
        *("drop_keyword", "ddof", "test_paired.py"),
    ),
    Mutation(
        "scores of views are averaged before the softmax's division",
        "hf_sparseprior/runs/metrics.py::average_views",
        *("drop_statement", "scores", "test_metrics.py"),
    ),
    Mutation(
        "a long clip does not lie in the middle of a short video",
        "hf_sparseprior/cli/video_files.py::sample_indices",
        *("arithmetic", "/", "test_video_files.py"),
    ),
    Mutation(
        "actions come back off centre",
        "tasks/robotics/normalizer.py::Normalizer.undo",
        *("arithmetic", "+", "robotics/test_data.py robotics/test_policy.py"),
    ),
    Mutation(
        "feature maps keep the layout of tokens in memory",
        "hf_sparseprior/mm/backbone.py::MMBackbone.forward",
        *("drop_call", "contiguous", "mm/test_backbone.py"),
    ),
)

CHOSEN = (*ATTENTION, *PATTERNS, *MODELS, *TRAINING, *TASKS)

# Names of drawn mistakes that no test can or has to notice, and why.
EXPLAINED: dict[str, str] = {}
