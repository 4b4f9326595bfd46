"""Crossway's policy: its inputs, its losses, its plans, and loading it from its folder."""

import json
import math
import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers", reason="the robotics extra is not installed")

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification, SparsePriorViTModel
from tasks.robotics.image_decoder import image_positions
from tasks.robotics.normalizer import Normalizer
from tasks.robotics.policy import CrosswayPolicy, cropped, read_policy_file, scaled_images
from tasks.robotics.policy_config import PolicyConfig
from tests.each import each
from tests.tasks.robotics.tiny import observations, one_episode, tiny_config, tiny_policy


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- observations ---------------------------------------------------------------------------------------------------


def test_features_are_those_of_our_model_alone():
    """Each camera's class token of the centre crop, next to the normalised state, step after step."""
    policy = tiny_policy(image_size=None, crop=24).eval()
    seen = observations(policy.config, batch=3)
    condition, _ = policy.encode(policy.normalized(seen))
    expected = []
    for sample in range(3):
        for step in range(2):
            for key in ("agentview_image", "hand_image"):
                pixels = seen[key][sample, step].permute(2, 0, 1)[None, :, 8:32, 8:32].double() / 255
                model = policy.encoders[key]
                alone = SparsePriorViTModel(model.config).eval()
                alone.load_state_dict(model.state_dict())
                expected.append(alone(((pixels - 0.5) / 0.5).float()).last_hidden_state[0, 0])
            expected.append(seen["position"][sample, step] / 2)
    assert torch.allclose(condition, torch.cat(expected).view(3, -1), atol=1e-5)
    first, second = (policy.encoders[key].embeddings.projection.weight for key in policy.config.cameras)
    assert not torch.equal(first, second)


def test_the_mask_changes_the_actions():
    sparse, dense = tiny_policy().eval(), tiny_policy(encoder={"prior": "dense"}).eval()
    dense.load_state_dict(sparse.state_dict())
    seen = one_episode(observations(sparse.config))
    assert not np.allclose(sparse.act(seen, generator()), dense.act(seen, generator()), atol=1e-3)


def test_what_does_not_fill_a_patch_is_left_out():
    """As a strided convolution does: Crossway's 76 pixels are 9x9 patches of 8, PushT's 84 are 10x10."""
    for recorded, crop, side in ((84, 76, 72), (96, 84, 80)):
        config = PolicyConfig(observations={"image": [recorded, recorded, 3]}, crop=crop)
        assert config.encoder_config("image").image_size == [side, side]
    policy = tiny_policy(crop=30).eval()
    seen = observations(policy.config, batch=1)
    normalized = policy.normalized(seen)
    expected = policy.encoders["hand_image"](normalized["hand_image"][:, :, 1:25, 1:25]).pooler_output
    assert torch.allclose(policy.encode(normalized)[0].view(2, -1)[:, 16:32], expected, atol=1e-6)


def test_crops_are_windows_of_their_images():
    images = torch.arange(5 * 1 * 6 * 7).view(5, 1, 6, 7).float()
    assert torch.equal(cropped(images, 4, random=False), images[:, :, 1:5, 1:5])
    torch.manual_seed(0)
    corners = set()
    for _ in range(60):
        windows = cropped(images, 4, random=True)
        for image, window in zip(images[:, 0], windows[:, 0], strict=True):
            top, left = divmod(int(window[0, 0] - image[0, 0]), 7)
            assert torch.equal(window, image[top : top + 4, left : left + 4])
            corners.add((top, left))
    assert corners == {(top, left) for top in range(3) for left in range(4)}


def test_scaled_images_average_the_pixels():
    image = torch.zeros(2, 8, 8, 3, dtype=torch.uint8)
    image[1] = 200
    image[:, :, 4:] = 100
    scaled = scaled_images(image, (2, 2))
    assert scaled.shape == (2, 2, 2, 3) and scaled.dtype == torch.uint8
    assert (scaled[0, :, 0] < 25).all() and (scaled[1, :, 0] > 175).all() and (scaled[:, :, 1] > 80).all()
    assert scaled_images(scaled, (2, 2)) is scaled


