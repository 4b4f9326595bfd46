"""What competes (`CONTENDERS`), at which sizes, how long and with how many seeds (`SCALES`), and the runs of a scale.

All of it was fixed before the first run, but for what README.md says was added. This is a separate task, not a source
of images for `tasks.classification`: the budget is processor time of training without evaluations and without making
images, evaluations come at fixed times of that clock, images are never seen twice, and runs start from a model with
other patches. The classification task, with its data sets, epochs and Trainer, has none of these. Records, tables,
rules of significance and the queue are shared.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import hf_sparseprior
from hf_sparseprior.priors.prior import parse_prior
from tasks.canvases.data import LABELS, Canvases, Pool, read_pools
from tasks.canvases.drawings import DRAWINGS, DRAWN, FOLDERS, Album, Drawings, read_albums

WIDEST = 65  # w_max of Fibottention, in tokens
FIBOTTENTION = {"support": {"name": "fibottention", "w_max": WIDEST}}
WIDE = {"support": "fibottention"}
HILBERT = {"support": {**FIBOTTENTION["support"], "order": "hilbert"}}
DENSE = "dense"
SPARSIFY = "sparsify"  # what the library calls it
FOLDER = "folder"  # the label of drawings


@dataclass(frozen=True)
class Contender:
    """A way to read a large image.

    name: of its row. about: in words. patch: how many times as long a side of a patch is as the start's. shrink: how
    many times smaller a side of the image is made first. prior: as in a model's config. predictor_share: of the time,
    for Sparsifiner's first phase, at the size of the start. budget: share of dense inference time for `sparsify`, which
    then chooses the prior.
    """

    name: str
    about: str
    patch: int = 1
    shrink: int = 1
    prior: Any = DENSE
    predictor_share: float = 0.0
    budget: float | None = None

    @property
    def is_sparse(self) -> bool:
        """Whether attention leaves out pairs or tokens."""
        return self.prior != DENSE or self.budget is not None

    @property
    def sees(self) -> tuple[int, int]:
        """How many times longer a patch is than the start's, and how many times smaller the image."""
        return self.patch, self.shrink

    def missing(self) -> str | None:
        """Why this version of the library cannot run it; None if it can."""
        if self.budget is not None and not hasattr(hf_sparseprior, SPARSIFY):
            return f"this version has no hf_sparseprior.{SPARSIFY}"
        try:
            parse_prior(self.prior)
        except ValueError as error:
            return str(error).partition(";")[0]
        return None


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("dense", "dense attention, the start's patches, full size"),
        Contender("half", "dense, the image at half size", shrink=2),
        Contender("quarter", "dense, the image at a quarter of its size", shrink=4),
        Contender("patch-x2", "dense, patches twice as long", patch=2),
        Contender("patch-x4", "dense, patches four times as long", patch=4),
        Contender("patch-x2-fibottention", "Fibottention, patches twice as long", patch=2, prior=FIBOTTENTION),
        Contender("patch-x4-fibottention", "Fibottention, patches four times as long", patch=4, prior=FIBOTTENTION),
        Contender(
            "windows",
            "the next 65 patches on both sides in raster order, as far as Fibottention reaches",
            prior={"support": {"name": "window", "w": WIDEST}},
        ),
        Contender("neighborhood", "the 7x7 patches around each", prior="neighborhood"),
        Contender(
            "longformer",
            "a sliding window of 8 patches, as many keys as Fibottention has",
            prior={"support": {"name": "longformer", "w": 8}},
        ),
        Contender("tome", "token merging, half of the patches are left in the end", prior="tome"),
        Contender("fibottention", "Fibottention, w_max 65", prior=FIBOTTENTION),
        Contender("fibottention-hilbert", "the same along Hilbert's curve", prior=HILBERT),
        Contender("fibottention-violin", "Fibottention and VIOLIN", prior={**FIBOTTENTION, "decay": "violin"}),
        Contender(
            "sparsifiner",
            "Sparsifiner, a tenth of the keys; a fifth of the time for its predictor",
            prior={"predictor": {"name": "sparsifiner", "keep_rate": 0.1}},
            predictor_share=0.2,
        ),
        Contender("fibottention-wide", "Fibottention, w_max a third of the patches, as by default", prior=WIDE),
        Contender("sparsify-0.5", "what sparsify chooses for half of dense inference time", budget=0.5),
        Contender("sparsify-0.25", "what sparsify chooses for a quarter", budget=0.25),
    )
}


