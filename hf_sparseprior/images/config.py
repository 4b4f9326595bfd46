"""Settings of image data: which source, which splits, how many images."""

from __future__ import annotations

from dataclasses import dataclass

from hf_sparseprior.base.checks import check_boolean, check_integer
from hf_sparseprior.images.vtab_tasks import STAGES, TASKS
from hf_sparseprior.runs.config import FINAL
from hf_sparseprior.runs.labels import CLASSES, LABELS, NUMBERS

SOURCES = (
    "digits",
    "imagefolder",
    "parquet",
    "arrow",
    "hub",
    "csv",
    "cifar10",
    "cifar100",
    "tiny_imagenet",
    "imagenet",
    "fashion_mnist",
    "mnist",
    "vtab",
)


SPLITS = ("train", "validation", "test")


TABLES = ("parquet", "arrow", "hub")
EXIF = ("apply", "ignore")
DEPTH16 = ("refuse", "scale")
# Sources whose published accuracies were measured on images as they are stored.
STORED_ORIENTATION = ("tiny_imagenet", "imagenet", "vtab")


# Sources whose published test images have no labels: their published validation images are our test, or our validation.
PUBLISHED_VALIDATION = ("tiny_imagenet", "imagenet")


# Fields that mean nothing to other sources than these.
SOURCES_OF = {
    "config_name": ("hub",),
    "revision": ("hub",),
    "splits": ("imagefolder", "csv", *TABLES),
    "image_column": ("csv", *TABLES),
    "label_column": ("csv", "cifar100", *TABLES),
    "classes": ("csv", *TABLES),
    "streaming": TABLES,
    "task": ("vtab",),
}


@dataclass(frozen=True)
class Decoding:
    """How an encoded image becomes 8-bit RGB: `exif` and `depth16` of `DataConfig`.

    The default is what `load_image` of transformers, and so every pipeline, does with 8-bit images.
    """

    exif: str = "apply"
    depth16: str = "refuse"