# ---- loss -----------------------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_the_noise_and_a_tenth_of_each_observation():
    """Against the formula, from the network's own outputs; no loss is changed in place by another."""
    policy = tiny_policy().eval()
    seen, actions = observations(policy.config), torch.randn(2, 16, 4, generator=generator())
    noise, steps = torch.randn(2, 16, 4, generator=generator(2)), torch.tensor([3, 77])
    losses = policy(seen, actions, noise, steps)
    cosine = [math.cos((t / 100 + 0.008) / 1.008 * math.pi / 2) ** 2 for t in (0, 4, 78)]
    share = torch.tensor([cosine[1] / cosine[0], cosine[2] / cosine[0]]).view(2, 1, 1)
    noisy = share.sqrt() * (actions - 1) / 2 + (1 - share).sqrt() * noise  # actions lie in [-1, 3]
    normalized = policy.normalized(seen)
    predicted, middle = policy.unet(noisy, steps, policy.encode(normalized)[0])
    expected = {"diffusion": ((predicted - noise) ** 2).mean()}
    for key, decoded in policy.decode(middle).items():
        target = normalized[key]
        if key != "position":
            assert decoded.shape == (4, 3, 8, 8)  # of the whole image of 32 pixels, not of its crop
            target = torch.nn.functional.interpolate(target, size=(8, 8), mode="bilinear", antialias=True)
        expected[key] = ((decoded - target) ** 2).mean()
    assert set(expected) == {"diffusion", "agentview_image", "hand_image", "position"}
    for key, value in expected.items():
        assert losses[key].item() == pytest.approx(value.item(), rel=1e-4)
    total = expected["diffusion"] + 0.1 * sum(value for key, value in expected.items() if key != "diffusion")
    assert losses["loss"].item() == pytest.approx(total.item(), rel=1e-4)


def test_decoders_read_the_first_time_index_of_the_middle_split_over_the_steps():
    policy = tiny_policy()
    middle = torch.randn(1, 32, 8)
    decoded = policy.decode(middle)["position"]
    assert torch.allclose(decoded[0], policy.decoders["position"](middle[0, :16, 0]))
    assert torch.allclose(decoded[1], policy.decoders["position"](middle[0, 16:, 0]))
    other = middle.clone()
    other[:, :, 1:] += 1
    assert torch.equal(policy.decode(other)["agentview_image"], policy.decode(middle)["agentview_image"])


def test_image_positions_are_sines_and_cosines():
    positions = image_positions(3, 5, 8)
    assert positions.shape == (8, 3, 5)
    y, x = -1.0, -0.5  # row 0 of 3, column 1 of 5
    phases = [math.pi * y, math.pi * x, 2 * math.pi * y, 2 * math.pi * x]
    expected = [*map(math.sin, phases), *map(math.cos, phases)]
    assert np.allclose(positions[:, 0, 1].numpy(), expected, atol=1e-5)


def test_losses_of_a_prior_count():
    policy = tiny_policy(encoder={"prior": "dynamicvit", "num_hidden_layers": 4})
    torch.manual_seed(0)
    losses = policy(observations(policy.config), torch.randn(2, 16, 4))
    added = [key for key in losses if key.startswith("agentview_image_")]
    assert added
    parts = losses["diffusion"] + sum(
        losses[f"{key}{name.removeprefix('agentview_image')}"] for name in added for key in policy.config.cameras
    )
    parts = parts + 0.1 * sum(losses[key] for key in policy.config.observations)
    assert losses["loss"].item() == pytest.approx(parts.item(), rel=1e-5)


PRIVILEGED = {
    "observations": {"agentview_image": [40, 40, 3], "position": [3], "object": [5]},
    "privileged": ["object"],
}


