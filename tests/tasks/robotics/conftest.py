"""What tests of robots share: environments are made once, episodes by hand."""

import json
import sys

import numpy as np
import pytest

from tasks.robotics.environments import gl_library, make_environment, use_software_gl

# Before any test imports mujoco, which reads it once.
if "mujoco" not in sys.modules:
    use_software_gl()


@pytest.fixture
def fresh_accelerator():
    """accelerate keeps the precision of the first run in a process."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def environment():
    """Environments by arguments of make_environment, made once."""
    made = {}

    def make(name, cameras=(), image_size=None):
        pytest.importorskip("gym_pusht" if name == "pusht" else "robosuite", reason="needs make robotics")
        if cameras and name != "pusht" and gl_library() is None:
            pytest.skip("no GL library: apt-get install libosmesa6")
        key = name, tuple(cameras), image_size
        if key not in made:
            made[key] = make_environment(*key)
        return made[key]

    yield make
    for each in made.values():
        each.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a policy of PushT's state, with random weights."""
    from tests.tasks.robotics.tiny import pusht_policy

    folder = tmp_path_factory.mktemp("policies") / "policy"
    with make_environment("pusht") as environment:
        about = {"environment": {"name": "pusht", "cameras": []}, "settings": environment.settings}
    pusht_policy().save_pretrained(folder, about)
    return folder


@pytest.fixture(scope="session")
def arm_settings():
    """As an arm's environment has them."""
    return {
        "environment": "lift",
        "action": "position 3, rotation 6 (rows of the matrix), gripper 1",
        "frame": "robot base",
        "controller": {"type": "BASIC", "body_parts": {"right": {"kp": 150, "input_type": "absolute"}}},
        "control_hz": 20,
        "versions": {"robosuite": "1.5.2", "mujoco": "3.9.0"},
        "image_mode": {"samples": 0},
        "image_size": 16,
        "cameras": ["agentview"],
    }


@pytest.fixture(scope="session")
def pusht_settings(arm_settings):
    return arm_settings | {"environment": "pusht", "cameras": ["image"], "versions": {"gym-pusht": "0.1.8"}}


@pytest.fixture(scope="session")
def make_episode():
    """Episode(seed, T): numbers of which each is different."""
    from tasks.robotics.formats import Episode

    def make(seed, steps, task="lift"):
        generator = np.random.default_rng(seed)
        images = generator.integers(0, 256, (steps, 16, 16, 3), dtype=np.uint8)
        size = 2 if task == "pusht" else 10
        low = {"agent_pos": 2, "state": 5, "keypoints": 16} if task == "pusht" else {"robot0_eef_pos": 3, "object": 10}
        seen = {key: generator.normal(size=(steps, width)).astype(np.float32) for key, width in low.items()}
        states = generator.normal(size=(steps, 5))
        if task == "pusht":
            seen["state"] = states.astype(np.float32)
            seen["agent_pos"] = seen["state"][:, :2]
        return Episode(
            seed=seed,
            actions=generator.normal(size=(steps, size)),
            executed=generator.normal(size=(steps, size)),
            states=states,
            rewards=np.linspace(0, 1, steps),
            dones=np.arange(steps) == steps - 1,
            observations={**seen, "image" if task == "pusht" else "agentview_image": images},
        )

    return make


@pytest.fixture
def write_robomimic_file(tmp_path):
    """(lengths, further observations by size, env_kwargs, model in XML) -> a file as robomimic and Diffusion Policy
    publish it: absolute actions in the world, axis angles near half a turn."""
    h5py = pytest.importorskip("h5py", reason="needs make robotics")
    from scipy.spatial.transform import Rotation

    def write(lengths=(6, 4), cameras=("agentview",), further=(), options=None, model=None, task="Lift"):
        path = tmp_path / "image_abs.hdf5"
        generator = np.random.default_rng(0)
        with h5py.File(path, "w") as file:
            arguments = {
                "env_name": task,
                "type": 1,
                "env_version": "1.2.0",
                "env_kwargs": {"controller_configs": {"type": "OSC_POSE", "control_delta": True}, "control_freq": 20},
            }
            arguments["env_kwargs"].update(options or {})
            file.create_group("data").attrs["env_args"] = json.dumps(arguments)
            for index, length in enumerate(lengths):
                demo = file.create_group(f"data/demo_{index}")
                demo.attrs["num_samples"] = length
                if model is not None:
                    demo.attrs["model_file"] = model
                tilts = Rotation.from_euler("xyz", generator.normal(0, 0.1, (length, 3)))
                rotations = tilts * Rotation.from_rotvec([3.1, 0, 0])
                world = generator.uniform((-0.1, -0.1, 0.8), (0.1, 0.1, 1.0), (length, 3))
                demo["actions"] = np.concatenate([world, rotations.as_rotvec(), np.ones((length, 1))], 1)
                for camera in cameras:
                    demo[f"obs/{camera}_image"] = generator.integers(0, 256, (length, 84, 84, 3), dtype=np.uint8)
                demo["obs/robot0_eef_pos"] = world
                for key, size in further:
                    demo[f"obs/{key}"] = generator.normal(size=(length, size))
            file["mask/train"], file["mask/valid"] = np.array([b"demo_0"]), np.array([b"demo_1"])
        return path

    return write


@pytest.fixture
def robomimic_file(write_robomimic_file):
    return write_robomimic_file()
