"""Every kind of attention over clips, with every way to see time: what it computes, and that it travels and goes on."""

import functools
import json
import os
import signal
from fractions import Fraction
from itertools import cycle
from pathlib import Path
from types import MethodType

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForVideoClassification, TimesformerForVideoClassification, TrainerCallback

import hf_sparseprior as sp
from hf_sparseprior.convert import convert_checkpoint
from hf_sparseprior.patterns.curves import curve_rank
from hf_sparseprior.patterns.supports import head_offsets, layer_order
from hf_sparseprior.training import SparsePriorTrainer, SparsePriorTrainingArguments
from tests.hf_sparseprior.patterns.test_time import radial_sees
from tests.processes import launched
from tests.remote import check_remote_code

FRAMES, GRID, HEADS = 3, (3, 3), 3
PATCHES = GRID[0] * GRID[1]
PLACES = [(p, t) for p in range(PATCHES) for t in range(FRAMES)]  # transformers has each patch's frames in a row
# The windows keep more than nothing of a frame, and less than all of it; the curve is no raster.
WINDOWS = {"name": "fibottention", "w_min": 1, "w_max": 4}
HILBERT = {**WINDOWS, "order": "hilbert"}
RADIAL = {"name": "radial", "decay_factor": 0.25, "first_frame": False}
VIOLIN = {"name": "violin", "curves": ["hilbert", "snake_t"], "init": "moving"}


def prior(support, time="frame", decay=VIOLIN):
    return {"support": support, "decay": decay, "time": time}


# Kind of attention, support, and how the prior sees time.
CASES = {
    "divided": ("divided_space_time", WINDOWS, "frame"),
    "divided along a curve": ("divided_space_time", HILBERT, "frame"),
    "space only": ("space_only", WINDOWS, "frame"),
    "space only along a curve": ("space_only", HILBERT, "frame"),
    "joint per frame": ("joint_space_time", WINDOWS, "frame"),
    "joint per frame along a curve": ("joint_space_time", HILBERT, "frame"),
    "joint clip": ("joint_space_time", WINDOWS, "clip"),
    "joint clip along a curve": ("joint_space_time", HILBERT, "clip"),
    "joint axes": ("joint_space_time", WINDOWS, "axes"),
    "joint axes along a curve": ("joint_space_time", HILBERT, "axes"),
    "joint radial": ("joint_space_time", RADIAL, "clip"),
}
every = pytest.mark.parametrize("case", CASES)
# One of each for what takes longer.
FEW = [case for case in CASES if "curve" not in case]


def fresh(case, decay=VIOLIN, seed=0, **settings):
    """A tiny classifier of clips, with weights away from where time or a prior would do nothing."""
    kind, support, time = CASES[case]
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 32,
        "image_size": 24, "patch_size": 8, "num_frames": FRAMES, "num_labels": 5,
    }  # fmt: skip
    own = prior(support, time, decay)
    config = sp.SparsePriorTimesformerConfig(**{**sizes, "attention_type": kind, "prior": own, **settings})
    model = sp.SparsePriorTimesformerForVideoClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def clips(batch=2, frames=FRAMES):
    return torch.randn(batch, frames, 3, 24, 24, generator=torch.Generator().manual_seed(7))


def logits(model, pixels=None):
    with torch.no_grad():
        return model(clips() if pixels is None else pixels).logits


# ---- what it computes -----------------------------------------------------------------------------------------------


@functools.cache
def ranks(curve, shape):
    """Rank of each patch of a grid or a clip along a curve, "_t" for its transpose."""
    return curve_rank(curve.removesuffix("_t"), shape, transposed=curve.endswith("_t"))


@functools.cache
def offsets_of(case, layer, shape):
    """Offsets of each head of a layer."""
    plain = {name: value for name, value in CASES[case][1].items() if name != "order"}
    offsets = head_offsets(plain, num_heads=HEADS, num_tokens=int(np.prod(shape)))
    return [offsets[head] for head in layer_order(HEADS, layer, 0)]


def sees(case, layer, head, query, key):
    """Whether patch p of frame t sees patch q of frame s, from the definitions alone."""
    _, support, time = CASES[case]
    (p, t), (q, s) = query, key
    if support is RADIAL:
        return radial_sees((t, p), (s, q), PATCHES, Fraction(1, 4), False)
    whole = (FRAMES, *GRID) if time == "clip" else GRID
    offsets = offsets_of(case, layer, whole)[head]
    rank = ranks("hilbert", whole) if support is HILBERT else np.arange(np.prod(whole)).reshape(whole)
    if time == "clip":
        return abs(rank[t].flat[p] - rank[s].flat[q]) in offsets
    in_frame = abs(int(rank.flat[p]) - int(rank.flat[q])) in offsets
    if time == "frame":
        return in_frame
    return in_frame if t == s else p == q and abs(t - s) in offsets


