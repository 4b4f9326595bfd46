"""What lies in a saved folder besides the weights."""
