"""What happens before and after the policy: nothing. It scales observations and actions itself."""

from __future__ import annotations

from typing import Any

from lerobot.processor import (
    AddBatchDimensionProcessorStep,
    DeviceProcessorStep,
    PolicyProcessorPipeline,
    RenameObservationsProcessorStep,
)
from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action


def make_sparseprior_crossway_pre_post_processors(config: Any, dataset_stats: Any = None) -> tuple[Any, Any]:
    """lerobot's pipelines, as `tasks.robotics.lerobot_export` writes them."""
    before = [
        RenameObservationsProcessorStep(rename_map={}),
        AddBatchDimensionProcessorStep(),
        DeviceProcessorStep(device=config.device),
    ]
    return (
        PolicyProcessorPipeline(steps=before, name="policy_preprocessor"),
        PolicyProcessorPipeline(
            steps=[DeviceProcessorStep(device="cpu")],
            name="policy_postprocessor",
            to_transition=policy_action_to_transition,
            to_output=transition_to_policy_action,
        ),
    )
