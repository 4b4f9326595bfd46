"""A small file of demonstrations without a simulator, and configurations that train on it."""

from pathlib import Path

import numpy as np

from tasks.robotics.formats import Episode, write_demonstrations
from tests.tasks.robotics.tiny import tiny_config

SETTINGS = {
    "environment": "lift",
    "action": "of this test",
    "frame": "none",
    "controller": {},
    "control_hz": 20,
    "versions": {},
    "image_mode": {},
    "image_size": 40,
    "cameras": ["agentview", "robot0_eye_in_hand"],
}


def write_walk(folder: Path) -> Path:
    """Eleven episodes whose actions follow from their observations."""
    paths = []
    generator = np.random.default_rng(0)
    for seed in range(11):
        length = int(generator.integers(20, 26))
        walk = np.cumsum(generator.normal(0, 0.2, (length, 3)), 0)
        images = np.broadcast_to(np.clip(128 + 60 * walk[:, 0], 0, 255)[:, None, None, None], (length, 40, 40, 3))
        paths.append(folder / f"{seed}.npz")
        Episode(
            seed=seed,
            actions=np.concatenate([walk, walk[:, :1]], 1),
            executed=np.zeros((length, 4)),
            states=walk,
            rewards=np.zeros(length),
            dones=np.zeros(length, bool),
            observations={
                "agentview_image": images.astype(np.uint8),
                "robot0_eye_in_hand_image": images.astype(np.uint8),
                "position": walk.astype(np.float32),
            },
        ).save(paths[-1])
    write_demonstrations(folder / "walk.hdf5", paths, SETTINGS)
    return folder / "walk.hdf5"


def configuration(demonstrations: Path, out: Path, **trainer) -> dict:
    """Ten steps from the state alone, a checkpoint every four."""
    config = tiny_config()
    policy = {"action_size": 4, "observations": {"position": [3]}}
    for key in ("widths", "kernel_size", "groups", "step_embedding_size", "sampler", "sampling_steps"):
        policy[key] = getattr(config, key)
    trainer = {
        "output_dir": str(out),
        **{"steps": 10, "batch_size": 16, "learning_rate": 1e-3, "warmup_steps": 2, "log_steps": 3},
        **{"save_steps": 4, "validate_steps": 5, "disable_tqdm": True, **trainer},
    }
    return {"data": {"path": str(demonstrations)}, "policy": policy, "encoder": {}, "trainer": trainer}


def with_cameras(config: dict) -> dict:
    """The same with two cameras, whose encoders drop paths: the order of all draws counts."""
    tiny = tiny_config()
    images = {"agentview_image": [40, 40, 3], "robot0_eye_in_hand_image": [40, 40, 3]}
    config["policy"]["observations"] |= images
    for key in ("image_size", "crop", "reconstruction_size", "decoder_width", "decoder_positions"):
        config["policy"][key] = getattr(tiny, key)
    config["encoder"] = {**tiny.encoder, "drop_path_rate": 0.2}
    return config