def test_what_is_privileged_teaches_and_is_not_seen(tmp_path):
    """No plan depends on it, none needs it, and its error trains the encoder of the image."""
    policy = tiny_policy(**PRIVILEGED)
    seen = observations(policy.config)
    other = {**seen, "object": 100 * seen["object"]}
    without = {key: value for key, value in seen.items() if key != "object"}
    policy.eval()
    expected = policy.plan(seen, generator())
    assert torch.equal(policy.plan(other, generator()), expected) and torch.equal(
        policy.plan(without, generator()), expected
    )
    step = {key: value[:, 0] for key, value in without.items()}
    assert policy.select_action(step).shape == (2, 4)
    policy.save_pretrained(tmp_path / "model")
    again = CrosswayPolicy.from_pretrained(tmp_path / "model")
    assert again.config.privileged == ["object"]
    assert torch.equal(again.plan(without, generator()), expected)
    plain = tiny_policy(observations={key: PRIVILEGED["observations"][key] for key in ("agentview_image", "position")})
    assert plain.unet.state_dict().keys() == policy.unet.state_dict().keys()
    shapes = [[value.shape for value in one.unet.state_dict().values()] for one in (plain, policy)]
    assert shapes[0] == shapes[1]
    policy.train()
    drawn = {"noise": torch.randn(2, 16, 4), "steps": torch.tensor([3, 60])}
    drawn["crops"] = {"agentview_image": torch.zeros(4, 2)}
    losses = policy(seen, torch.randn(2, 16, 4), **drawn)
    wanted = policy.normalizer("object", seen["object"].flatten(0, 1))
    assert losses["object"].item() > 0 and wanted.shape == (4, 5)
    changed = policy(other, torch.randn(2, 16, 4), **drawn)
    assert changed["object"].item() > losses["object"].item() + 1
    losses["object"].backward()
    encoder = policy.encoder("agentview_image")
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in encoder.layers.parameters())
    with pytest.raises(ValueError, match="observation 'object' is missing"):
        policy(without, torch.randn(2, 16, 4))


@pytest.mark.slow
def test_one_batch_is_learned_by_heart():
    """Two images, two plans: each image needs its own."""
    options = {"observations": {"image": [24, 24, 3]}, "image_size": None, "encoder": {"num_hidden_layers": 1}}
    policy = tiny_policy(**options, reconstruction_weight=0, widths=[32, 64])
    seen = observations(policy.config)
    actions = 1 + 1.6 * torch.tensor([[1.0, -1, 1, -1], [-1, -1, 1, 1]])[:, None].expand(2, 16, 4)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-3)
    torch.manual_seed(0)
    for _ in range(100):
        loss = policy({"image": seen["image"].repeat(8, 1, 1, 1, 1)}, actions.repeat(8, 1, 1))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    planned = policy.eval().plan(seen, generator())
    error, swapped = ((planned - other).abs().mean().item() for other in (actions, actions.flip(0)))
    assert error < 0.8 and swapped > 1.4, (error, swapped)  # untrained: both 1.3


# ---- acting ---------------------------------------------------------------------------------------------------------


def test_executed_actions_begin_with_the_last_observation_s():
    policy = tiny_policy(action_steps=6, observation_steps=2).eval()
    seen = observations(policy.config, batch=1)
    plan = policy.plan(seen, generator())[0].numpy()
    assert plan.shape == (16, 4)
    assert np.array_equal(policy.act(one_episode(seen), generator()), plan[1:7])


def test_actions_stay_in_the_range_of_the_demonstrations():
    planned = tiny_policy().eval().plan(observations(tiny_config(), batch=8), generator())
    assert planned.min() >= -1 - 1e-5 and planned.max() <= 3 + 1e-5


# ---- folders --------------------------------------------------------------------------------------------------------


