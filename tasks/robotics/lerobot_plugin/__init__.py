"""What lerobot finds with --env.discover_packages_path=tasks.robotics.lerobot_plugin: a policy and an environment.

lerobot imports every module of this folder, which registers them, and finds `modeling_...` and `processor_...` next to
`configuration_...`. Nothing else imports these modules, and they need lerobot (docs/lerobot.md).
"""