@dataclass(frozen=True)
class Variant:
    """A task: label, side of the objects in pixels, background. Drawings have no background, and are the objects."""

    label: str
    object_px: int
    background: str = "noise"

    @property
    def first_name(self) -> str:
        """Name of the first variant with these images; others go on for longer."""
        return next(name for name, variant in VARIANTS.items() if variant == self)

    @property
    def classes(self) -> int:
        """How many labels there are."""
        return len(FOLDERS) if self.label == FOLDER else LABELS[self.label][0]

    @property
    def chance(self) -> float:
        """Accuracy of guessing."""
        return 1 / self.classes

    def missing(self) -> str | None:
        """Why this machine cannot do it; None if it can. Of Fashion-MNIST the reader says so."""
        if self.label == FOLDER and not os.path.isdir(DRAWINGS):
            return f"{DRAWINGS} is missing: apt-get install openclipart-png"
        return None

    def about(self, side: int) -> str:
        """The images in words."""
        if self.label == FOLDER:
            return f"drawings of Open Clip Art on {side} pixels, by folder"
        return f"canvases of {side} pixels with Fashion-MNIST's objects, variant {self.first_name}"

    def pools(self, device: str, data: str | None) -> Mapping[str, Pool | Album]:
        """What the images of each split are made of; `data`: folder of Fashion-MNIST, None: that of Debian's package.

        Raises:
            OSError: if files are missing.
        """
        if self.label == FOLDER:
            return read_albums(DRAWINGS, device)
        return read_pools(self.object_px, self.background, device, data)

    def images(self, pool: Pool | Album, side: int, seed: int) -> Canvases | Drawings:
        """The images of one split and seed."""
        return Drawings(pool, side, seed) if isinstance(pool, Album) else Canvases(pool, side, self.label, seed)


VARIANTS = {
    "class": Variant("class", 28),
    "small": Variant("class", 14),
    "photographs": Variant("class", 28, "photographs"),
    "count": Variant("count", 14),
    "repeated": Variant("repeated", 14),
    "drawings": Variant(FOLDER, DRAWN, "paper"),
    "longer": Variant("class", 28),  # the images of `class`, from its start, for longer
}


@dataclass(frozen=True)
class Stage:
    """Dense training from the stage before, the first from scratch. side: of the canvas. rate: the learning rate."""

    side: int
    minutes: float
    batch: int
    rate: float


@dataclass(frozen=True)
class Group:
    """Runs with the same images.

    variant: a name in `VARIANTS`. side: of the canvas. minutes: of training, of each run. every: minutes from one
    evaluation to the next. contenders, seeds: all products are run. batch: images a step; None: the scale's.
    """

    variant: str
    side: int
    minutes: float
    every: float
    contenders: tuple[str, ...]
    seeds: tuple[int, ...]
    batch: int | None = None


@dataclass(frozen=True)
class Scale:
    """One size of the experiment.

    device: "cpu" (one thread, processor time) or "cuda" (wall time, bfloat16). model: fields of the config. patch: side
    of the start's patches. start: stages of the dense start. groups: in order. batch, rate: of runs after the start.
    selection_images, test_images: how many the accuracies are of. inference_batch: images a call, for its time.
    reference: the row that others are compared with. wide: whether patterns grow with the canvas, as `WIDEST` is less
    than a row of its patches: Fibottention's w_max is its default, a third of the patches; `windows` reach a row and
    one patch further, so to the patch above; and `longformer` has as many keys as Fibottention.
    """

    name: str
    device: str
    model: dict[str, int]
    patch: int
    start: tuple[Stage, ...]
    groups: tuple[Group, ...]
    batch: int = 8
    rate: float = 3e-4
    selection_images: int = 200
    test_images: int = 1000
    inference_batch: int = 1
    reference: str = "patch-x2"
    wide: bool = False

    def contender(self, name: str, side: int) -> Contender:
        """A contender with the prior that this scale gives it on canvases of this side."""
        own = CONTENDERS[name]
        support = own.prior.get("support") if isinstance(own.prior, dict) else None
        if not self.wide or not isinstance(support, dict):
            return own
        settings = {key: value for key, value in support.items() if key != "w_max"}
        if name == "windows":
            settings["w"] = side // self.patch + 1
        elif name == "longformer":
            settings["w"] = LONGFORMER_WIDTHS[side]
        return replace(own, prior={**own.prior, "support": settings})


