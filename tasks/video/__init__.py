"""Video: action recognition with SparsePriorTimesformer, see README.md."""
