"""Small data sets by lerobot's own writer, for tests of our reader and writer.

It needs lerobot, in an environment of its own, and nothing of this project:

    python -m venv lerobot && lerobot/bin/pip install lerobot==0.4.4
    lerobot/bin/python tests/tasks/robotics/lerobot/make_fixture.py tests/fixtures/lerobot_v3

One episode after the other is three, five and four steps long. What they hold follows from `frame`.
"""

import shutil
import sys
from pathlib import Path

import numpy as np

LENGTHS = (3, 5, 4)
FPS = 10
TASKS = ("Push the block.", "Pull the block.", "Push the block.")


def frame(episode: int, step: int) -> dict:
    """What one step holds. The images are even and change slowly, so that little is lost in a video."""
    rows, columns = np.indices((64, 64))
    colours = (40 * episode + 2 * rows, 20 * step + 2 * columns, 128 + rows - columns)
    image = np.stack([np.clip(colour, 0, 255) for colour in colours], -1).astype(np.uint8)
    return {
        "observation.images.top": image,
        "observation.image": image[:16, :16],
        "observation.state": np.array([episode, step, 0.5], np.float32),
        "observation.environment_state": np.array([step / 7, -episode], np.float32),
        "action": np.array([episode + step, -step / 3], np.float32),
        "next.reward": np.array([step / 10], np.float32),
        "next.done": np.array([step == LENGTHS[episode] - 1]),
    }


FEATURES = {
    "observation.images.top": {"dtype": "video", "shape": (64, 64, 3), "names": ["height", "width", "channels"]},
    "observation.image": {"dtype": "image", "shape": (16, 16, 3), "names": ["height", "width", "channels"]},
    "observation.state": {"dtype": "float32", "shape": (3,), "names": ["x", "y", "z"]},
    "observation.environment_state": {"dtype": "float32", "shape": (2,), "names": None},
    "action": {"dtype": "float32", "shape": (2,), "names": {"motors": ["x", "y"]}},
    "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
    "next.done": {"dtype": "bool", "shape": (1,), "names": None},
}


def main(root: Path) -> None:
    """Write the data set."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    shutil.rmtree(root, ignore_errors=True)
    dataset = LeRobotDataset.create("sparseprior/fixture", FPS, FEATURES, root=root, robot_type="table")
    for episode, length in enumerate(LENGTHS):
        for step in range(length):
            dataset.add_frame({**frame(episode, step), "task": TASKS[episode]})
        dataset.save_episode()
    dataset.finalize()
    shutil.rmtree(root / "images", ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