def _model(width: int, layers: int, heads: int, mlp: int) -> dict[str, int]:
    return {
        "num_channels": 1,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": mlp,
    }


ALL = tuple(CONTENDERS)
AT_128 = tuple(name for name in ALL if name != "sparsify-0.25")  # which no choice meets there
SIX = ("dense", "half", "patch-x2", "windows", "fibottention", "fibottention-violin")
THREE = ("half", "patch-x2", "fibottention")
AGAIN = ("dense", "patch-x2", "fibottention")
LARGER_PATCHES = ("half", "quarter", "patch-x2", "patch-x4", "patch-x2-fibottention", "fibottention")
LONGER = ("patch-x4", "patch-x4-fibottention", "patch-x2", "patch-x2-fibottention")
BEST = ("patch-x4", "patch-x2-fibottention", "patch-x4-fibottention")  # of the first seeds
MORE_SEEDS = (1, 2, 3, 4)
LATER_SEEDS = (5, 6, 7)  # from a start that was made again, as the first was lost before dense had its seeds
FIRST_ON_GPU = ("dense", "half", "windows", "tome", "fibottention", "fibottention-violin")
PATCHES_ON_GPU = ("patch-x2", "patch-x4", "patch-x2-fibottention", "patch-x4-fibottention")
# Sparsifiner's scores of all pairs do not fit there, and `sparsify` measures in float32 for longer than the minute.
REST_ON_GPU = ("quarter", "neighborhood", "longformer", "fibottention-hilbert")
LONGFORMER_WIDTHS = {512: 16, 1024: 20, 2048: 26}  # with Fibottention's number of keys a patch, to within one

SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "cpu",
            "cpu",
            _model(128, 4, 4, 256),
            4,
            (Stage(64, 14, 64, 1e-3),),
            (
                Group("class", 128, 8, 1, AT_128, (0,)),
                Group("class", 256, 10, 2, ALL, (0,)),
                Group("class", 128, 8, 1, ("dense",), MORE_SEEDS[:1]),
                Group("class", 128, 8, 1, SIX[1:], MORE_SEEDS),
                Group("class", 256, 10, 2, SIX, MORE_SEEDS[:3]),
                Group("class", 256, 10, 2, ("half",), MORE_SEEDS[3:]),
                Group("small", 256, 10, 2, LARGER_PATCHES, (0,)),
                Group("photographs", 256, 10, 2, THREE, (0,)),
                Group("count", 256, 10, 2, THREE, (0,)),
                Group("repeated", 256, 10, 2, THREE, (0,)),
                Group("drawings", 256, 10, 2, THREE, (0,)),
                Group("longer", 256, 30, 5, LONGER, (0,)),
                Group("class", 256, 10, 2, SIX, LATER_SEEDS[:1]),
                Group("class", 256, 10, 2, BEST, LATER_SEEDS[:1]),
                Group("class", 128, 8, 1, AGAIN, LATER_SEEDS),
                Group("class", 256, 10, 2, BEST, MORE_SEEDS[:2]),
                Group("class", 128, 8, 1, BEST, MORE_SEEDS[:2]),
            ),
        ),
        Scale(
            "gpu",
            "cuda",
            _model(384, 12, 6, 1536),
            8,
            (Stage(128, 2, 256, 1e-3), Stage(256, 1, 64, 5e-4)),
            (
                Group("class", 1024, 1, 0.25, FIRST_ON_GPU, (0,)),
                Group("class", 1024, 1, 0.25, PATCHES_ON_GPU, (0,)),
                Group("class", 512, 1, 0.25, FIRST_ON_GPU, (0,)),
                Group("class", 2048, 1, 0.5, FIRST_ON_GPU, (0,), batch=4),
                Group("class", 1024, 1, 0.25, REST_ON_GPU, (0,)),
                Group("class", 512, 1, 0.25, ("sparsifiner",), (0,)),
                Group("class", 1024, 1, 0.25, FIRST_ON_GPU, MORE_SEEDS[:2]),
            ),
            inference_batch=8,
            reference="half",
            wide=True,
        ),
        Scale(
            "smoke",
            "cpu",
            _model(32, 2, 2, 64),
            4,
            (Stage(32, 1 / 3, 32, 1e-3),),
            (Group("class", 64, 1 / 6, 1 / 24, ("dense", "fibottention"), (0,)),),
            selection_images=50,
            test_images=100,
            reference="dense",
        ),
    )
}


