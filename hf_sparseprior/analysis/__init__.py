"""Numbers and pictures of supports, curves, decays and attention."""
