"""What the tasks share. Nothing here imports a task."""