def test_a_saved_policy_comes_back_bit_for_bit(tmp_path):
    policy = tiny_policy(encoder={"prior": "fibottention+violin"}).eval()
    policy.save_pretrained(tmp_path / "policy", {"environment": {"name": "lift"}})
    back = CrosswayPolicy.from_pretrained(tmp_path / "policy")
    seen = one_episode(observations(policy.config))
    assert np.array_equal(policy.act(seen, generator()), back.act(seen, generator()))
    assert back.about == {"environment": {"name": "lift"}}
    assert back.config == policy.config == PolicyConfig(**read_policy_file(tmp_path / "policy")["policy"])
    assert back.state_dict().keys() == policy.state_dict().keys()


def test_encoders_travel_to_classification_and_back(tmp_path):
    policy = tiny_policy().eval()
    policy.save_pretrained(tmp_path / "policy")
    folder = tmp_path / "policy" / "encoders" / "hand_image"
    classifier = SparsePriorViTForImageClassification.from_pretrained(folder, num_labels=3)
    classifier.save_pretrained(tmp_path / "classifier")
    back = SparsePriorViTModel.from_pretrained(tmp_path / "classifier")
    for name, weight in policy.encoders["hand_image"].state_dict().items():
        assert torch.equal(back.state_dict()[name], weight)


def test_encoders_start_from_a_classifier(tmp_path):
    from tasks.robotics.train import start_encoders

    encoder = tiny_config().encoder
    SparsePriorViTForImageClassification(
        SparsePriorViTConfig(**encoder, image_size=24, patch_size=8, num_labels=3)
    ).save_pretrained(tmp_path / "classifier")
    saved = SparsePriorViTModel.from_pretrained(tmp_path / "classifier")
    policy = tiny_policy()
    start_encoders(policy, str(tmp_path / "classifier"), encoder)
    for key in policy.config.cameras:
        for name, weight in policy.encoders[key].state_dict().items():
            assert torch.equal(saved.state_dict()[name], weight)
    with pytest.raises(ValueError, match="does not fit"):
        start_encoders(policy, str(tmp_path / "classifier"), {**encoder, "hidden_size": 32})


def _described(change):
    """A change of what policy.json says."""

    def damage(folder):
        content = json.loads((folder / "policy.json").read_text())
        change(content)
        (folder / "policy.json").write_text(json.dumps(content))

    return damage


def _cut_weights(folder):
    weights = folder / "policy.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


@each(
    "damage, message",
    [
        (lambda folder: (folder / "policy.safetensors").unlink(), "policy"),
        (_cut_weights, "policy"),
        (lambda folder: (folder / "encoders" / "hand_image" / "model.safetensors").unlink(), "policy"),
        (
            lambda folder: shutil.rmtree(folder / "encoders"),
            r"encoders/agentview_image/config\.json is missing",
        ),
        (lambda folder: (folder / "policy.json").unlink(), r"policy\.json is missing"),
        (lambda folder: (folder / "policy.json").write_text("{"), "policy.json is damaged"),
        (_described(lambda content: content["policy"].update(widths=[16, 64])), "policy"),
        (_described(lambda content: content.pop("about")), "policy.json.* 'about' must be an object"),
        (_described(lambda content: content.pop("normalizer")), "policy.json.* 'normalizer' must be an object"),
        (_described(lambda content: content.update(about=[])), "policy.json.* 'about' must be an object"),
        (_described(lambda content: content["normalizer"].pop("floors")), "policy.json is damaged"),
        (_described(lambda content: content["normalizer"]["bounds"].pop("actions")), "its normalizer must have"),
        (_described(lambda content: content["policy"].update(widths=3)), "policy.json.*widths=3 must be"),
    ],
)
def test_damaged_folders_are_named(tmp_path_factory, damage, message):
    folder = tmp_path_factory.mktemp("saved") / "policy"
    tiny_policy().save_pretrained(folder)
    damage(folder)
    with pytest.raises(OSError, match=message) as caught:
        CrosswayPolicy.from_pretrained(folder)
    assert str(folder) in str(caught.value)