def distance(curve, time, query, key):
    """How far apart the decay sees two patches along one curve."""
    (p, t), (q, s) = query, key
    if time == "clip":
        rank = ranks(curve, (FRAMES, *GRID))
        return abs(int(rank[t].flat[p]) - int(rank[s].flat[q]))
    rank = ranks(curve, GRID).ravel()
    return abs(int(rank[p]) - int(rank[q])) + (abs(t - s) if time == "axes" else 0)


def tables(case, model, layer):
    """Pairs (H, T, T) and decay (H, T, T) of a layer by loops, in transformers' order of tokens."""
    kind, _, time = CASES[case]
    places = PLACES if kind == "joint_space_time" else [(p, 0) for p in range(PATCHES)]
    total = 1 + len(places)
    mask, matrix = np.ones((HEADS, total, total), dtype=bool), np.ones((HEADS, total, total))
    bias = model.vit.layers[layer].attention.decay_bias
    gamma = torch.sigmoid(bias.beta.detach().double()).numpy()  # (C, H)
    for j, query in enumerate(places, 1):
        for k, key in enumerate(places, 1):
            mask[:, j, k] = [sees(case, layer, head, query, key) for head in range(HEADS)]
            apart = np.array([distance(curve, time, query, key) for curve in VIOLIN["curves"]])
            matrix[:, j, k] = (gamma ** apart[:, None]).mean(0)
    return torch.tensor(mask), torch.tensor(matrix) * bias.alpha.detach().double().view(-1, 1, 1)


def written_out(self, hidden_states, output_attentions=False):
    """transformers' attention of TimeSformer with a mask and a decay on all pairs."""
    batch, total, width = hidden_states.shape
    q, k, v = self.qkv(hidden_states).view(batch, total, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
    scores = (q @ k.mT * self.scale * self.matrix).masked_fill(~self.mask, -torch.inf)
    return ((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, total, width),)


@every
def test_it_is_transformers_timesformer_with_pairs_and_decay_by_loops(case, tmp_path):
    model = fresh(case)
    model.save_pretrained(tmp_path / "ours")
    convert_checkpoint(tmp_path / "ours", tmp_path / "stock", prior="dense", to="timesformer")
    stock = TimesformerForVideoClassification.from_pretrained(tmp_path / "stock").double().eval()
    dense = stock(clips().double()).logits
    for number, layer in enumerate(stock.timesformer.encoder.layer):
        attention = layer.attention.attention
        attention.mask, attention.matrix = tables(case, model, number)
        own = attention.mask[:, 1:, 1:].double().mean()
        assert 0.01 < own < 0.95
        attention.forward = MethodType(written_out, attention)
    model.double()
    found, expected = model(clips().double()).logits, stock(clips().double()).logits
    assert (expected - dense).abs().max() > 1e-4
    if CASES[case][0] == "space_only":  # transformers' class has no mean over the frames
        expected = expected.unflatten(0, (2, FRAMES)).mean(1)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("pooling", ["class_token", "mean", "class_token_and_mean"])
def test_frames_are_averaged_before_the_last_norm_as_published(pooling, tmp_path):
    """The last norm by formula; the two averages differ, and transformers' class has none."""
    twin = fresh("space only", pooling=pooling).double()
    model = fresh("space only", pooling=pooling, frame_average="before_norm").double()
    assert all(value.equal(twin.state_dict()[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        tokens = twin.vit(clips().double(), output_hidden_states=True).hidden_states[-1]
    mean = sum(tokens.unflatten(0, (2, FRAMES))[:, frame] for frame in range(FRAMES)) / FRAMES
    centred = mean - mean.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + model.config.layer_norm_eps).sqrt()
    normed = scaled * model.vit.layernorm.weight + model.vit.layernorm.bias
    parts = {"class_token": [normed[:, 0]], "mean": [normed[:, 1:].mean(1)]}
    parts["class_token_and_mean"] = parts["class_token"] + parts["mean"]
    expected = torch.cat(parts[pooling], -1) @ model.classifier.weight.T + model.classifier.bias
    found = logits(model, clips().double())
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert (found - logits(twin, clips().double())).abs().max() > 1e-3
    model.save_pretrained(tmp_path / "ours")
    assert AutoModelForVideoClassification.from_pretrained(tmp_path / "ours").config.frame_average == "before_norm"
    with pytest.raises(ValueError, match="frame_average='before_norm' must be 'after_norm'"):
        convert_checkpoint(tmp_path / "ours", tmp_path / "stock", prior="dense", to="timesformer")


# ---- travel ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["divided", "joint clip along a curve", "joint radial"])
def test_saved_and_loaded_it_is_the_same_bits(case, tmp_path):
    model = fresh(case)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForVideoClassification.from_pretrained(tmp_path)
    assert logits(loaded).equal(logits(model)) and loaded.config.prior == model.config.prior
    with torch.no_grad():
        base = AutoModel.from_pretrained(tmp_path)(clips()).last_hidden_state
        assert base.equal(model.vit(clips()).last_hidden_state)
    assert logits(loaded, clips(frames=2)).equal(logits(model, clips(frames=2)))  # the grid follows the clip


@pytest.mark.slow
def test_its_code_travels_with_it(tmp_path):
    check_remote_code({case: (fresh(case), clips()) for case in [*FEW, "joint clip along a curve"]}, tmp_path)


LORA = {"r": 2, "target_modules": ["q_proj", "temporal_v_proj", "v_proj"], "modules_to_save": ["classifier"]}
ADAPTERS = {
    "lora": lambda: peft.LoraConfig(**LORA),
    "dora": lambda: peft.LoraConfig(**LORA, use_dora=True),
    "violin": lambda: sp.ViolinAdapterConfig(decay=VIOLIN, modules_to_save=["classifier"]),
    "dora and violin": lambda: sp.LoraViolinConfig(**LORA, use_dora=True, decay=VIOLIN),
}


# With every case one of LoRA and one of a decay.
ADAPTED = [*zip(FEW, cycle(["lora", "dora"])), *zip(FEW, cycle(["violin", "dora and violin"]))]


@pytest.mark.parametrize(("case", "adapter"), ADAPTED)
def test_adapters_of_peft_train_and_travel(case, adapter, tmp_path):
    decay = None if "violin" in adapter else VIOLIN
    base = fresh(case, decay=decay, pooling="mean")  # a class token alone would not see the last decay
    plain = logits(base)
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, ADAPTERS[adapter]())
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1.0)
    for _ in range(2):  # in the first step the matrices A of LoRA have no gradient yet
        optimizer.zero_grad()
        model(clips(), labels=torch.tensor([1, 3])).loss.backward()
        optimizer.step()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.requires_grad}
    without = [name for name, gradient in gradients.items() if gradient is None or not gradient.abs().max() > 0]
    assert not without and ("violin" not in adapter) == (not any("decay_biases" in name for name in gradients))
    trained = logits(model.eval())
    assert (trained - plain).abs().max() > 1e-3
    model.save_pretrained(tmp_path / "adapter")
    again = AutoModelForVideoClassification.from_pretrained(tmp_path / "base")
    assert logits(again).equal(plain)
    assert logits(peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()).equal(trained)


