"""Runs on a Ray cluster of this machine: order, workers that are killed, failures, SIGTERM, and the same records."""

import os
import re
import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_sparseprior.runs.command import RunStopped
from tasks.classification.compare import load_comparison
from tasks.classification.compare import main as compare_main
from tasks.common import ray_queue
from tasks.common.compare import run_comparison
from tasks.common.queue import ATTEMPTS, Queue, RunsFailed
from tasks.common.ray_queue import RayQueue
from tasks.common.records import read_records
from tests.processes import IMPORTED, wait_until
from tests.tasks.common.test_compare import same, write
from tests.tasks.common.test_queue import fail, job, records, work

pytestmark = pytest.mark.slow
HERE, OF_COMMAND = socket.gethostname(), "SPARSEPRIOR_OF_TEST"

# ---- without Ray, and where it is not ------------------------------------------------------------------------------


def test_without_ray_the_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert compare_main(["--config", str(write(tmp_path)), "--out", str(tmp_path / "out"), "--ray", "local"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "ray" in error and "install it with: pip install '.[ray]'" in error
    assert not (tmp_path / "out").exists()


def test_a_cluster_that_is_not_there_is_named(tmp_path, monkeypatch):
    def init(address, **options):
        raise ConnectionError(f"nobody at {address}\nand more words")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    queue = RayQueue([], "auto")
    queue.run([])  # nothing to do
    with pytest.raises(ConnectionError, match=r"^--ray=auto: nobody at auto$"):
        queue.run([job(tmp_path / "a0")])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # a port at which nobody listens
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=rf"^--ray={address}: \[Errno \d+\] Connection refused$"):
            RayQueue([], address).run([job(tmp_path / "a0")])


# ---- a comparison, on a cluster of its own -------------------------------------------------------------------------


def test_the_records_are_those_of_one_process(tmp_path, capsys):
    ray = pytest.importorskip("ray")
    path, out = write(tmp_path, seeds=[0], variants={"violin": {"model": {"prior": "violin"}}}), tmp_path / "out"
    expected = run_comparison(load_comparison(path), tmp_path / "alone", tmp_path / "alone")
    assert compare_main(["--config", str(path), "--out", str(out), "--ray", "local"]) == 0
    assert not ray.is_initialized()
    found = {row: list(runs.values()) for row, runs in read_records(out).items()}
    assert same(found) == same(expected)
    printed = capsys.readouterr()
    assert re.search(rf"^\[1/1\] violin, seed 0: done in \d:\d\d on {HERE}; 0 to do$", printed.err, re.MULTILINE)
    assert (out / "table.md").read_text().strip() in printed.out
    assert (out / "violin" / "seed0.log").read_text()


# ---- what stands for a run -----------------------------------------------------------------------------------------


def parent_of(process):
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def strike(folder, times, number, callbacks=()):
    """Ends Ray's worker, the parent of the server that this process was forked from, so many times."""
    with (folder / "deaths").open("a") as file:
        file.write("x")
    if len((folder / "deaths").read_text()) <= times:
        os.kill(parent_of(os.getppid()), number)
        signal.pause()  # until this process is told to end, because its queue is gone
    work(folder)


@pytest.fixture(scope="module", autouse=True)
def token():
    """Ray would leave one in the user's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
        yield


@pytest.fixture(scope="module")
def cluster():
    """Two workers that ignore Ctrl-C, as when Ray is started in the background of a shell."""
    ray = pytest.importorskip("ray")
    earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)
    ray.init(
        "local", num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20
    )
    signal.signal(signal.SIGINT, earlier)
    os.environ[OF_COMMAND] = "yes"  # Ray's own processes do not have it
    yield ray
    del os.environ[OF_COMMAND]
    ray.shutdown()


@pytest.fixture
def queue(cluster):
    return RayQueue(IMPORTED, "local")


def meet(folder, callbacks=()):
    """Ends when another one like it has begun."""
    (folder / "here").touch()
    wait_until(lambda: len(list(folder.parent.glob("*/here"))) == 2)
    (folder / "record").touch()


def test_two_workers_do_each_run_once_in_order(queue, tmp_path, capsys):
    # Both workers have imported what runs need.
    queue.run([job(tmp_path / "first" / name, meet) for name in ("a0", "b0")])
    capsys.readouterr()
    names = [f"{row}{seed}" for seed in range(3) for row in "ab"]
    queue.run([job(tmp_path / name, work, 0.3) for name in names])
    found = records(tmp_path)
    assert sorted(found) == sorted(names) and len(list(tmp_path.glob("*/began-*"))) == len(names)
    for moment, *_ in found.values():
        assert sum(begin <= moment < end for begin, end, *_ in found.values()) <= 2
    # Two begin at the same time.
    order = sorted(names, key=lambda name: found[name][0])
    assert all(abs(order.index(name) - place) <= 1 for place, name in enumerate(names))
    assert all(rest == [1, 1, 1] for _, _, *rest in found.values())  # threads, OMP_NUM_THREADS, callbacks
    said = capsys.readouterr().err
    assert sorted(re.findall(rf"^\[\d/6\] (\w+): done in 0:\d\d on {HERE}; ", said, re.MULTILINE)) == sorted(names)
    assert re.search(r"\[6/6\] .*; 0 to do\n$", said) and re.search(r"; \d to do, about 0:\d\d left", said)


def test_a_run_whose_worker_dies_is_given_to_another_and_those_that_fail_are_named_and_stop_no_other(
    queue, tmp_path, capsys
):
    jobs = [job(tmp_path / "a0", fail), job(tmp_path / "b0", strike, 99, signal.SIGTERM), job(tmp_path / "c0")]
    with pytest.raises(RunsFailed) as failed:
        queue.run([*jobs, job(tmp_path / "d0", strike, 1, signal.SIGKILL)])
    lines = str(failed.value).splitlines()
    assert lines[:2] == ["2 of 4 runs failed:", f"a0: a0: a0 has a bad value ({tmp_path}/a0.log)"]
    assert lines[2:] == [f"b0: its worker died {ATTEMPTS} times ({HERE} was asked to end it)"]
    assert sorted(records(tmp_path)) == ["c0", "d0"]
    assert [len((tmp_path / name / "deaths").read_text()) for name in ("b0", "d0")] == [ATTEMPTS, 2]
    said = capsys.readouterr().err
    for name, reason in (("b0", HERE), ("d0", r"WorkerCrashedError: .+")):
        assert re.search(rf"{name}: its worker died \({reason}.*\); it is put back", said)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, RunStopped), (signal.SIGINT, KeyboardInterrupt)])
def test_told_to_stop_it_ends_its_runs(queue, tmp_path, number, error, interruptible):
    def stop():
        wait_until(lambda: len(list(tmp_path.glob("*/began-*"))) == 2)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(error):
        queue.run([job(tmp_path / name, work, 600) for name in ("a0", "b0", "c0")])
    thread.join()
    for path in tmp_path.glob("*/began-*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name.partition("-")[2]), 0)
    assert not (tmp_path / "c0" / "record").exists() and not list(tmp_path.glob("c0/began-*"))
    Queue(IMPORTED, 1).run([job(tmp_path / "a0")])
    assert sorted(records(tmp_path)) == ["a0"]


def test_a_record_that_is_not_seen_here_says_that_the_disk_is_not_shared(queue, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_queue, "SETTLE", 0.5)
    one = replace(job(tmp_path / "a0"), is_done=lambda: False)
    with pytest.raises(RunsFailed, match=rf"a0: done on {HERE}, but not seen here; --ray needs a disk that all share"):
        queue.run([one])


def see_variables(folder, callbacks=()):
    (folder / "record").write_text(f"{os.environ.get(OF_COMMAND)} {os.getcwd()} {'ray' in sys.modules}")


def test_a_run_has_the_folder_and_the_variables_of_the_command(queue, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    queue.run([job(tmp_path / "a0", see_variables)])
    assert (tmp_path / "a0" / "record").read_text() == f"yes {tmp_path} False"
