"""Episodes of an evaluation: kept one by one, shared by processes, gone on with after a kill."""

import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("diffusers", reason="the robotics extra is not installed")
pytest.importorskip("gym_pusht", reason="the robotics extra is not installed")

import torch

from tasks.robotics import episodes, evaluate
from tasks.robotics.episodes import EpisodeStore, Wanted, play, play_in_processes
from tasks.robotics.rollout import Episode
from tests.each import each
from tests.processes import Started, wait_until

pytestmark = pytest.mark.slow


def rolled(wanted: Wanted) -> Episode:
    """An outcome that follows from the seed, with a frame of one's own."""
    frames = [np.full((4, 4, 3), wanted.seed % 256, np.uint8)] * bool(wanted.picture_size)
    return Episode(wanted.seed, bool(wanted.seed % 2), wanted.seed / 7, wanted.seed + 1, 0.25, frames)


def same(one: list[Episode], other: list[Episode]) -> bool:
    fields = ("seed", "success", "max_reward", "steps", "coverage")
    assert len(one) == len(other) > 0
    return all(
        [getattr(a, name) for name in fields] == [getattr(b, name) for name in fields]
        and np.array_equal(a.frames, b.frames)
        for a, b in zip(one, other, strict=True)
    )


# ---- the store ------------------------------------------------------------------------------------------------------


def test_episodes_are_read_as_they_were_written(tmp_path):
    store = EpisodeStore(tmp_path, {"a": 1})
    store.prepare()
    wanted = [Wanted(3, 4), Wanted(5)]
    assert [store.read(each) for each in wanted] == [None, None]
    expected = [rolled(each) for each in wanted]
    for episode, own in zip(expected, wanted, strict=True):
        store.write(episode, own)
    assert same([store.read(each) for each in wanted], expected)
    assert store.read(Wanted(5, 4)) is None  # it has no frames
    assert json.loads((store.folder / "conditions.json").read_text()) == {"a": 1}
    assert EpisodeStore(tmp_path, {"a": 2}).read(wanted[1]) is None
    assert EpisodeStore(tmp_path, {"a": 1}).name == store.name


@each(
    "text",
    ["", "[]", "{", '{"seed": 3}', '{"seed": 4, "success": true, "max_reward": 1, "steps": 1, "coverage": null}'],
)
def test_a_damaged_episode_is_named(tmp_path_factory, text):
    store = EpisodeStore(tmp_path_factory.mktemp("episodes"), {})
    store.prepare()
    store.write(rolled(Wanted(3)), Wanted(3))
    path = next(store.folder.glob("seed_*3.json"))
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path} or its frames are damaged .*; remove them"):
        store.read(Wanted(3))


def test_only_what_is_missing_is_played(tmp_path):
    store, played = EpisodeStore(tmp_path, {}), []
    store.prepare()
    store.write(rolled(Wanted(2)), Wanted(2))
    wanted = [Wanted(seed, 4 * (seed < 2)) for seed in range(4)]
    told = []
    found = play(store, wanted, lambda each: played.append(each.seed) or rolled(each), lambda e: told.append(e.seed))
    assert played == [0, 1, 3] and told == [0, 1, 2, 3]
    assert same(found, [rolled(each) for each in wanted])


# ---- several processes ----------------------------------------------------------------------------------------------


def play_and_note(store, wanted, notes, die_at=None):
    """Play; each episode is noted by its process. The first process to play `die_at` kills itself instead."""

    def roll(each):
        with Path(notes).open("a") as file:
            file.write(f"{each.seed} {os.getpid()}\n")
        if each.seed == die_at and Path(notes).read_text().split()[::2].count(str(die_at)) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return rolled(each)

    play(store, wanted, roll)


def test_two_processes_share_the_episodes_and_one_that_is_killed_leaves_its_own_to_the_other(tmp_path):
    store, notes = EpisodeStore(tmp_path / "episodes", {}), tmp_path / "notes"
    store.prepare()
    wanted = [Wanted(seed) for seed in range(9)]
    for _ in play_in_processes(2, store, wanted, play_and_note, str(notes), 3):
        pass
    lines = [line.split() for line in notes.read_text().splitlines()]
    seeds = sorted(int(seed) for seed, _ in lines)
    assert seeds == sorted([*range(9), 3])  # 3 twice, all others once
    assert same([store.read(each) for each in wanted], [rolled(each) for each in wanted])
    assert not [*store.folder.glob("*.partial")]


def test_two_evaluations_in_one_folder_play_each_episode_once(tmp_path):
    store, notes = EpisodeStore(tmp_path / "episodes", {}), tmp_path / "notes"
    store.prepare()
    wanted = [Wanted(seed, 4) for seed in range(20)]
    processes = [
        Started(play_and_note, store, wanted, str(notes), folder=tmp_path, log=tmp_path / "log") for _ in range(2)
    ]
    assert [process.wait(100) for process in processes] == [0, 0], (tmp_path / "log").read_text()
    assert sorted(int(line.split()[0]) for line in notes.read_text().splitlines()) == [*range(20)]
    assert same([store.read(each) for each in wanted], [rolled(each) for each in wanted])


def refuse(store, wanted):
    raise OSError("there is no simulator")


def stumble(store, wanted):
    raise SystemExit(3)


