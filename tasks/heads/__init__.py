"""Segmentation and detection with heads of transformers on our backbones, without any other framework."""
