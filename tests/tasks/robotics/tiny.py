"""A policy of a few thousand parameters, and what it sees."""

from pathlib import Path

import numpy as np
import torch

from tasks.robotics.environments import make_environment
from tasks.robotics.formats import Episode, write_demonstrations
from tasks.robotics.normalizer import Normalizer
from tasks.robotics.policy import CrosswayPolicy
from tasks.robotics.policy_config import PolicyConfig

# What makes a row of configs/experiments/fib_table6.yaml small, and a step of it.
SMALL_TABLE_6 = [
    *("policy.widths=[16, 32]", "policy.decoder_width=8", "policy.step_embedding_size=8", "encoder.preset=null"),
    *("encoder.hidden_size=16", "encoder.num_hidden_layers=1", "encoder.num_attention_heads=2"),
    *("encoder.intermediate_size=16", "trainer.epochs=null", "trainer.steps=1", "trainer.batch_size=2"),
    "trainer.disable_tqdm=true",
]
MODIFIED = {"support": {"name": "fibottention", "w_min": 9, "w_max": 9, "modified": True}}


def tiny_config(**options) -> PolicyConfig:
    """Two cameras of 32 pixels, of which 24 are seen as 3x3 patches, and a state."""
    encoder = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    encoder |= {"prior": MODIFIED, "initializer_range": 0.2, **options.pop("encoder", {})}
    return PolicyConfig(
        **{
            "observations": {"agentview_image": [40, 40, 3], "hand_image": [40, 40, 3], "position": [3]},
            "action_size": 4,
            "image_size": 32,
            "crop": 24,
            "widths": [16, 32],
            "kernel_size": 3,
            "groups": 4,
            "step_embedding_size": 8,
            "decoder_width": 8,
            "decoder_positions": 4,
            "reconstruction_size": 8,
            "sampler": "ddim",
            "sampling_steps": 5,
            "encoder": encoder,
            **options,
        }
    )


def tiny_policy(seed: int = 0, **options) -> CrosswayPolicy:
    """Its weights follow from the seed."""
    config = tiny_config(**options)
    bounds = {key: ([-2.0] * config.observations[key][0], [2.0] * config.observations[key][0]) for key in config.states}
    bounds["actions"] = ([-1.0] * config.action_size, [3.0] * config.action_size)
    torch.manual_seed(seed)
    return CrosswayPolicy(config, Normalizer(bounds, dict.fromkeys(bounds, 0.01)))


def observations(config: PolicyConfig, batch: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ones as a camera and a robot give them."""
    generator = torch.Generator().manual_seed(seed)
    steps = (batch, config.observation_steps)
    return {
        key: torch.randint(0, 256, (*steps, *shape), generator=generator, dtype=torch.uint8)
        if len(shape) == 3
        else torch.randn(*steps, *shape, generator=generator)
        for key, shape in config.observations.items()
    }


def one_episode(values: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The first sample alone, as a simulator gives it."""
    return {key: value[0].numpy() for key, value in values.items()}


def pusht_policy(seed: int = 0) -> CrosswayPolicy:
    """Of PushT's state, with random weights."""
    config = PolicyConfig(
        observations={"keypoints": [16], "agent_pos": [2]},
        action_size=2,
        widths=[16, 32],
        kernel_size=3,
        groups=4,
        step_embedding_size=8,
        reconstruction_weight=0,
        sampler="ddim",
        sampling_steps=3,
    )
    bounds = {
        key: ([0.0] * size, [512.0] * size) for key, size in (("keypoints", 16), ("agent_pos", 2), ("actions", 2))
    }
    torch.manual_seed(seed)
    return CrosswayPolicy(config, Normalizer(bounds, dict.fromkeys(bounds, 1.0))).eval()


def write_pusht(folder: Path, cameras: tuple[str, ...] = (), episodes: int = 10, steps: int = 20) -> Path:
    """pusht.zarr in a folder: random pushes in the simulator."""
    generator, paths = np.random.default_rng(0), []
    with make_environment("pusht", cameras) as environment:
        for seed in range(episodes):
            seen, states = [environment.reset(seed)], [environment.state()]
            actions = generator.uniform(100, 400, (steps, 2))
            for action in actions:
                seen.append(environment.step(action)[0])
                states.append(environment.state())
            paths.append(folder / f"{seed}.npz")
            Episode(
                seed=seed,
                actions=actions,
                executed=actions,
                states=np.array(states[:-1]),
                rewards=np.zeros(steps),
                dones=np.zeros(steps, bool),
                observations={key: np.stack([step[key] for step in seen[:-1]]) for key in seen[0]},
            ).save(paths[-1])
        write_demonstrations(folder / "pusht.zarr", paths, environment.settings)
    return folder / "pusht.zarr"