def test_what_a_process_raises_is_raised(tmp_path):
    store = EpisodeStore(tmp_path, {})
    with pytest.raises(OSError, match="there is no simulator"):
        list(play_in_processes(2, store, [Wanted(0), Wanted(1)], refuse))
    with pytest.raises(RuntimeError, match="failed with exit status 3"):
        list(play_in_processes(1, store, [Wanted(0)], stumble))


def never_end(store, wanted, notes):
    Path(notes, str(os.getpid())).touch()
    time.sleep(1000)


def play_for_ever(notes):
    for _ in play_in_processes(2, EpisodeStore(Path(notes), {}), [Wanted(0), Wanted(1)], never_end, notes):
        pass


def alive(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # also if it ends between opening and reading
        return False


def test_processes_end_when_the_one_that_started_them_is_killed(tmp_path):
    (tmp_path / "notes").mkdir()
    process = Started(play_for_ever, str(tmp_path / "notes"), folder=tmp_path, log=tmp_path / "log")
    wait_until(lambda: len(list((tmp_path / "notes").iterdir())) == 2, process)
    players = [path.name for path in (tmp_path / "notes").iterdir()]
    assert all(alive(pid) for pid in players)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    wait_until(lambda: not any(alive(pid) for pid in players))


# ---- the command ----------------------------------------------------------------------------------------------------


def evaluated(saved, out, *options):
    arguments = [str(saved), "--seed", "70", "--max-steps", "12", "--sampling-steps", "2", "--out", str(out), *options]
    assert evaluate.main(arguments) == 0
    newest = max(out.glob("results_test*.json"), key=lambda path: path.stat().st_mtime_ns)
    return json.loads(newest.read_text())


def outcome(results):
    return {key: results[key] for key in ("metrics", "episodes", "config", "film")}


def die_at_the_third(arguments):
    """The command, killed when it begins its third episode."""
    played, rollout = [], evaluate.rollout

    def counted(*given):
        played.append(1)
        if len(played) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return rollout(*given)

    evaluate.rollout = counted
    evaluate.main(arguments)


def test_a_killed_evaluation_goes_on_and_processes_do_not_change_the_results(saved, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "FRAME_SIZE", 32)
    monkeypatch.setattr(evaluate, "PICTURED", 2)
    threads = torch.get_num_threads()
    whole = evaluated(saved, tmp_path / "whole", "--episodes", "6")
    assert torch.get_num_threads() == threads
    assert whole["played_now"] == 6 and [each["seed"] for each in whole["episodes"]] == [*range(70, 76)]

    out = tmp_path / "killed"
    arguments = [str(saved), "--seed", "70", "--max-steps", "12", "--sampling-steps", "2", "--out", str(out)]
    process = Started(
        die_at_the_third, [*arguments, "--episodes", "6"], folder=tmp_path, log=tmp_path / "log", here=True
    )
    assert process.wait(200) == -signal.SIGKILL
    kept = {path: path.stat().st_mtime_ns for path in (out / "episodes").rglob("seed_*")}
    assert len([path for path in kept if path.suffix == ".json"]) == 2 and not (out / "results_test.json").exists()
    capsys.readouterr()
    resumed = evaluated(saved, out, "--episodes", "6", "--jobs", "2")
    assert resumed["played_now"] == 4 and outcome(resumed) == outcome(whole)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    written = capsys.readouterr()
    assert "6/6" in written.err and re.search(r"actions=[1-9]", written.err)  # the progress
    assert (out / "episodes.png").read_bytes() == (tmp_path / "whole" / "episodes.png").read_bytes()

    plain = (out / "results_test.json").read_bytes()
    more = evaluated(saved, out, "--episodes", "7")
    assert more["played_now"] == 1 and more["episodes"][:6] == whole["episodes"]
    other = evaluated(saved, out, "--episodes", "1", "--sampler", "ddpm")
    assert other["played_now"] == 1 and len(list((out / "episodes").iterdir())) == 2
    # No results, picture or film of one evaluation replaces those of another.
    assert (out / "results_test.json").read_bytes() == plain and len(list(out.glob("episodes*.png"))) == 3
    names = sorted(path.stem.rpartition("_")[0] for path in out.glob("results_test_*.json"))
    assert names == ["results_test_episodes", "results_test_episodes-sampler"]
    assert all((out / each["film"]).is_file() for each in (resumed, more, other))
    assert len({each["film"] for each in (resumed, more, other)}) == 3


def test_a_second_evaluation_waits_for_the_episode_that_another_plays(saved, tmp_path, monkeypatch):
    """Its lock is held here; it is let go when the evaluation has looked for it twice, and then played."""
    looks, held = [], []
    monkeypatch.setattr(episodes.time, "sleep", lambda seconds: looks.append(1) or (len(looks) == 2 and held.pop()()))
    found = evaluate.Rollouts(episodes=1, seed=70, max_steps=4, sampling_steps=2)
    policy = evaluate.load_policy(saved, found)
    store = EpisodeStore(tmp_path / "episodes", evaluate.conditions(policy, saved, found))
    store.prepare()
    claim = store.claimed(70)
    assert claim.__enter__()
    held.append(lambda: claim.__exit__(None, None, None))
    results = evaluate.evaluate(saved, found, tmp_path)
    assert len(looks) == 2 and results["played_now"] == 1 and len(results["episodes"]) == 1
