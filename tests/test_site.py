"""The documentation: every example of README and of the how-tos runs, and the site builds without a warning."""

import importlib
import importlib.util
import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image
from sklearn.datasets import load_digits
from transformers import DeiTConfig, DeiTForImageClassification, DeiTImageProcessorPil, Dinov2Config, Dinov2Model

import hf_sparseprior as sp
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.pattern import SUPPORTS
from hf_sparseprior.runs.config import read_cell
from tests import route
from tests.hf_sparseprior.attention.attention_cases import SHIPPED_SUPPORTS, shipped
from tests.timm_oracle import import_timm

ROOT = Path(__file__).parents[1]
PAGES = {
    path.stem: path
    for path in (
        *(ROOT / "README.md", *sorted((ROOT / "docs" / "how-to").glob("*.md"))),
        *(ROOT / "docs" / name for name in ("index.md", "install.md", "start.md", "concepts.md")),
    )
}
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
BLOCK = re.compile(r"```(python|bash|yaml)\n(.*?)```", re.DOTALL)
# Added to the commands of the how-tos, so that they take seconds.
SHORT = ["trainer.num_train_epochs=1", "trainer.dataloader_num_workers=0", "trainer.use_cpu=true"]
SHORTER = {"tasks.classification.train": SHORT, "tasks.classification.compare": SHORT}
# Commands that have a test of their own which runs them, in tests/tasks.
TESTED_ELSEWHERE = ("tasks.common.mm", "tasks.segmentation", "tasks.video", "tasks.robotics", "tasks.heads")
# Pages with tests of their own: blocks are files, which tests/test_extension.py puts in their places, and a server.
FILES = ("add-task", "serve")
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.fixture
def place(tmp_path, monkeypatch, registries):
    """A folder to work in: photographs, small models under the names of the hub's, and the configurations."""
    digits = load_digits()
    for split, numbers in (("train", range(0, 60)), ("validation", range(60, 90)), ("test", range(90, 120))):
        for number in numbers:
            folder = tmp_path / "photos" / split / ("cat" if digits.target[number] % 2 else "dog")
            folder.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray((16 * digits.images[number]).clip(0, 255).astype(np.uint8)).resize((64, 64))
            image.convert("RGB").save(folder / f"{number}.jpg")
    (tmp_path / "photos" / "test" / "cat" / "1.jpg").write_bytes(
        next((tmp_path / "photos/test/cat").glob("*.jpg")).read_bytes()
    )
    torch.manual_seed(0)
    deit = DeiTForImageClassification(DeiTConfig(**TINY, num_labels=3))
    for name in ("facebook/deit-small-patch16-224", "facebook/deit-tiny-patch16-224", "deit-small"):
        deit.save_pretrained(tmp_path / name)
    DeiTImageProcessorPil().save_pretrained(tmp_path / "facebook" / "deit-small-patch16-224")
    Dinov2Model(Dinov2Config(**TINY, patch_size=14)).save_pretrained(tmp_path / "facebook" / "dinov2-small")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    timm = import_timm()
    create = timm.create_model
    monkeypatch.setattr("hf_sparseprior.sparsification.timing.seconds_of_rounds", seconds_by_name)
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **options: create(name, **options))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    return tmp_path


def seconds_by_name(calls, device, budget):
    """In place of `timing.seconds_of_rounds`, whose times depend on what else the machine does."""

    def seconds(name):
        kind, _, which = name.partition(" ")
        if kind == "dense":
            return 0.4 if which == "attention" else 1.0
        if kind in ("resolution", "merging"):
            return (int(which.partition("x")[0]) / 448) ** 2 if kind == "resolution" else 0.2 + 0.8 * float(which)
        if re.fullmatch(r"\d+(,\d+)*", which):  # candidates of the layers of a whole model
            return 1.0 - sum(0.35 for number in which.split(",") if number != "0")
        return 0.05

    return {name: [seconds(name)] for name in calls}


