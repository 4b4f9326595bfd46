"""VTAB-1K: 19 tasks with 1,000 training images each."""
