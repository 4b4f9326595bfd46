"""The simulators by the names under which gymnasium makes them. No simulator is imported here, and no torch."""

from __future__ import annotations

HORIZONS = {"lift": 400, "can": 400, "pusht": 300}  # steps after which the published evaluations give up
GYMNASIUM_IDS = {"lift": "sparseprior/Lift-v0", "can": "sparseprior/Can-v0", "pusht": "sparseprior/PushT-v0"}


def register_environments() -> None:
    """Put GYMNASIUM_IDS into gymnasium's registry. Without gymnasium, which the extra `robotics` brings, nothing is
    done: what needs no simulator works.
    """
    try:
        from gymnasium.envs.registration import register, registry
    except ImportError:
        return
    for task, name in GYMNASIUM_IDS.items():
        if name not in registry:  # gymnasium warns of a second one
            register(
                id=name,
                entry_point="tasks.robotics.gymnasium_env:SimulatorEnv",
                max_episode_steps=HORIZONS[task],
                kwargs={"task": task},
            )
