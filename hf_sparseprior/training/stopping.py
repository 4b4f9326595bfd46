"""Ends a run that is asked to end, without losing anything, or that no longer gets better."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from transformers import EarlyStoppingCallback, TrainerCallback


class StopRequest:
    """SIGTERM, as schedulers send it before they kill. It is noted instead of obeyed, and all processes agree on it.

    Every training loop uses it: `listen` before the first step, `agreed` after each step, `release` at the end. As a
    context manager it listens and releases. A request stays known after `release`.
    """

    def __init__(self) -> None:
        self.requested = False  # of this process
        self._earlier: Any = None
        self._group: Any = None

    def listen(self) -> None:
        """Note the signal from now on. All processes of a distributed run call this."""
        self.requested = False
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            self._earlier = signal.signal(signal.SIGTERM, self._note)
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            self._group = distributed.new_group(backend="gloo")

    def _note(self, signum: int, frame: Any) -> None:
        self.requested = True

    def agreed(self) -> bool:
        """Whether any process was asked to stop. All processes call this at the same point and get the same answer."""
        if self._group is None:
            return self.requested
        flag = torch.tensor(int(self.requested))  # on the CPU, so that no device has to wait for it
        distributed.all_reduce(flag, distributed.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def release(self) -> None:
        """Restore what the signal did before."""
        if self._earlier is not None:
            signal.signal(signal.SIGTERM, self._earlier)
            self._earlier = None

    def __enter__(self) -> StopRequest:
        self.listen()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class StopOnSignal(TrainerCallback):
    """On SIGTERM: finish the step, save a checkpoint, stop.

    Several processes stop after the same step, whichever of them got the signal. transformers' own
    `enable_jit_checkpoint` waits three seconds, saves without the other processes' agreement, and with an epoch
    strategy evaluates in the middle of the epoch, after which a resumed run no longer equals an uninterrupted one.

    `stopped` is true once training ended this way, also if its last step was done by then. The run then has to end and
    must skip what would come after training.

    transformers tells callbacks nothing of an error in training. `SparsePriorTrainer.train` then calls
    `request.release()`; whoever uses another Trainer does.
    """

    def __init__(self) -> None:
        self.request = StopRequest()
        self.stopped = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Listen for the signal."""
        self.stopped = False
        self.request.listen()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and stop if any process was asked to."""
        if self.request.agreed():
            self.stopped = control.should_training_stop = True
            # After the last step of an epoch its end comes first, because a resumed run starts with the next epoch.
            control.should_save = control.should_save or not _ends_epoch(state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave what belongs to the end of an unfinished epoch to the resumed run."""
        if self.stopped:
            control.should_save = _ends_epoch(state)
            if not control.should_save:
                control.should_evaluate = control.should_log = False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop listening."""
        if args.save_strategy != "no":  # otherwise what was trained would be lost
            self.stopped = self.request.agreed() or self.stopped
        self.request.release()


class EarlyStopping(EarlyStoppingCallback):
    """transformers' early stopping, whose count is not lost when a run is resumed.

    transformers restores it only together with its whole control, also with the wish to stop of a run that was
    interrupted. The count follows from the log.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count what the log has; a run that had come to its end does no more steps."""
        super().on_train_begin(args, state, control, **kwargs)
        metric = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
        best = state.best_global_step or 0
        worse = [entry for entry in state.log_history if metric in entry and entry["step"] > best]
        self.early_stopping_patience_counter = len(worse)
        if len(worse) >= self.early_stopping_patience:
            control.should_training_stop = True


def _ends_epoch(state: Any) -> bool:
    return float(state.epoch).is_integer()


@dataclass
class WorkerStart:
    """`worker_init_fn` of a DataLoader whose workers survive a SIGTERM that does not come from their parent.

    Slurm, torchrun, `timeout` and `kill -- -GROUP` send SIGTERM to every process of a job. A worker that dies of it
    would end training before its step is done and saved. The parent's own SIGTERM, by which a DataLoader ends a worker,
    is obeyed.

    initialize: also called at a worker's start.
    """

    initialize: Callable[[int], None] | None = None

    def __call__(self, worker: int) -> None:
        """Start worker number `worker`."""
        if hasattr(signal, "sigwaitinfo"):  # not on macOS and Windows
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_wait_for_parent, args=(os.getppid(),), daemon=True).start()
        if self.initialize is not None:
            self.initialize(worker)


def _wait_for_parent(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)  # as torch's own handler does
