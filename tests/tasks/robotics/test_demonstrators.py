import json

import numpy as np
import pytest
from PIL import Image

from hf_sparseprior.runs.locks import locked
from tasks.robotics import demonstrate as command
from tasks.robotics.demonstrate import AFTER_SUCCESS, demonstrate, main, make_demonstrator, record, replay
from tasks.robotics.environments import gl_library, make_environment
from tasks.robotics.formats import open_demonstrations
from tasks.robotics.video import contact_sheet, write_video
from tests.each import each

pytestmark = pytest.mark.slow

pytest.importorskip("h5py", reason="needs make robotics")
FRAMES = [np.full((32, 48, 3), (20 * index, 100, 200 - 20 * index), dtype=np.uint8) for index in range(6)]


@pytest.mark.parametrize("task", ["lift", "can"])
def test_arm_demonstrations_solve_the_task(environment, task):
    arm = environment(task)
    episode = record(arm, make_demonstrator(arm), 0)
    assert episode is not None and episode.dones[-1] and arm.success()
    # Solved for some steps, so that a policy sees what to do after.
    assert episode.dones.sum() >= AFTER_SUCCESS and len(episode.actions) < command.STEPS[task]
    # Labels are clean, what was executed is not: the goal is at most 5 cm ahead in the labels alone.
    noise = (episode.executed - episode.actions)[:, :3]
    assert 0.01 < noise.std() < 0.03 and np.array_equal(episode.executed[:, 3:], episode.actions[:, 3:])
    ahead = np.linalg.norm(episode.actions[:, :3] + arm._base()[0] - episode.observations["robot0_eef_pos"], axis=1)
    assert ahead.max() < 0.0501


def test_pusht_demonstrations_solve_the_task(environment):
    pusht = environment("pusht")
    demonstrator = make_demonstrator(pusht)
    solved = [record(pusht, demonstrator, seed) for seed in range(3)]
    assert sum(episode is not None for episode in solved) >= 2
    assert all(episode.rewards[-1] == 1 for episode in solved if episode is not None)


def test_imagined_steps_move_pusher_and_block_as_real_ones_do(environment):
    """Bit for bit, in and out of contact: pushes towards the block, away from it, and against the walls."""
    real, imagined = environment("pusht"), make_environment("pusht")
    generator, touched = np.random.default_rng(0), 0
    for seed in range(3):
        for table in (real, imagined):
            table.reset(seed)
        imagined.ignore_contacts()
        for step in range(25):
            target = real.state()[2:4] + generator.normal(0, 20, 2) if step % 5 else generator.uniform(-50, 560, 2)
            touched += real.step(target)[3]["contacts"] > 0
            imagined.pull(target)
            assert np.array_equal(real.state(), imagined.state())
            assert np.array_equal(real.keypoints(), imagined.keypoints())
            assert real._env.agent.velocity == imagined._env.agent.velocity
    assert touched > 10


@pytest.fixture(scope="module")
def lift_file(environment, tmp_path_factory):
    environment("lift")
    out, draw = tmp_path_factory.mktemp("lift") / "lift.hdf5", command.draw

    def draw_beginnings(simulator, demonstrations, path):
        """OpenGL in software takes most of it."""
        read = demonstrations.read
        demonstrations.read = lambda name, key: read(name, key)[:8]
        draw(simulator, demonstrations, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "draw", draw_beginnings)
        demonstrate("lift", out, 2, seed=20)
    return out


def test_what_is_written(lift_file):
    demonstrations = open_demonstrations(lift_file)
    assert list(demonstrations.seeds.values()) == [20, 21]
    results = json.loads((lift_file.parent / "lift.hdf5.json").read_text())
    assert results["episodes"] == 2 and results["success"] == 2 / results["attempts"]
    assert results["settings"] == demonstrations.settings
    drawn = {"lift.hdf5.mp4", "lift.hdf5.png"} if gl_library() else set()
    assert {path.name for path in lift_file.parent.iterdir()} == {"lift.hdf5", "lift.hdf5.json"} | drawn


