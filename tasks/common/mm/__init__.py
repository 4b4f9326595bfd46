"""What segmentation and detection share: the backbone, safe loading, runs of mmengine. Needs the extra `dense`."""
