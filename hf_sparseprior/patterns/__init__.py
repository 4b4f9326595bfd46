"""Which pairs of patches a head sees, and how their distances are measured: integers and grids."""
