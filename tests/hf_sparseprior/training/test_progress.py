"""What stands behind the training bar."""

from hf_sparseprior.training import OneLineProgress


class Bar:
    def set_postfix(self, numbers, refresh):
        self.numbers = dict(numbers)


def test_the_bar_shows_the_latest_numbers_and_the_time_spent_waiting_for_data():
    progress = OneLineProgress()
    progress.training_bar = Bar()
    progress.on_log(None, None, None, logs={"loss": 2.0, "data_wait": 0.5, "grad_norm": 1.0})
    progress.on_log(None, None, None, logs={"eval_loss": 1.5, "eval_accuracy": 0.25})
    progress.on_log(None, None, None, logs={"loss": 1.0, "data_wait": 0.125})
    assert progress.training_bar.numbers == {
        "loss": "1", "waiting for data": "0.125", "val loss": "1.5", "val acc": "0.25",
    }  # fmt: skip