@each(
    "options, message",
    [
        ({"crop": 33}, "crop=33 must be at most the 32x32 pixels of agentview_image"),
        ({"horizon": 8}, "horizon=8 must hold"),
        ({"horizon": 15, "action_steps": 4}, "horizon=15 must be a multiple of 2"),
        ({"observations": {"image": [32, 32]}}, r"image=\[32, 32\] must be"),
        ({"observations": {}}, "observations is empty"),
        ({"widths": [16, 36]}, "multiple of 4 \\* observation_steps=8"),
        ({"sampler": "euler"}, "'euler' must be one of ddpm, ddim"),
        ({"sampling_steps": 101}, "101 must be at most noise_levels=100"),
        ({"encoder": {"image_size": 24}}, "image_size=24 is policy.crop's"),
        ({"encoder": {"prior": "fibonacci"}}, "fibonacci"),
        ({"reconstruction_weight": -1}, "reconstruction_weight=-1 must be"),
        ({"horizon": 10**9}, "policy.horizon=1000000000 must be at most 131072.*SPARSEPRIOR_MAX_WIDTH"),
        ({"widths": [131072, 131072]}, "with kernel_size=3 give .* weights, .* at most 32000000000"),
        ({"observations": {"state": [10**9]}}, "policy.state=1000000000 must be at most 131072"),
        ({"privileged": "position"}, "policy.privileged='position' must be a list of keys"),
        (
            {"privileged": ["object"]},
            "policy.privileged: 'object' must be one of position, observations without images",
        ),
        ({"privileged": ["hand_image"]}, "policy.privileged: 'hand_image' must be one of position"),
        (
            {"privileged": ["position"], "reconstruction_weight": 0},
            r"privileged=\['position'\] needs reconstruction_wei",
        ),
        ({"observations": {"a": [3]}, "privileged": ["a"]}, r"privileged=\['a'\] leaves the policy nothing to see"),
    ],
)
def test_bad_configurations_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tiny_policy(**options)


# ---- normaliser -----------------------------------------------------------------------------------------------------


def test_normalizer_maps_the_range_and_leaves_still_dimensions_small():
    values = np.array([[0.0, 5.0, 1.0], [4.0, 5.001, 1.0], [1.0, 5.0, 1.0]])
    normalizer = Normalizer.fit({"actions": [values[:1], values[1:]]}, {"actions": [0.1, 0.1, 2.0]})
    scaled = normalizer("actions", torch.tensor(values, dtype=torch.float32))
    assert torch.allclose(scaled[:, 0], torch.tensor([-1.0, 1.0, -0.5]))
    assert scaled[:, 1].abs().max() < 0.0101  # 0.0005 / 0.05: not blown up to 1
    assert torch.equal(scaled[:, 2], torch.zeros(3))
    assert torch.allclose(normalizer.undo("actions", scaled), torch.tensor(values, dtype=torch.float32))
    again = Normalizer(**json.loads(json.dumps(normalizer.to_dict())))
    assert torch.equal(again("actions", scaled), normalizer("actions", scaled))


def test_bad_ranges_are_refused():
    with pytest.raises(ValueError, match="no range"):
        Normalizer({"a": ([1.0], [0.0])}, {"a": 0.1})
    with pytest.raises(ValueError, match="no range"):
        Normalizer({"a": ([float("nan")], [0.0])}, {"a": 0.1})
    with pytest.raises(ValueError, match="must be above 0"):
        Normalizer({"a": ([0.0], [1.0])}, {"a": 0.0})


# ---- acting step by step --------------------------------------------------------------------------------------------


def steps_of(config, count: int, batch: int) -> list[dict[str, torch.Tensor]]:
    """What so many episodes show, one step after the other, {key: (B, ...)}."""
    return [{key: value[:, 0] for key, value in observations(config, batch, seed).items()} for seed in range(count)]