# ---- runs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One training run.

    scale: its name. group: name of its folder, SIDE_VARIANT, or start_VARIANT. row: contender, or side of a stage of
    the start. start: (group, row) of the run that it starts from; None: from scratch. minutes, every, batch, rate: as
    in `Group` and `Scale`.
    """

    scale: str
    group: str
    row: str
    seed: int
    variant: str
    side: int
    minutes: float
    every: float
    batch: int
    rate: float
    start: tuple[str, str] | None
    contender: Contender = field(default=CONTENDERS[DENSE])

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.group}/{self.row} seed {self.seed}"

    @property
    def is_start(self) -> bool:
        """Whether other runs start from it."""
        return self.group.startswith("start_")

    @property
    def can_be_dropped(self) -> bool:
        """Whether it is left out if the dense pilot of its size learns too little."""
        return not self.is_start and self.row == DENSE and self.seed != 0

    def config(self, scale: Scale) -> dict[str, Any]:
        """What makes it this run and no other, in sections as `runs.run_folder` compares them."""
        canvases = {**asdict(VARIANTS[self.variant]), "side": self.side, "seed": self.seed, "batch": self.batch}
        contender = {**asdict(self.contender), "about": None}
        model = {**scale.model, "patch": scale.patch, "start": None if self.start is None else list(self.start)}
        images = {"selection_images": scale.selection_images, "test_images": scale.test_images}
        trainer = {"minutes": self.minutes, "every": self.every, "rate": self.rate, "device": scale.device}
        return {"canvases": {**canvases, **images}, "contender": contender, "model": model, "trainer": trainer}


def start_name(variant: str) -> str:
    """The group of the stages of a variant's start, which variants of the same images share."""
    return f"start_{VARIANTS[variant].first_name}"


def runs_of(scale: Scale, only: Sequence[str] = (), seeds: Sequence[int] = (), sides: Sequence[int] = ()) -> list[Run]:
    """The runs of a scale in order: starts, the first seed of every group, more seeds, those of dense models last.

    Args:
        scale: which.
        only: these contenders and what they start from; empty: all.
        seeds: these; empty: all.
        sides: canvases of these sizes; empty: all.

    Raises:
        ValueError: for a contender, seed or size that no run has.
    """
    groups = [(group, name, seed) for group in scale.groups for seed in group.seeds for name in group.contenders]
    names, numbers = {name for _, name, _ in groups}, {seed for _, _, seed in groups}
    for given, known in ((only, names), (seeds, numbers), (sides, {group.side for group in scale.groups})):
        if unknown := sorted({*given} - known):
            raise ValueError(f"{unknown[0]!r} is in no run of scale {scale.name}, which has {sorted(known)}")
    runs = []
    for group, name, seed in groups:
        if (only and name not in only) or (seeds and seed not in seeds) or (sides and group.side not in sides):
            continue
        start = (start_name(group.variant), str(scale.start[-1].side))
        runs.append(
            Run(
                *(scale.name, f"{group.side}_{group.variant}", name, seed, group.variant, group.side, group.minutes),
                *(group.every, group.batch or scale.batch, scale.rate, start, scale.contender(name, group.side)),
            )
        )
    runs.sort(key=lambda run: run.seed)
    variants = dict.fromkeys(VARIANTS[run.variant].first_name for run in runs)
    starts = [run for variant in variants for run in _stages(scale, variant)]
    return starts + [run for run in runs if not run.can_be_dropped] + [run for run in runs if run.can_be_dropped]


def _stages(scale: Scale, variant: str) -> list[Run]:
    stages, before = [], None
    for stage in scale.start:
        name, row = start_name(variant), str(stage.side)
        every = stage.minutes / 7
        stages.append(
            Run(scale.name, name, row, 0, variant, stage.side, stage.minutes, every, stage.batch, stage.rate, before)
        )
        before = (name, row)
    return stages