def commands(block):
    """The commands of a block of bash, as lists of words."""
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip() and not line.startswith("#")]


def run_command(words):
    """A `python -m` command in this process, or that of the console script."""
    words = ["python", "-m", "hf_sparseprior", *words[1:]] if words[0] == "sparseprior" else words
    assert words[:2] == ["python", "-m"], words
    module, arguments = words[2], words[3:]
    if "--minutes" in arguments:  # how many steps fit depends on what else the machine does
        at = arguments.index("--minutes")
        arguments[at : at + 2] = ["--epochs", "1"]
    if arguments[:1] == ["sparsify"]:
        arguments += ["--calibration", "4"]
    if module.startswith(TESTED_ELSEWHERE):
        assert importlib.util.find_spec(module) is not None
        configs = [arguments[i + 1] for i, word in enumerate(arguments) if word == "--config"]
        for config in configs:
            assert Path(config.partition("#")[0]).is_file(), config
            if config.partition("#")[0].endswith(".yaml") and "#" in config:
                read_cell(config)
        return
    main = importlib.import_module(f"{module}.__main__" if module == "hf_sparseprior" else module).main
    assert main([*arguments, *SHORTER.get(module, [])]) == 0, words


@pytest.fixture
def fresh_accelerator():
    """A page begins a process, in which nothing is set, and leaves nothing to others."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PAGES if name not in FILES])
def test_the_examples_of_a_page_run(name, place, capsys, fresh_accelerator):
    blocks = BLOCK.findall(PAGES[name].read_text())
    ran = 0
    for number, (language, text) in enumerate(blocks):
        if language == "python":
            file = place / f"{name}_{number}.py"  # settings of a support are read from its source
            file.write_text(text)
            exec(compile(text, str(file), "exec"), {"__name__": file.stem})
            ran += 1
        elif language == "yaml":  # a file, which its first line names
            (place / text.partition("\n")[0].removeprefix("# ")).write_text(text)
        else:
            for words in commands(text):
                if words[0] in ("make", "pip", "hf"):
                    continue
                run_command(words)
                ran += 1
    assert ran >= 1


@pytest.mark.slow
def test_the_server_of_the_page_answers(place):
    testclient = pytest.importorskip("fastapi.testclient", reason="fastapi is not installed: pip install '.[app]'")
    *first, server = [text for language, text in BLOCK.findall(PAGES["serve"].read_text()) if language == "python"]
    assert len(first) == 2
    for text in first:
        exec(compile(text, "serve", "exec"), {})
    names: dict = {"__name__": "serve"}
    exec(compile(server, "serve.py", "exec"), names)
    photo = (place / "photos" / "test" / "cat" / "1.jpg").read_bytes()
    client = testclient.TestClient(names["app"])
    answer = client.post("/classify", content=photo, headers={"Content-Type": "image/jpeg"})
    assert answer.status_code == 200
    pixels = names["processor"](Image.open(place / "photos" / "test" / "cat" / "1.jpg"), return_tensors="np")
    (logits,) = names["session"].run(None, {"pixel_values": pixels["pixel_values"]})
    assert answer.json() == pytest.approx(dict(zip(names["about"]["labels"], logits[0].tolist(), strict=True)))


def test_the_route_to_a_file_is_at_most_five_commands():
    """`make release-check` runs them with the wheel alone."""
    installed = [
        words
        for language, text in BLOCK.findall(PAGES["start"].read_text())
        if language == "bash"
        for words in commands(text)
        if words[0] == "pip"
    ]
    names = [name for name, _ in route.steps()]
    assert names == ["train", "predict", "export", "run"] and len(installed) + len(names) <= 5


@pytest.mark.slow
def test_the_lines_for_a_config_of_mm_build_the_backbone(tmp_path):
    """docs/how-to/dense-prediction.md: in a process that imports mmseg and nothing of ours."""
    pytest.importorskip("mmseg", reason="mmseg is not installed: make dense")
    (lines,) = re.findall(r"```text\n(.*?)```", PAGES["dense-prediction"].read_text(), re.DOTALL)
    (tmp_path / "base.py").write_text('model = dict(backbone=dict(type="ResNet", depth=50))\n')
    (tmp_path / "own.py").write_text(f'_base_ = "base.py"\n{lines.replace("deit_base", "deit_tiny")}')
    script = (
        "import sys; from mmengine.config import Config; from mmseg.registry import MODELS; "
        "assert 'hf_sparseprior' not in sys.modules; "
        "backbone = MODELS.build(Config.fromfile('own.py').model.backbone); "
        "print(type(backbone).__name__, backbone.out_channels)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "SparsePriorViT [192, 192, 192, 192]"


def test_each_how_to_is_one_screen_of_code():
    for name, path in PAGES.items():
        for _, text in BLOCK.findall(path.read_text()):
            assert len(text.splitlines()) <= 30, name


def test_readme_is_a_screen_and_a_half():
    text = (ROOT / "README.md").read_text()
    examples = [block for language, block in BLOCK.findall(text) if language == "python"]
    assert len(text.split()) <= 800 and len(examples) == 3
    pictures = [ROOT / name for name in re.findall(r'(?:!\[[^\]]+\]\(|<img src=")([^)"]+)', text)]
    assert len(pictures) == 3 and all(picture.stat().st_size < 200_000 for picture in pictures)


@pytest.mark.slow
def test_the_pictures_of_readme_are_made_by_their_command(tmp_path):
    """What is drawn is what the records and patterns say now; a PNG's bytes depend on fonts and versions."""
    command = [sys.executable, "docs/site/pictures.py", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for name in ("idea.png", "speed.png", "concept_pairs.png", "concept_parts.png"):
        with Image.open(tmp_path / name) as drawn, Image.open(ROOT / "docs" / name) as there:
            sizes = [image.size for image in (drawn, there)]
            pixels = [np.asarray(image.convert("RGB").resize((120, 60)), dtype=float) for image in (drawn, there)]
        assert np.allclose(*sizes, atol=3) and np.abs(pixels[0] - pixels[1]).mean() < 4, name


@pytest.fixture(scope="module")
def gallery(tmp_path_factory):
    """The text that the site adds to docs/gallery.md, and its pictures by place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs" / "site"))
        module = importlib.import_module("gallery")
        pictures = {}
        return module.gallery_text(tmp_path_factory.mktemp("gallery"), pictures), pictures


def neighbours(query, key):
    """Whether a patch of the 14x14 grid sees another one with `neighborhood`: 7x7 patches, moved inwards at edges."""
    places = zip(divmod(query, 14), divmod(key, 14), strict=True)
    return all(min(max(q - 3, 0), 14 - 7) <= k < min(max(q - 3, 0), 14 - 7) + 7 for q, k in places)


SHIPPED_DECAYS = shipped(DECAYS)
# Supports of which the pairs are counted here one by one, by their definition.
BY_HAND = {
    "dense": lambda query, key: True,
    "window": lambda query, key: abs(query - key) <= 15,
    "longformer": lambda query, key: abs(query - key) <= 1,
    "neighborhood": neighbours,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED_SUPPORTS)
def test_the_gallery_has_each_support_with_its_picture_sentence_and_share_of_pairs(name, gallery):
    text, pictures = gallery
    section = text.partition(f"\n### {name}\n")[2].partition("\n##")[0]
    assert f"![{name} on a photo](gallery/{name}.png)" in section
    with Image.open(pictures[f"gallery/{name}.png"]) as picture:
        pixels = np.asarray(picture.convert("L"), dtype=float)
    assert pixels.shape[1] > 600 and pixels.std() > 20
    assert inspect.getdoc(SUPPORTS[name].function).splitlines()[0] in section
    grid = (16, 14, 14) if name == "radial" else (14, 14)
    number, time = int(np.prod(grid)), "clip" if name == "radial" else "frame"
    mask = sp.supports.build_mask(name, num_heads=6, num_tokens=number, grid=grid, time=time)
    if name in BY_HAND:
        counted = sum(BY_HAND[name](query, key) for query in range(number) for key in range(number))
        assert mask[0].sum() == counted
    share = f"{100 * np.count_nonzero(mask) / mask.size:.1f} %"
    assert f"Costs: {share} of the pairs" in section and f"| [{name}](#{name}) | {share} |" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED_DECAYS)
def test_the_gallery_has_each_decay_with_its_picture_sentence_and_scalars(name, gallery):
    text, pictures = gallery
    section = text.partition(f"\n### {name}\n")[2].partition("\n##")[0]
    assert f"![{name} on a photo](gallery/{name}.png)" in section
    with Image.open(pictures[f"gallery/{name}.png"]) as picture:
        assert picture.width > 600 and np.asarray(picture.convert("L"), dtype=float).std() > 20
    assert inspect.getdoc(DECAYS[name]).splitlines()[0] in section
    # Six heads: a gamma for each of so many curves and an alpha; `learned_order` also has the places of 196 patches.
    curves = {"violin": 8, "manhattan": 1, "random_order": 2, "learned_order": 1}
    scalars = 6 * (curves[name] + 1) + 196 * (name == "learned_order")
    assert f"Costs: all pairs, {scalars} learned scalars a layer" in section
    assert f"| [{name}](#{name}) | {scalars} |" in text


@pytest.mark.slow
def test_times_of_the_gallery_are_those_of_the_records(gallery):
    text, _ = gallery
    record = json.loads((ROOT / "tasks/benchmark/results/cpu/vit_small_baselines.json").read_text())
    contenders = record["sizes"][0]["passes"]["forward"]["contenders"]
    for name, key in {
        "fibottention": "fibottention",
        "strided": "{support: {name: strided, pruning_ratio: 96.5}}",
    }.items():
        assert (
            f"| {contenders[key]['times_dense']['median']:.2f} |" in text.partition(f"| [{name}]")[2].partition("\n")[0]
        )
    assert text.partition("| [neighborhood]")[2].partition("\n")[0].endswith("| - |")


def test_a_support_of_ones_own_gets_its_picture_and_share(registries, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    module = importlib.import_module("gallery")

    @sp.register_support("every_fourth")
    def every_fourth(num_heads, num_tokens):
        """Patches at distances 0 and 4."""
        return [[0, 4]] * num_heads

    masks = module.support_masks("every_fourth")
    assert module.share_of_pairs(masks) == f"{100 * (196 + 2 * 192) / 196**2:.1f} %"
    assert module.sentence(SUPPORTS["every_fourth"]) == "Patches at distances 0 and 4."
    assert module.draw_support("every_fourth", tmp_path / "own.png").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook, tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    content = nbformat.read(notebook, as_version=4)
    assert all(not cell.get("outputs") for cell in content.cells)  # what is committed has none
    nbclient.NotebookClient(content, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert sum(bool(cell.get("outputs")) for cell in content.cells) >= 3


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    """Every link, anchor and picture is there, and every registered prior has its section."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    page = (tmp_path / "site" / "reference" / "priors.html").read_text()
    for name in SHIPPED_SUPPORTS:
        assert f'id="{name}"' in page, name
    pictures = re.findall(r'<img[^>]* src="([^"]+)"', page)
    assert len(pictures) >= len(SHIPPED_SUPPORTS)
    assert all((tmp_path / "site" / "reference" / picture).is_file() for picture in pictures)
    gallery = (tmp_path / "site" / "gallery.html").read_text()
    for name in (*SHIPPED_SUPPORTS, *SHIPPED_DECAYS):
        assert f'id="{name}"' in gallery and f'src="gallery/{name}.png"' in gallery, name
        assert (tmp_path / "site" / "gallery" / f"{name}.png").is_file(), name