@pytest.mark.parametrize("options", [{"sampler": "ddim"}, {"sampler": "ddpm", "sampling_steps": 4}])
def test_selected_actions_are_the_plans_of_each_episode_alone(options):
    """Nineteen steps of three episodes side by side, with the noise that each draws alone."""
    policy = tiny_policy(**options).eval()
    steps = steps_of(policy.config, 19, 3)
    generators = [generator(seed) for seed in (1, 2, 3)]
    policy.reset()
    actions = torch.stack([policy.select_action(step, generators) for step in steps], 1)
    assert actions.shape == (3, 19, 4)
    for episode in range(3):
        alone, expected = generator(episode + 1), []
        for first in range(0, 19, policy.config.action_steps):
            seen = {k: np.stack([steps[max(0, n)][k][episode] for n in (first - 1, first)]) for k in steps[0]}
            expected.extend(policy.act(seen, alone))
        assert np.allclose(actions[episode], np.stack(expected)[:19], atol=2e-5)


def test_a_reset_begins_anew_and_arrays_of_a_simulator_are_copied():
    policy = tiny_policy().eval()
    steps = [{key: value.numpy() for key, value in step.items()} for step in steps_of(policy.config, 4, 2)]
    expected = [policy.select_action(step, generator()) for step in steps]
    policy.reset()
    shared = {key: value.copy() for key, value in steps[0].items()}
    for step, action in zip(steps, expected, strict=True):
        for key, value in step.items():
            shared[key][:] = value
        assert torch.equal(policy.select_action(shared, generator()), action)
    remembered = policy._seen[0]
    assert all(torch.equal(remembered[key], torch.from_numpy(steps[2][key])) for key in steps[2])
    assert not any("planned" in name or "seen" in name for name in policy.state_dict())


def test_plans_have_the_names_of_diffusion_policy():
    policy = tiny_policy().eval()
    seen = observations(policy.config, 2)
    found = policy.predict_action(seen, generator())
    assert torch.equal(found["action_pred"], policy.plan(seen, generator()))
    assert torch.equal(found["action"], found["action_pred"][:, 1:9])
    with pytest.raises(ValueError, match="a policy acts in evaluation mode"):
        policy.train().predict_action(seen)
    with pytest.raises(ValueError, match="3 generators for 2 episodes"):
        policy.eval().plan(seen, [generator()] * 3)


def test_observations_that_do_not_fit_are_named():
    policy = tiny_policy().eval()
    step = steps_of(policy.config, 1, 2)[0]
    with pytest.raises(ValueError, match="observation 'position' is missing; given: agentview_image, hand_image"):
        policy.select_action({key: value for key, value in step.items() if key != "position"})
    with pytest.raises(ValueError, match=r"observation 'position' has shape \[3\], not \[2, 3\]"):
        policy.select_action({**step, "position": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"'agentview_image' has shape \[2, 3, 40, 40\], not \['B', 40, 40, 3\]"):
        policy.select_action({**step, "agentview_image": torch.zeros(2, 3, 40, 40)})
    policy.select_action(step)
    with pytest.raises(ValueError, match=r"observations of 1 episodes after those of 2; call reset\(\) between them"):
        policy.select_action({key: value[:1] for key, value in step.items()})


def test_crops_are_random_in_training_unless_they_are_given():
    policy = tiny_policy().train()
    normalized = policy.normalized(observations(policy.config, 2))
    places = {key: torch.rand(4, 2, generator=generator()) for key in policy.config.cameras}
    torch.manual_seed(3)
    given, _ = policy.encode(normalized, places)
    assert torch.equal(given, policy.encode(normalized, places)[0])
    assert not torch.equal(given, policy.encode(normalized)[0])
    policy.eval()
    assert torch.equal(policy.encode(normalized)[0], policy.encode(normalized)[0])
