"""What lerobot reads of a data set that our writer wrote, against the demonstrations that went into it.

    python -m tests.tasks.robotics.lerobot.check_written write FOLDER       # in this project's environment
    lerobot/bin/python tests/tasks/robotics/lerobot/check_written.py read FOLDER     # in lerobot's (make_fixture.py)

FOLDER gets data sets with images as video and as PNG and expected.npz.
"""

import sys
from pathlib import Path

import numpy as np

KINDS = ("video", "image")
BACKEND = "pyav"  # torchcodec needs FFmpeg of the system


def write(folder: Path) -> None:
    """Three episodes of PushT, pushed at random."""
    from tasks.robotics.formats import open_demonstrations, write_lerobot
    from tasks.robotics.formats.episode import Episode
    from tests.tasks.robotics.tiny import write_pusht

    folder.mkdir(parents=True)
    zarr = open_demonstrations(write_pusht(folder, ("image",), episodes=3, steps=12))
    episodes = [Episode.load(folder / f"{seed}.npz") for seed in range(3)]
    for kind in KINDS:
        write_lerobot(folder / kind, episodes, zarr.settings, kind)
    arrays = {
        "action": np.concatenate([each.actions for each in episodes]),
        "observation.state": np.concatenate([each.observations["agent_pos"] for each in episodes]),
        "observation.environment_state": np.concatenate([each.observations["keypoints"] for each in episodes]),
        "observation.image": np.concatenate([each.observations["image"] for each in episodes]),
        "states": np.concatenate([each.states for each in episodes]),
    }
    np.savez(folder / "expected.npz", **arrays)


def read(folder: Path) -> None:
    """Every item, and pairs of times, as lerobot's training asks for them."""
    import torch
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    expected = dict(np.load(folder / "expected.npz"))
    for kind in KINDS:
        dataset = LeRobotDataset("sparseprior/check", root=folder / kind, video_backend=BACKEND)
        assert dataset.meta.total_episodes == 3 and len(dataset) == len(expected["action"]) == 36
        worst = {key: 0.0 for key in expected}
        for index in range(len(dataset)):
            item = dataset[index]
            assert item["task"].startswith("Push the T") and int(item["frame_index"]) == index % 12
            for key, values in expected.items():
                wanted = torch.as_tensor(values[index])
                if key == "observation.image":
                    wanted = wanted.permute(2, 0, 1) / 255
                worst[key] = max(worst[key], float((item[key].double() - wanted.double()).abs().mean()))
        print(kind, {key: f"{value:.2g}" for key, value in worst.items()})
        limit = 0.01 if kind == "video" else 1e-6
        assert worst.pop("observation.image") < limit and max(worst.values()) < 1e-4
        times = {"observation.image": [-0.1, 0.0], "action": [0.0, 0.1, 0.2]}
        pair = LeRobotDataset("sparseprior/check", root=folder / kind, delta_timestamps=times, video_backend=BACKEND)[
            13
        ]
        shown = torch.as_tensor(expected["observation.image"][12:14]).permute(0, 3, 1, 2) / 255
        assert float((pair["observation.image"] - shown).abs().mean()) < 0.01
        assert np.allclose(pair["action"], expected["action"][13:16], atol=1e-4)


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
