"""Recovery: the changed model learns from the dense one for some minutes, on images without labels."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter as clock
from typing import Any

import torch
from torch import Tensor, nn

from hf_sparseprior.adapters.lora import lora_config
from hf_sparseprior.attention.request import AttentionRequest, from_layout
from hf_sparseprior.base.checks import first_line
from hf_sparseprior.base.files import replace_durably
from hf_sparseprior.priors.layer import PriorAttention
from hf_sparseprior.sparsification.baselines import Compared
from hf_sparseprior.sparsification.data import Images
from hf_sparseprior.sparsification.sensitivity import tokens_of
from hf_sparseprior.sparsification.settings import Settings
from hf_sparseprior.sparsification.subject import TINY, Subject
from hf_sparseprior.training.layer_decay import adamw

STATE = "recovery.pt"
BATCH = 16
RATES = {"full": 3e-5, "lora": 5e-4}
WEIGHT_DECAY, LARGEST_GRADIENT = 0.05, 1.0
SAVED_EVERY = 60.0  # seconds
SAID_EVERY = 20.0


class Recovery:
    """The training of a model that was made faster.

    Its loss is the sum of that of the search (`Subject.loss`), the relative change of the square of the last block's
    tokens, and the KL divergence from the dense model of what the first prefix token, mostly the class token, attends
    to, as the mean over heads and layers. Of a model with fewer tokens, on smaller images or after merging, it is the
    first alone. The rate falls as half a cosine over the minutes, which are those of steps, without reading images;
    these are mirrored at random. A step has `BATCH` images, which are seen so many at once as the settings say; a step
    of several parts has the mean of their losses.

    Args:
        learner: its model is changed in place.
        numbers: of the images that are seen.
        path: gets the state each minute, and training goes on from it; None: nothing is written.
    """

    def __init__(
        self,
        subject: Subject,
        learner: Compared,
        images: Images,
        numbers: Sequence[int],
        settings: Settings,
        path: Path | None,
    ) -> None:
        self.subject, self.images, self.numbers, self.settings = subject, images, list(numbers), settings
        names, model = {module: name for name, module in subject.model.named_modules()}, learner.model
        self.outputs = learner.outputs
        last = subject.layers[-1].block
        self.blocks = [last, model.get_submodule(names[last])]
        self.priors = [
            [part for part in each.modules() if isinstance(part, PriorAttention)] for each in (subject.model, model)
        ]
        self.model = model.requires_grad_(settings.tuning == "full")
        if settings.tuning == "lora":
            from peft import get_peft_model

            torch.manual_seed(settings.seed)
            self.model = get_peft_model(model, lora_config(model))
        self.weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.rate = settings.learning_rate or RATES[settings.tuning]
        self.optimizer = adamw(self.model, self.rate, WEIGHT_DECAY)
        self.path = path
        self.spent, self.steps = 0.0, 0
        if self.path is not None and self.path.is_file():
            self._load(self.path)

    def run(self, say: Callable[[str], None]) -> Any:
        """Train for what is left of the minutes. Returns the model, with the updates of LoRA in its weights.

        Raises:
            ValueError: for a loss that is not finite.
        """
        total, saved, said = 60 * self.settings.minutes, self.spent, -math.inf
        self.model.train()
        devices = [self.subject.device] if self.subject.device.type == "cuda" else []
        try:
            while self.spent < total:
                pixels = self._batch()
                start = clock()
                with torch.random.fork_rng(devices):  # of dropout; a run that goes on draws the same
                    torch.manual_seed(random.Random(f"{self.settings.seed} {self.steps}").getrandbits(63))
                    loss = self._step(pixels, self.spent / total)
                self.spent += clock() - start
                self.steps += 1
                if self.spent - said >= SAID_EVERY:
                    said = self.spent
                    say(
                        f"recovery: {self.spent / 60:.1f} of {total / 60:g} minutes, step {self.steps}, loss {loss:.4g}"
                    )
                if self.spent - saved >= SAVED_EVERY:
                    saved = self.spent
                    self._save()
        except KeyboardInterrupt:
            self._save()
            raise
        self._save()
        model = self.model.merge_and_unload() if self.settings.tuning == "lora" else self.model
        return model.eval().requires_grad_(False)

    def _step(self, pixels: Tensor, progress: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * 0.5 * (1 + math.cos(math.pi * progress))
        parts = pixels.split(self.settings.micro_batch)
        value = sum(self._backward(part, len(part) / len(pixels)) for part in parts)
        nn.utils.clip_grad_norm_(self.weights, LARGEST_GRADIENT)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value

    def _backward(self, pixels: Tensor, share: float) -> float:
        """The loss on some images of a step, times their share, whose gradient is added to that of the others."""
        with _tokens(self.blocks) as (dense_tokens, tokens):
            with torch.no_grad(), _prefix_rows(self.priors[0]) as dense_rows:
                dense = self.subject.outputs(pixels)
            with _prefix_rows(self.priors[1]) as rows:
                outputs = self.outputs(self.model, pixels)
        loss = self.subject.loss(outputs, dense).mean()
        teacher, student = dense_tokens[-1], tokens[-1]
        if student.shape == teacher.shape:
            loss = loss + (student - teacher).square().sum() / teacher.square().sum().clamp_min(TINY)
        if [row.shape for row in rows] == [row.shape for row in dense_rows]:
            loss = loss + _divergence(dense_rows, rows)
        if not math.isfinite(value := share * float(loss.detach())):
            raise ValueError(f"recovery: the loss of step {self.steps + 1} is {value}; lower learning_rate={self.rate}")
        (share * loss).backward()
        return value

    def _batch(self) -> Tensor:
        """The images of a step, the same whenever training went on."""
        size = min(BATCH, len(self.numbers))
        epoch, place = divmod(self.steps, len(self.numbers) // size)
        order = random.Random(f"{self.settings.seed} {epoch}").sample(self.numbers, len(self.numbers))
        chosen = order[place * size : (place + 1) * size]
        pixels, drawn = self.images.readable(chosen), random.Random(f"{self.settings.seed} {epoch} {place}")
        mirrored = {number: drawn.random() < 0.5 for number in chosen}
        if not pixels:
            raise OSError(f"recovery: none of {len(chosen)} images can be read; {self.images.unreadable[chosen[0]]}")
        return torch.stack([image.flip(-1) if mirrored[number] else image for number, image in pixels.items()])

    def _save(self) -> None:
        if self.path is None:
            return
        state = {
            "settings": self._settings(),
            "weights": [weight.detach() for weight in self.weights],
            "buffers": list(self.model.buffers()),
            "optimizer": self.optimizer.state_dict(),
            "spent": self.spent,
            "steps": self.steps,
        }
        scratch = self.path.with_name(f"{self.path.name}.partial")
        torch.save(state, scratch)
        replace_durably(scratch, self.path)

    def _settings(self) -> list[Any]:
        return [self.settings.tuning, self.rate, self.settings.seed, len(self.numbers), len(self.weights)]

    def _load(self, path: Path) -> None:
        try:
            state = torch.load(path, map_location=self.subject.device, weights_only=True)
        except Exception as error:  # of zip files, of pickles
            raise OSError(f"{path} is damaged ({first_line(error):.80}); remove it") from None
        if state["settings"] != self._settings():
            raise ValueError(f"{path} is of other settings of recovery; remove it, or choose another folder")
        with torch.no_grad():
            saved = [*state["weights"], *state["buffers"]]
            for weight, value in zip([*self.weights, *self.model.buffers()], saved, strict=True):
                weight.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.spent, self.steps = state["spent"], state["steps"]


@contextmanager
def _prefix_rows(priors: Sequence[PriorAttention]) -> Iterator[list[Tensor]]:
    """Inside the block the attention of the first prefix token in each call of these layers is collected: logarithms of
    the weights that its query gives to the keys of all tokens in raster order, (B, H, T), before a predictor leaves
    some out and without a bias; no pattern leaves any of these pairs out. Layers without prefix tokens have none.
    """
    rows: list[Tensor] = []

    def seen(attend: Callable[..., Any]) -> Callable[..., Any]:
        def see(request: AttentionRequest, *options: Any) -> Any:
            if request.plan.num_prefix_tokens:
                q, k = request.q[:, :, :1].float(), from_layout(request.plan, request.k).float()
                rows.append((request.logit_scale() * q @ k.mT).squeeze(2).log_softmax(-1))
            return attend(request, *options)

        return see

    changed: list[Any] = list(priors)
    for prior in changed:
        prior.attend = seen(prior.attend)
    try:
        yield rows
    finally:
        for prior in changed:
            del prior.attend


def _divergence(dense: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor | float:
    """Mean KL divergence of distributions from those of the dense model, each as logarithms (B, H, T)."""
    each = [(teacher.exp() * (teacher - student)).sum(-1).mean() for teacher, student in zip(dense, rows, strict=True)]
    return torch.stack(each).mean() if each else 0.0


@contextmanager
def _tokens(blocks: Sequence[nn.Module]) -> Iterator[list[list[Tensor]]]:
    """Inside the block what these modules give is collected, for each of them."""
    seen: list[list[Tensor]] = [[] for _ in blocks]

    def hook(collected: list[Tensor]) -> Callable[..., None]:
        return lambda module, args, output: collected.append(tokens_of(output))

    handles = [block.register_forward_hook(hook(collected)) for block, collected in zip(blocks, seen, strict=True)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