def test_without_gl_pictures_alone_are_left_out(environment, tmp_path, monkeypatch, capsys):
    environment("lift")
    monkeypatch.setattr(command, "record", lambda environment, _, seed: make_episode_of(environment, seed))
    monkeypatch.setenv("MUJOCO_GL", "disable")
    out = tmp_path / "lift.hdf5"
    assert main(["lift", str(out), "--episodes", "1", "--seed", "20"]) == 0
    assert "no pictures: no GL library: apt-get install libosmesa6" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"lift.hdf5", "lift.hdf5.json"}


def test_replaying_gives_the_same_states_and_solves_the_task(lift_file):
    found = replay(lift_file)
    assert found["episodes"] == 2 and found["executed"] == 1 and found["state_error"] == 0
    assert found["recorded"] >= 1 / 2


def test_an_interrupted_recording_goes_on_and_a_seed_gives_the_same_demonstration(lift_file, tmp_path, monkeypatch):
    out = tmp_path / "lift.hdf5"
    seeds = []

    def stops(environment, demonstrator, seed):
        seeds.append(seed)
        if len(seeds) == 2:
            raise KeyboardInterrupt
        return record(environment, demonstrator, seed)

    monkeypatch.setattr(command, "record", stops)
    monkeypatch.setattr(command, "draw", lambda *_: None)
    arguments = ["lift", str(out), "--episodes", "2", "--seed", "20"]
    assert main(arguments) == 130 and not out.exists()
    # Another run must not take these episodes for its own.
    assert main([*arguments[:-1], "21"]) == 2 and not out.exists()
    assert main(arguments) == 0 and seeds == [20, 21, 21]
    ours, theirs = open_demonstrations(out), open_demonstrations(lift_file)
    for name in theirs.episodes:
        assert np.array_equal(ours.episode(name).states, theirs.episode(name).states)
        for key in ("actions", "executed_actions", *theirs.shapes):
            assert np.array_equal(ours.read(name, key), theirs.read(name, key))
    assert {path.name for path in tmp_path.iterdir()} == {"lift.hdf5", "lift.hdf5.json"}


def test_two_recordings_of_one_file_are_not_made_at_once(tmp_path, capsys):
    out = tmp_path / "lift.hdf5"
    with locked(tmp_path / "lift.hdf5.lock") as mine:
        assert mine and main(["lift", str(out), "--episodes", "2"]) == 2
    error = capsys.readouterr().err
    assert f"{out} is in use by process" in error and error.count("\n") == 1


@pytest.mark.parametrize("kind", ["write_results", "draw"])
def test_what_lies_next_to_the_file_is_made_after_an_interruption(environment, tmp_path, monkeypatch, kind):
    """The file is whole, and JSON or pictures are not."""
    environment("pusht")
    monkeypatch.setattr(command, "record", lambda environment, _, seed: make_episode_of(environment, seed))
    monkeypatch.setattr(command, "picture_problem", lambda _: None)
    arguments = ["pusht", str(tmp_path / "p.zarr"), "--episodes", "2"]

    def dies(*_):
        raise KeyboardInterrupt

    drawn = []
    with monkeypatch.context() as patch:
        patch.setattr(command, kind, dies)
        assert main(arguments) == 130
    assert (tmp_path / "p.zarr").exists()
    monkeypatch.setattr(command, "draw", lambda *_: drawn.append(1))
    assert main(["pusht", str(tmp_path / "p.zarr"), "--episodes", "3"]) == 2
    monkeypatch.setattr(command, "record", lambda *_: pytest.fail("an episode was played again"))
    assert main(arguments) == 0 and drawn == [1]
    assert {path.name for path in tmp_path.iterdir()} == {"p.zarr", "p.zarr.json"}
    assert main(arguments) == 2  # it is finished


