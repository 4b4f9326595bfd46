"""Runs on several cores: order, threads, kills, failures, two queues at once, and how long the rest takes."""

import errno
import fcntl
import itertools
import multiprocessing
import os
import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_sparseprior.runs import locks
from hf_sparseprior.runs.command import RunStopped
from hf_sparseprior.runs.locks import locked
from hf_sparseprior.runs.run_folder import LOCK, InUse
from tasks.common import queue as queue_module
from tasks.common.queue import ATTEMPTS, Job, Queue, RunsFailed, _Running, duration, makespan
from tests.processes import IMPORTED, Started, wait_until

pytestmark = pytest.mark.slow

# ---- what stands for a run: it takes its lock and leaves a file ------------------------------------------------------


def work(folder, seconds=0.0, callbacks=()):
    """Says when it ran, with how many threads and as which process."""
    with locked(folder / LOCK) as mine:
        if not mine:
            raise InUse(f"{folder} is in use")
        (folder / f"began-{os.getpid()}").touch()
        begin = time.monotonic()
        time.sleep(seconds)
        lines = [begin, time.monotonic(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], len(callbacks)]
        (folder / "lines").write_text(" ".join(map(str, lines)))
        (folder / "lines").rename(folder / "record")  # whole as soon as it is there


def fail(folder, callbacks=()):
    print("first words")
    raise ValueError(f"{folder.name} has a bad value")


def die(folder, times, callbacks=()):
    """Kills itself so many times, then leaves the file."""
    with (folder / "deaths").open("a") as file:
        file.write("x")
    if len((folder / "deaths").read_text()) <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    work(folder)


def job(folder, call=work, *arguments):
    folder.mkdir(parents=True, exist_ok=True)
    return Job(folder.name, folder.name[0], folder, call, (folder, *arguments), (folder / "record").exists)


def records(folder):
    found = {path.parent.name: path.read_text().split() for path in folder.glob("*/record")}
    return {name: [float(value) for value in values] for name, values in found.items()}


# ---- processes ------------------------------------------------------------------------------------------------------


def test_every_core_has_one_run_of_one_thread_in_order(tmp_path, capsys):
    jobs = [job(tmp_path / f"{row}{seed}", work, 0.3) for seed in range(2) for row in "ab"]
    Queue(IMPORTED, 2).run(jobs)
    found = records(tmp_path)
    for moment, *_ in found.values():
        assert sum(begin <= moment < end for begin, end, *_ in found.values()) <= 2
    assert all(rest == [1, 1, 1] for _, _, *rest in found.values())  # threads, OMP_NUM_THREADS, callbacks
    said = capsys.readouterr().err
    # When each comes to its work is up to the machine.
    assert re.findall(r"(\w+): started as process ", said) == ["a0", "b0", "a1", "b1"]
    assert "[4/4] " in said and re.search(r"to do, about \d+:\d\d left", said)


def see_process(folder, callbacks=()):
    work(folder)
    (folder / "record").write_text(f"{multiprocessing.get_start_method()} {os.environ.get('CUDA_VISIBLE_DEVICES')}")


def test_each_core_has_one_gpu_and_workers_of_a_data_loader_start_as_in_any_process(tmp_path, monkeypatch):
    """Not each from a server, where it imports everything anew."""
    monkeypatch.setattr(queue_module, "visible_gpus", lambda: ["3", "5"])
    Queue(IMPORTED, 2).run([job(tmp_path / name, see_process) for name in ("a0", "b0")])
    method = multiprocessing.get_start_method()
    assert sorted(path.read_text() for path in tmp_path.glob("*/record")) == [f"{method} 3", f"{method} 5"]


def test_a_run_that_fails_stops_no_other_and_is_named_at_the_end(tmp_path):
    jobs = [job(tmp_path / "a0", fail), job(tmp_path / "b0"), job(tmp_path / "b1")]
    with pytest.raises(RunsFailed) as failed:
        Queue(IMPORTED, 1).run(jobs)
    assert str(failed.value) == f"1 of 3 runs failed:\na0: a0: a0 has a bad value ({tmp_path}/a0.log)"
    assert sorted(records(tmp_path)) == ["b0", "b1"]
    assert (tmp_path / "a0.log").read_text().startswith("first words\n")


def test_a_killed_run_is_put_back_but_not_for_ever(tmp_path, capsys):
    jobs = [job(tmp_path / "a0", die, 1), job(tmp_path / "b0", die, 99), job(tmp_path / "c0")]
    with pytest.raises(RunsFailed, match=r"1 of 3 runs failed:\nb0: signal 9 \("):
        Queue(IMPORTED, 1).run(jobs)
    assert sorted(records(tmp_path)) == ["a0", "c0"]
    assert len((tmp_path / "b0" / "deaths").read_text()) == ATTEMPTS
    assert "a0: killed (signal 9); it is put back" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, RunStopped), (signal.SIGINT, KeyboardInterrupt)])
def test_told_to_stop_it_ends_its_runs_and_the_same_queue_goes_on(tmp_path, number, error, interruptible):
    jobs = [job(tmp_path / "a0"), job(tmp_path / "b0", work, 600)]

    queue = Queue(IMPORTED, 2)

    def b0_runs():
        return list(tmp_path.glob("b0/began-*")) and "b0" in [running.job.name for running in queue.running]

    def stop():
        wait_until(lambda: (tmp_path / "a0" / "record").exists() and b0_runs())
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(error):
        queue.run(jobs)
    thread.join()
    process = int(next(tmp_path.glob("b0/began-*")).name.partition("-")[2])
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    begin = records(tmp_path)["a0"]
    Queue(IMPORTED, 2).run([job(tmp_path / "b0")])
    assert sorted(records(tmp_path)) == ["a0", "b0"] and records(tmp_path)["a0"] == begin


