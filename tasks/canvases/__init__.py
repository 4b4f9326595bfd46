"""Where sparse attention pays: one small object in a large image, at equal time."""
