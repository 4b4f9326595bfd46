"""What examples may have for labels, and how a model that learns them is judged."""

# One of the classes, several of them or none, or numbers.
LABELS = CLASSES, SEVERAL, NUMBERS = "classes", "several", "numbers"
PROBLEMS = {CLASSES: None, SEVERAL: "multi_label_classification", NUMBERS: "regression"}  # transformers' problem_type
METRICS = {CLASSES: "accuracy", SEVERAL: "mean_average_precision", NUMBERS: "mean_absolute_error"}
