"""The 19 tasks of VTAB-1K (Zhai et al. 2019) and the lists of images that each stage of the protocol uses."""

from __future__ import annotations

from dataclasses import dataclass

from hf_sparseprior.runs.config import FINAL

GROUPS = ("Natural", "Specialized", "Structured")


@dataclass(frozen=True)
class Task:
    """One task.

    name: its name, also that of its folder in the published layout. title: that in VIOLIN's Tables 19 to 21. group: one
    of GROUPS. classes: how many, even if a list of images lacks the last ones. test_images: number of lines of the
    published test.txt.
    """

    name: str
    title: str
    group: str
    classes: int
    test_images: int


# In the order of VIOLIN's Tables 19, 21 and 20.
TASKS = {
    task.name: task
    for task in (
        Task("cifar", "CIFAR", "Natural", 100, 10000),
        Task("caltech101", "Caltech101", "Natural", 102, 6085),
        Task("dtd", "DTD", "Natural", 47, 1880),
        Task("oxford_flowers102", "Flowers102", "Natural", 102, 6149),
        Task("oxford_iiit_pet", "Pets", "Natural", 37, 3669),
        Task("svhn", "SVHN", "Natural", 10, 26032),
        Task("sun397", "Sun397", "Natural", 397, 21750),
        Task("patch_camelyon", "Patch Camelyon", "Specialized", 2, 32768),
        Task("eurosat", "EuroSAT", "Specialized", 10, 5400),
        Task("resisc45", "Resisc45", "Specialized", 45, 6300),
        Task("diabetic_retinopathy", "Diabetic Retinopathy", "Specialized", 5, 42670),
        Task("clevr_count", "CLEVR Count", "Structured", 8, 15000),
        Task("clevr_dist", "CLEVR Dist", "Structured", 6, 15000),
        Task("dmlab", "DMLab", "Structured", 6, 22735),
        Task("kitti", "KITTI", "Structured", 4, 711),
        Task("dsprites_loc", "dS Loc", "Structured", 16, 73728),
        Task("dsprites_ori", "dS Ori", "Structured", 16, 73728),
        Task("smallnorb_azi", "SN Azi", "Structured", 18, 12150),
        Task("smallnorb_ele", "SN Ele", "Structured", 9, 12150),
    )
}

SELECTION = "selection"
# Which list of images is which split. Selection looks at no test image. The final stage trains on its validation images
# too, so nothing may be chosen by them.
STAGES = {
    SELECTION: {"train": "train800", "validation": "val200", "test": "val200"},
    FINAL: {"train": "train800val200", "validation": "val200", "test": "test"},
}
LISTS = ("train800", "val200", "train800val200", "test")