def test_failures_are_counted_and_left_out(environment, tmp_path, monkeypatch, capsys):
    environment("pusht")

    def half(environment, demonstrator, seed):
        if seed % 2:
            return None
        environment.reset(seed)
        return make_episode_of(environment, seed)

    monkeypatch.setattr(command, "record", half)
    monkeypatch.setattr(command, "draw", lambda *_: None)
    assert main(["pusht", str(tmp_path / "p.zarr"), "--episodes", "3"]) == 0
    assert "3 of 5 attempts solved" in capsys.readouterr().out
    results = json.loads((tmp_path / "p.zarr.json").read_text())
    assert results["failed_seeds"] == [1, 3] and results["success"] == 0.6
    assert list(open_demonstrations(tmp_path / "p.zarr").seeds.values()) == [0, 2, 4]


def make_episode_of(environment, seed):
    from tasks.robotics.formats import Episode

    observation = environment.reset(seed)
    return Episode(
        seed=seed,
        actions=np.ones((2, environment.action_size)),
        executed=np.ones((2, environment.action_size)),
        states=np.stack([environment.state()] * 2),
        rewards=np.ones(2),
        dones=np.ones(2, dtype=bool),
        observations={key: np.stack([value] * 2) for key, value in observation.items()},
    )


def test_a_task_that_is_never_solved_ends(environment, tmp_path, monkeypatch, capsys):
    environment("pusht")
    monkeypatch.setattr(command, "record", lambda *_: None)
    assert main(["pusht", str(tmp_path / "p.zarr"), "--episodes", "3"]) == 2
    assert "20 episodes in a row failed, the last with seed 19" in capsys.readouterr().err


@each(
    "arguments, words",
    [
        (["lift", "OUT", "--episodes", "0"], "--episodes 0 must be 1 or more"),
        (["lift", "FILE"], "exists already"),
        (["lift", "OUT", "--seed", "-1"], "--seed=-1 must be an integer of 0 or more"),
        (["lift", "OUT", "--seed", "50000"], "--seed 50000 reaches 50000 after 0 attempts"),
        (["--replay", "OUT"], "no demonstrations at"),
    ],
)
def test_wrong_arguments(lift_file, tmp_path, capsys, arguments, words):
    places = {"OUT": str(tmp_path / "out.hdf5"), "FILE": str(lift_file)}
    assert main([places.get(word, word) for word in arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and not (tmp_path / "out.hdf5").exists()


# ---- films ----------------------------------------------------------------------------------------------------------


def test_films(tmp_path):
    av = pytest.importorskip("av", reason="needs make robotics")
    path = write_video(tmp_path / "film.mp4", FRAMES, fps=20)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        assert stream.average_rate == 20 and len(frames) == len(FRAMES)
    # H.264 loses some; colours that are 20 apart stay apart.
    for frame, wanted in zip(frames, FRAMES, strict=True):
        assert np.abs(frame.astype(int) - wanted).max() < 10
    assert [found.name for found in tmp_path.iterdir()] == ["film.mp4"]


def test_films_as_gif(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    path = write_video(tmp_path / "film.mp4", FRAMES, fps=10)
    assert path == tmp_path / "film.gif"
    with Image.open(path) as film:
        assert film.n_frames == len(FRAMES) and film.size == (48, 32) and film.info["duration"] == 100


def test_films_of_nothing_are_refused(tmp_path):
    for frames in ([], [FRAMES[0], FRAMES[0][:16]], [FRAMES[0].astype(float)]):
        with pytest.raises(ValueError, match="a film needs frames"):
            write_video(tmp_path / "film.gif", frames, fps=10)
    with pytest.raises(ValueError, match=r"film.avi must end in .mp4 or .gif"):
        write_video(tmp_path / "film.avi", FRAMES, fps=10)


def test_contact_sheet():
    sheet = np.asarray(contact_sheet([FRAMES, FRAMES[::-1]], columns=3, gap=2))
    assert sheet.shape == (2 * 34 - 2, 3 * 50 - 2, 3)
    # First, middle (of six frames the third, as numpy rounds 2.5) and last; the second row the other way round.
    assert [sheet[5, column, 0] for column in (5, 55, 105)] == [0, 40, 100]
    assert [sheet[40, column, 0] for column in (5, 105)] == [100, 0] and sheet[33, 5].tolist() == [255, 255, 255]
