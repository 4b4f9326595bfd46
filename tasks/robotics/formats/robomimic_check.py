"""What of robomimic's published demonstrations the simulator here makes alike, and what it does not.

A published file says how its environment was made (`env_args`), and each episode has its model in MuJoCo's XML
(`model_file`). Between versions of robosuite names changed and controllers moved into a composite one. So values are
compared, not versions: bodies, masses, joints, motors, shapes that collide and cameras of the model, and the settings
of the controller that act on absolute actions. Colours, textures and shapes that are only seen are not compared.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from tasks.robotics.environment import Environment

# Of each kind of element what moves the robot, the objects or the camera.
ATTRIBUTES = {
    "body": ("pos", "quat"),
    "inertial": ("mass", "pos", "quat", "diaginertia"),
    "joint": ("type", "axis", "pos", "range", "limited", "damping", "armature", "frictionloss"),
    "geom": ("type", "size", "pos", "quat", "friction", "density", "mass", "solref", "solimp", "condim", "mesh"),
    "camera": ("pos", "quat", "fovy"),
    "motor": ("ctrlrange", "ctrllimited", "gear"),
    "position": ("ctrlrange", "ctrllimited", "forcerange", "gear", "kp"),
}
# robosuite draws the cube's half sides when it makes the model, metres.
DRAWN = {"geom cube_g0": ("size", 0.020, 0.022)}
# Settings of the controller that act on absolute actions; ranges of inputs and outputs do not.
CONTROLLER = (
    *("type", "kp", "damping_ratio", "impedance_mode", "uncouple_pos_ori", "interpolation"),
    *("position_limits", "orientation_limits"),
)
# Arguments of robosuite's environments that change nothing but what is shown, kept or rewarded.
HARMLESS = {
    *(
        "has_renderer",
        "has_offscreen_renderer",
        "render_camera",
        "render_gpu_device_id",
        "render_offscreen",
        "renderer",
    ),
    *("use_camera_obs", "use_object_obs", "camera_names", "camera_heights", "camera_widths", "camera_depths"),
    *("camera_segmentations", "reward_shaping", "reward_scale", "ignore_done", "horizon", "hard_reset", "seed"),
}
COMPARED = {"robots", "controller_configs", "control_freq"}
MOST_NAMED = 8  # differences of the model that a message has


def model_facts(xml: str | bytes) -> dict[str, dict[str, str]]:
    """What `ATTRIBUTES` names of a model, by kind and name, with the names of robosuite 1.4.

    Raises:
        ValueError: for text that is no model.
    """
    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError as error:
        raise ValueError(f"no XML ({error})") from None
    facts: dict[str, dict[str, str]] = {"option": {key: _number(text) for key, text in _options(root)}}
    world = root.find("worldbody")
    if world is None:
        raise ValueError("no MuJoCo model: it has no worldbody")
    _collect(world, "world", facts)
    for motor in root.iterfind("actuator/*"):
        facts[f"{motor.tag} {_name(motor.get('name', ''))}"] = _kept(motor)
    return facts


def _options(root: ElementTree.Element) -> list[tuple[str, str]]:
    return [item for option in root.iterfind("option") for item in option.attrib.items()]


def _collect(parent: ElementTree.Element, body: str, facts: dict[str, dict[str, str]]) -> None:
    unnamed: Counter[str] = Counter()
    for child in parent:
        unseen = child.tag == "geom" and child.get("contype") == child.get("conaffinity") == "0"
        if child.tag not in ATTRIBUTES or unseen or child.get("mocap") == "true":
            continue
        name = _name(child.get("name") or "")
        if not name:
            name = f"{unnamed[child.tag]} of {body}"
            unnamed[child.tag] += 1
        facts[f"{child.tag} {name}"] = _kept(child)
        if child.tag == "body":
            _collect(child, name, facts)


def _kept(element: ElementTree.Element) -> dict[str, str]:
    kept = {key: _number(element.attrib[key]) for key in ATTRIBUTES.get(element.tag, ()) if key in element.attrib}
    return {key: _name(text) if key == "mesh" else text for key, text in kept.items()}


def _name(name: str) -> str:
    """The name without what robosuite 1.5 added to those of grippers and mounts."""
    return re.sub(r"^(gripper\d+_)(?:right_|left_)+", r"\1", re.sub(r"^fixed_mount", "mount", name))


def _number(text: str) -> str:
    try:
        return " ".join(f"{float(part):.6g}" for part in text.split())
    except ValueError:
        return text


def published_differences(settings: Mapping[str, Any], environment: Environment) -> list[str]:
    """One text for each thing in which an environment differs from that of published demonstrations.

    Args:
        settings: as `HDF5Demonstrations` gives them for a published file.
        environment: of `make_environment`, with rendering="robosuite" if it has cameras.
    """
    here, published = environment.settings, settings["robomimic"]
    pairs = [
        ("environment", settings["environment"], here["environment"]),
        ("robots", published["robots"], ["Panda"]),
        ("control_freq", settings["control_hz"], here["control_hz"]),
    ]
    if here["cameras"]:
        pairs += [("image size", settings["image_size"], here["image_size"])]
        pairs += [("renderer", settings["image_mode"]["renderer"], here["image_mode"].get("renderer"))]
    if settings["environment"] == here["environment"]:
        theirs, ours = (_arm_controller(each["controller"]) for each in (settings, here))
        pairs += [(f"controller {key}", theirs.get(key), ours.get(key)) for key in CONTROLLER]
    found = [f"{name} {was!r}, here {now!r}" for name, was, now in pairs if was != now]
    found += [f"{name}={value!r}, which is not made here" for name, value in published["others"].items()]
    if settings["environment"] == here["environment"]:
        found += _model_differences(published["model"], environment)
    return found


def _arm_controller(config: Any) -> dict[str, Any]:
    """The arm's part of a controller: of robosuite 1.5's composite ones, or the whole of an earlier one."""
    config = config if isinstance(config, dict) else {}
    parts = config.get("body_parts", {})
    arm = parts.get("right", parts.get("arms", {}).get("right")) if parts else config
    arm = dict(arm or {})
    if "damping" in arm:  # as it was called at first
        arm.setdefault("damping_ratio", arm["damping"])
    return arm


def _model_differences(theirs: dict[str, dict[str, str]] | None, environment: Any) -> list[str]:
    if theirs is None:
        return ["no model_file in its first episode, so that bodies and cameras cannot be compared"]
    ours = model_facts(environment.model_xml())
    found = [f"{name} is not here" for name in theirs if name not in ours]
    found += [f"{name} is only here" for name in ours if name not in theirs]
    for name in theirs.keys() & ours.keys():
        for key in sorted(theirs[name].keys() | ours[name].keys()):
            was, now = theirs[name].get(key), ours[name].get(key)
            if was != now and not _drawn(name, key, was):
                found.append(f"{name} {key} {was}, here {now}")
    found.sort()
    more = [f"and {len(found) - MOST_NAMED} more of the model"] if len(found) > MOST_NAMED else []
    return found[:MOST_NAMED] + more


def _drawn(name: str, key: str, value: str | None) -> bool:
    """Whether robosuite draws this value, and could have drawn it."""
    drawn, low, high = DRAWN.get(name, ("", 0.0, 0.0))
    return key == drawn and value is not None and all(low <= float(part) <= high for part in value.split())
