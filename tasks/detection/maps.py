"""A detector up to its maps, which other programs run; boxes from them, and NMS, are mmdeploy's work."""

from __future__ import annotations

from typing import Any

from mmdet.models.dense_heads import AnchorFreeHead, AnchorHead
from torch import Tensor, nn


class DetectorMaps(nn.Module):
    """The maps of a detector's neck, and what its dense head (of a two-stage detector the RPN's) computes of each.

    `torch.onnx.export(DetectorMaps(detector), (images,), "maps.onnx")` writes them. A whole detector is no such graph:
    how many boxes there are depends on the image.

    Args:
        detector: a model of mmdetection.

    Raises:
        ValueError: if its head gives no maps, as those that decode queries (DETR, DINO, Mask2Former).
    """

    def __init__(self, detector: Any) -> None:
        super().__init__()
        head = getattr(detector, "rpn_head", None) or getattr(detector, "bbox_head", None)
        if not isinstance(head, (AnchorHead, AnchorFreeHead)):
            raise ValueError(
                f"{type(detector).__name__} with {type(head).__name__} has no maps before its boxes; mmdeploy exports "
                "whole detectors"
            )
        self.detector, self.head = detector, head
        self.train(detector.training)

    def forward(self, images: Tensor) -> tuple[Any, Any]:
        """Images (B, 3, height, width) as the data preprocessor gives them -> the neck's maps, the head's maps."""
        features = tuple(self.detector.extract_feat(images))
        return features, self.head(features)