@dataclass
class DataConfig:
    """Where images come from. Which files each source reads is in tasks/classification/README.md.

    source: one of `SOURCES`; "folder" is imagefolder.
    path: folder, file or (hub) name of the data set. digits needs none. Without it fashion_mnist takes Debian's
        package. A single CSV, parquet or arrow file is cut into splits.
    config_name, revision: for a hub data set, its configuration, and a branch, tag or commit.
    splits: {train: NAME, validation: NAME, test: NAME}, the source's own names (folders, beginnings of files), if they
        are not the usual ones or not all are wanted; null: the usual ones.
    image_column, label_column: for tables and CSV files; null: the only column that can be meant. For cifar100
        label_column is fine (null) or coarse.
    labels: "classes": an image is of one class. Of CSV files and tables also "several": of several classes or none, as
        a list of names (in CSV files names with ; or | between them) in one column, or as 0 and 1 in a column for each
        class; and "numbers": a column for each number that the model learns. label_columns: the columns of these; null:
        `label_column`, or one with a usual name, or else all columns but those of images and splits.
    classes: file of class names, one a line, in the order of the labels, for tables that do not say them.
    task: for vtab, one of its 19 tasks.
    stage: "final": train on the training and the validation images and test on the test images. The validation images
        are trained on, so nothing may be chosen by them and the last epoch counts. "selection", and null but for vtab:
        train without them. Of vtab, "selection" trains on train800 and val200 is both validation and test, so a test
        accuracy is optimistic where validation chose the epoch; "final" trains on train800val200.
    published_validation: "test" or "validation": what the published val of tiny_imagenet and imagenet is. Papers report
        accuracy on it, so it is our test, looked at once, and our validation is cut from the training images.
    validation_fraction, test_fraction: share that is cut, stratified, from the training images if the source has no
        such split.
    split_seed: seed of that cut and of the limits. Runs of different `trainer.seed` share the split.
    limit_train, limit_validation, limit_test: use this many images, the same number of every class, drawn by split_seed
        after the cut. The images of a smaller limit are part of those of a larger one. null: all.
    exif: "apply": turn images as their EXIF orientation says, as every pipeline of transformers does. "ignore": take
        them as they are stored, as torchvision does. null: "ignore" for imagenet, tiny_imagenet and vtab, whose
        published accuracies were measured so, and "apply" for all other sources.
    depth16: "refuse": end the run at an image of more than 8 bits a channel, which pipelines cut off at 255. "scale":
        divide such images by 256; the model card says how to do the same in use.
    corrupt: what happens to images that cannot be read. "fatal": they end the run before it begins. "skip": they are
        left out. "unchecked": they are not looked for, and the first one ends the run when it is met.
    streaming: read images as they are needed, for sets too large for a disk. In training they are shuffled within
        shards and a buffer. All splits must exist.
    cache: keep images in memory: ready for the model or, if they are augmented, decoded. null: if below 1 GiB.
    """

    source: str = "digits"
    path: str | None = None
    config_name: str | None = None
    revision: str | None = None
    splits: dict[str, str] | None = None
    image_column: str | None = None
    labels: str = CLASSES
    label_column: str | None = None
    label_columns: list[str] | None = None
    classes: str | None = None
    task: str | None = None
    stage: str | None = None
    published_validation: str = "test"
    validation_fraction: float = 0.2
    test_fraction: float = 0.2
    split_seed: int = 0
    limit_train: int | None = None
    limit_validation: int | None = None
    limit_test: int | None = None
    exif: str | None = None
    depth16: str = "refuse"
    corrupt: str = "fatal"
    streaming: bool = False
    cache: bool | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        self._check_source()
        self._check_splits()
        choices: dict[str, tuple] = {
            "published_validation": ("test", "validation"),
            "exif": (*EXIF, None),
            "depth16": DEPTH16,
            "corrupt": ("fatal", "skip", "unchecked"),
            "task": (*TASKS, None),
            "stage": (*STAGES, None),
            "labels": LABELS,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"data.{name}={getattr(self, name)!r} must be one of {', '.join(filter(None, allowed))}"
                )
        if self.source not in PUBLISHED_VALIDATION and self.published_validation != "test":
            raise ValueError(
                f"data.published_validation={self.published_validation!r} is for data.source "
                f"{', '.join(PUBLISHED_VALIDATION)}, not {self.source}"
            )
        check_boolean("data.streaming", self.streaming)
        if self.cache not in (None, True, False):
            raise ValueError(f"data.cache={self.cache!r} must be true, false or null")

    @property
    def split_names(self) -> dict[str, str]:
        """What the data itself calls each split; of the training split all that is trained on."""
        if self.source == "vtab":
            return dict(STAGES[self.stage]) if self.stage else {}
        names = {**dict(zip(SPLITS, SPLITS, strict=True)), **(self.splits or {})}
        if self.source in PUBLISHED_VALIDATION:
            names[self.published_validation] = "the published validation images"
        if self.stage == FINAL:
            names["train"] = f"{names['train']} and {names['validation']}"
        return names

    @property
    def decoding(self) -> Decoding:
        """How images are decoded."""
        stored = self.source in STORED_ORIENTATION
        return Decoding(self.exif or ("ignore" if stored else "apply"), self.depth16)

    def _check_source(self) -> None:
        if self.source == "folder":  # the same layout, by its name for videos
            self.source = "imagefolder"
        if self.source not in SOURCES:
            raise ValueError(f"data.source={self.source!r} must be one of {', '.join(SOURCES)}")
        if self.source not in ("digits", "fashion_mnist") and not self.path:
            raise ValueError(f"data.source={self.source!r} needs data.path")
        if self.labels != CLASSES and self.source not in (lists := ("csv", *TABLES)):
            raise ValueError(f"data.labels={self.labels!r} is for data.source {', '.join(lists)}, not {self.source}")
        if self.labels != CLASSES and self.streaming:
            raise ValueError(f"data.labels={self.labels!r} cannot be used with a stream; set data.streaming=false")
        if self.labels == NUMBERS and self.classes is not None:
            raise ValueError(f"data.classes={self.classes!r} is not for data.labels=numbers, which have no classes")
        if (columns := self.label_columns) is not None:
            if not isinstance(columns, list) or not columns or not all(isinstance(own, str) and own for own in columns):
                raise ValueError(f"data.label_columns={columns!r} must be a list of names")
            if self.labels == CLASSES or self.label_column is not None:
                raise ValueError(
                    f"data.label_columns={columns} is for data.labels several or numbers, in place of data.label_column"
                )
        for name in ("path", "config_name", "revision", "image_column", "label_column", "classes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"data.{name}={value!r} must be text")
        if self.source == "digits" and self.path is not None:
            raise ValueError(f"data.path={self.path!r} is not for data.source digits; set data.source, or no path")
        for name, sources in SOURCES_OF.items():
            if getattr(self, name) and self.source not in sources:
                raise ValueError(
                    f"data.{name}={getattr(self, name)!r} is for data.source {', '.join(sources)}, not {self.source}"
                )

    def _check_splits(self) -> None:
        names = self.splits
        if names is not None and not (
            isinstance(names, dict)
            and "train" in names
            and set(names) <= set(SPLITS)
            and all(isinstance(name, str) and name for name in names.values())
        ):
            raise ValueError(f"data.splits={names!r} must be like {{train: NAME, validation: NAME, test: NAME}}")
        for name in ("validation_fraction", "test_fraction"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
                raise ValueError(f"data.{name}={value!r} must be a number between 0 and 1")
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"data.validation_fraction={self.validation_fraction} and data.test_fraction={self.test_fraction} "
                "leave no training images"
            )
        check_integer("data.split_seed", self.split_seed, 0)
        if self.stage is not None and self.streaming:
            raise ValueError(f"data.stage={self.stage!r} cannot be used with a stream; set data.streaming=false")
        for split in SPLITS:
            limit = getattr(self, f"limit_{split}")
            if limit is not None:
                check_integer(f"data.limit_{split}", limit, 1, ", or null")
            if limit is not None and self.streaming:
                raise ValueError(f"data.limit_{split}={limit} cannot be balanced in a stream; set data.streaming=false")