# ---- several processes, and going on --------------------------------------------------------------------------------

STEPS, SAVED = 4, 2


class Noise(torch.utils.data.Dataset):
    """Clips whose label is whether they are bright."""

    def __len__(self):
        return 4 * STEPS

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        pixels = torch.randn(FRAMES, 3, 24, 24, generator=generator)
        return {"pixel_values": pixels + index % 2, "labels": index % 2}


class Killed(TrainerCallback):
    """Ends a process in the step after the saved one, as the system would."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == SAVED + 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Left(TrainerCallback):
    """Stops a training in the step after the saved one."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step > SAVED


def train(case, folder, each, resume=False, callbacks=()):
    """The trained weights of a case, float32."""
    model = fresh(case, num_labels=2)
    arguments = SparsePriorTrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=each, learning_rate=1e-2,
        optim="sgd", save_steps=SAVED, report_to="none", disable_tqdm=True, use_cpu=True, seed=3,
    )  # fmt: skip
    trainer = SparsePriorTrainer(model=model, args=arguments, train_dataset=Noise(), callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=str(Path(folder) / f"checkpoint-{SAVED}") if resume else None)
    return {name: value.detach() for name, value in trainer.model.state_dict().items()}


def train_cases(folder, resume):
    """In one of two processes: every case until it is left, the last one by SIGKILL; or the rest of each."""
    for case in FEW:
        end = () if resume else (Killed() if case == FEW[-1] else Left(),)
        weights = train(case, Path(folder) / case, 2, resume, end)
        if resume and os.environ["RANK"] == "0":
            save_file(weights, Path(folder) / f"{case}.safetensors")


@pytest.mark.slow
def test_two_processes_that_are_killed_go_on_and_end_like_one(tmp_path):
    start = functools.partial(launched, 2, train_cases, str(tmp_path), folder=tmp_path, log=tmp_path / "log.txt")
    assert start(False).wait(300) != 0
    for case in FEW:
        state = json.loads((tmp_path / case / f"checkpoint-{SAVED}" / "trainer_state.json").read_text())
        assert state["global_step"] == SAVED
    assert start(True).wait(300) == 0, (tmp_path / "log.txt").read_text()[-3000:]
    for case in FEW:
        expected, found = train(case, tmp_path / "one", 4), load_file(tmp_path / f"{case}.safetensors")
        began = fresh(case, num_labels=2).state_dict()
        assert max((expected[name] - began[name]).abs().max() for name in expected) > 1e-3
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-5)