def run_queue(folder, cores):
    Queue(IMPORTED, cores).run(shared_jobs(folder))


def shared_jobs(folder):
    return [job(folder / f"a{number}", work, 600 if number == 0 and not (folder / "killed").exists() else 0.2)
            for number in range(6)]  # fmt: skip


def test_two_queues_do_nothing_twice_and_the_runs_of_one_that_is_killed_end_and_are_done(tmp_path, capsys):
    first = Started(run_queue, tmp_path, 1, folder=tmp_path, log=tmp_path / "first.log")
    try:
        wait_until(lambda: list(tmp_path.glob("a0/began-*")), first)

        def kill():
            wait_until(lambda: len(records(tmp_path)) >= 3)
            (tmp_path / "killed").touch()
            os.kill(first.pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        Queue(IMPORTED, 2).run([*shared_jobs(tmp_path)[1:], job(tmp_path / "a0", work, 0.1)])
        thread.join()
    finally:
        first.kill()
    assert len(records(tmp_path)) == 6
    begun = {number: len(list(tmp_path.glob(f"a{number}/began-*"))) for number in range(6)}
    assert begun == {0: 2, **dict.fromkeys(range(1, 6), 1)}  # the first was killed with its queue


def test_what_another_process_has_done_is_not_done_again(tmp_path, capsys):
    done = job(tmp_path / "a0", fail)
    (tmp_path / "a0" / "record").write_text("")
    Queue([], 1).run([done])
    assert "[1/1] a0: done by another process" in capsys.readouterr().err


def find_done(folder, callbacks=()):
    """Another process came first, so there is nothing to take a lock for."""
    (folder / "record").touch()


def test_what_another_process_has_done_when_a_run_begins_is_not_called_done_here(tmp_path, capsys):
    queue = Queue(IMPORTED, 1)
    queue.run([job(tmp_path / "a0", find_done), job(tmp_path / "b0")])
    said = capsys.readouterr().err
    assert "[1/2] a0: done by another process" in said and "a0: done in" not in said and "b0: done in" in said
    assert list(queue.seconds) == ["b"] and queue.done == 2


def test_a_process_has_begun_with_a_lock_or_where_there_are_none(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "_begun", set())
    with locked(tmp_path / "a") as mine:
        assert mine and locks.has_begun()
        locks._begun.clear()
        with locked(tmp_path / "a") as again:
            assert not again and not locks.has_begun()

    def no_lock(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_lock)
    with pytest.raises(locks.NoLocks), locked(tmp_path / "b"):
        pass
    assert locks.has_begun()


# ---- how long the rest takes ----------------------------------------------------------------------------------------


def test_the_end_of_all_runs_is_that_of_a_simulation():
    random = np.random.default_rng(0)
    for cores, runs in itertools.product((1, 2, 5), (0, 1, 7)):
        free, seconds = random.integers(0, 50, cores).tolist(), random.integers(1, 50, runs).tolist()
        waiting, busy, now = list(seconds), list(free), 0
        while waiting or any(busy):  # second by second
            for core in range(cores):
                if not busy[core] and waiting:
                    busy[core] = waiting.pop(0)
            now += any(busy)
            busy = [max(0, left - 1) for left in busy]
        assert makespan(free, seconds) == now


@pytest.fixture
def still(monkeypatch):
    """The queue's clock stands still."""
    monkeypatch.setattr(queue_module, "time", SimpleNamespace(monotonic=lambda: NOW))


NOW = 1000.0


def running(name, started, first=None, share=0.0):
    one = _Running(Job(name, name[0], Path(name), None, (), None), None, None, started=NOW - started)
    one.first, one.share = first and (NOW - first[0], first[1]), share
    return one


def left(cores, seconds, busy, waiting):
    queue = Queue([], cores, seconds)
    queue.running, queue.waiting = busy, [Job(name, name[0], Path(name), None, (), None) for name in waiting]
    return queue._seconds_left()


def test_the_rest_takes_as_long_as_runs_of_the_same_row_took(still):
    assert left(1, {"a": [90, 110], "b": [10]}, [], ["a1", "b1", "a2"]) == 210
    assert left(2, {"a": [100], "b": [10]}, [], ["a1", "b1", "b2"]) == 100
    assert left(1, {"a": [100], "b": [10]}, [], ["c0"]) == 55  # a row without a run is like the others
    assert left(1, {}, [], ["a0"]) is None
    assert left(1, {"a": [100]}, [running("a1", 30)], ["a2"]) == pytest.approx(170)


def test_a_running_run_is_judged_by_its_own_speed(still):
    """It went on from half of its steps: 10 % in 20 seconds since, so 40 % take 80 more."""
    one = running("a1", 25, (20, 0.5), 0.6)
    assert one.seconds_left(1000) == pytest.approx(80)
    # With no finished run this is how long others take too: 25 s and the 80.
    assert left(1, {}, [one], ["b0"]) == pytest.approx(80 + 105)
    assert running("a1", 90, (80, 0.1), 1.0).seconds_left(100) == pytest.approx(10)  # the test is left
    assert running("a1", 90, (80, 0.1), 1.0).seconds_left(None) == 0
    assert running("a1", 5).seconds_left(None) is None


def test_durations_are_hours_minutes_seconds():
    assert [duration(s) for s in (0.4, 61, 3725.2)] == ["0:00", "1:01", "1:02:05"]
