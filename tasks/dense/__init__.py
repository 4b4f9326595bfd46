"""Segmentation and detection by mmengine: what both tasks share."""
