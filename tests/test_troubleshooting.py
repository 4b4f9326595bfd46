"""Every error of docs/troubleshooting.md is raised, and what docs/faq.md says is so."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from PIL import Image
from transformers import BertConfig, BertModel, DeiTConfig, DeiTForImageClassification

import hf_sparseprior as sp
from hf_sparseprior.__main__ import main
from hf_sparseprior.analysis import app, pictures

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
# The first code of a row, up to the words after it.
ROWS = re.findall(r"^\| `([^`]+)`([^|]*)\|", PAGE, re.MULTILINE)
QUOTES = [quote for quote, words in ROWS if not words.strip()]
BY_OTHERS = [quote for quote, words in ROWS if words.strip()]  # "in an error of transformers"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
FAST = ["--set", "trainer.dataloader_num_workers=0", "trainer.use_cpu=true"]


def stock():
    return DeiTForImageClassification(DeiTConfig(**SIZES, num_labels=3))


def ours(**fields):
    fields = {**SIZES, "image_size": 32, "patch_size": 16, "num_labels": 3, **fields}
    return sp.SparsePriorViTForImageClassification(sp.SparsePriorViTConfig(**fields))


def attention(tokens, **options):
    return sp.ops.attention(*torch.randn(3, 1, 4, tokens, 8), "fibottention", grid=(4, 4), **options)


def photos(place):
    """Two classes of six images each."""
    noise = np.random.default_rng(0)
    for name in ("a", "b"):
        folder = place / "photos" / "train" / name
        folder.mkdir(parents=True)
        for number in range(6):
            Image.fromarray(noise.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return place / "photos"


def table(place, name, rows):
    with open(place / name, "w", newline="") as file:
        csv.writer(file).writerows([["path", "label"], *rows])
    return name


class Said(Exception):
    """What a command said in its last line."""


def command(capsys, *words):
    """Run a command that ends with one line."""
    code = main([*words])
    said = capsys.readouterr().err.strip()
    assert code == 2, said
    raise Said(said.replace("\r", "\n").splitlines()[-1].partition(": ")[2])


def train(capsys, *words, data="photos", out="run"):
    ours().save_pretrained("model")
    command(capsys, "train", data, "--model", "model", "--epochs", "1", "--out", out, *FAST, *words)


def missing(package, module, call):
    def run(place, capsys, monkeypatch):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, package, None)  # it cannot be imported
            if module:
                patched.delitem(sys.modules, module, raising=False)
            call()

    return run


def simple(call):
    return lambda place, capsys, monkeypatch: call()


def twice(model):
    sp.apply_prior(sp.apply_prior(model, "violin"), "violin")


def bad_backend(place, capsys, monkeypatch):
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", "foo")
    ours()(torch.zeros(1, 3, 32, 32))


def other_classes():
    ours().save_pretrained("three")
    sp.SparsePriorViTForImageClassification.from_pretrained("three", num_labels=7)


def damaged():
    ours().save_pretrained("cut")
    weights = Path("cut/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:500])
    sp.SparsePriorViTForImageClassification.from_pretrained("cut")


def part():
    model = stock()
    sp.apply_prior(model.deit, "violin")
    model.save_pretrained("part")


def own_config():
    sp.apply_prior(stock(), "violin").save_pretrained("prior")
    sp.from_pretrained(DeiTForImageClassification, "prior", config=DeiTConfig(**SIZES))


def decay_adapter(model):
    return peft.get_peft_model(model, sp.ViolinAdapterConfig(modules_to_save=["classifier"]))


def other_base():
    decay_adapter(stock()).save_pretrained("adapter")
    peft.PeftModel.from_pretrained(ours(), "adapter")


def inner_save():
    model = sp.apply_prior(stock(), "fibottention")
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj", "query"]))
    model.save_pretrained("inner")


def missing_file(place, capsys, monkeypatch):
    photos(place)
    rows = [["photos/train/a/1.png", "cat"], ["photos/train/a/none.png", "dog"]]
    train(capsys, data=table(place, "several.csv", rows))


def missing_label(place, capsys, monkeypatch):
    photos(place)
    rows = [[f"photos/train/a/{number}.png", "" if number == 0 else "cat"] for number in range(6)]
    train(capsys, data=table(place, "missing.csv", rows))


def several_balanced(place, capsys, monkeypatch):
    photos(place)
    rows = [[f"photos/train/a/{number}.png", "cat; dog" if number % 2 else "cat"] for number in range(6)]
    data = table(place, "several.csv", rows)
    train(capsys, "augmentation.balance=loss", "--labels", "several", data=data)


def one_class(place, capsys, monkeypatch):
    (place / "photos" / "train" / "a").mkdir(parents=True)
    train(capsys)


def broken(place, capsys, monkeypatch):
    (photos(place) / "train" / "a" / "3.png").write_bytes(b"no image")
    train(capsys)


def deep(place, capsys, monkeypatch):
    photos(place)
    for name in ("a", "b"):
        for number in range(6):
            Image.fromarray(np.full((40, 40), 40000, np.uint16)).save(place / f"photos/train/{name}/{number}.png")
    train(capsys)


def on_photos(*words):
    def run(place, capsys, monkeypatch):
        photos(place)
        train(capsys, *words)

    return run


def other_run(place, capsys, monkeypatch):
    photos(place)
    ours().save_pretrained("model")
    words = ["train", "photos", "--model", "model", "--epochs", "1", "--out", "run", *FAST]
    assert main(words) == 0
    capsys.readouterr()
    command(capsys, *words, "trainer.seed=5")


def no_model(place, capsys, monkeypatch):
    photos(place)
    command(capsys, "train", "photos", "--model", "vit_smal", "--out", "run")


def exists(place, capsys, monkeypatch):
    ours().save_pretrained("model")
    command(capsys, "export", "model", "model")


def no_config(place, capsys, monkeypatch):
    command(capsys, "export", "nothing", "out")


def no_processor(place, capsys, monkeypatch):
    photos(place)
    stock().save_pretrained("stock")
    command(capsys, "predict", "stock", "photos", "--out", "seen.csv")


def bad_ending(place, capsys, monkeypatch):
    photos(place)
    ours().save_pretrained("model")
    command(capsys, "predict", "model", "photos", "--out", "seen.txt")


# How each error of the page comes about, in the page's order.
RAISED = [
    missing("peft", None, lambda: sp.adapters.lora_config(stock())),
    missing("peft", "hf_sparseprior.adapters.violin", lambda: sp.ViolinAdapterConfig),
    missing("matplotlib", None, pictures.pyplot),
    missing("gradio", None, app.import_gradio),
    simple(lambda: sp.apply_prior(stock(), "violn")),
    simple(lambda: sp.apply_prior(stock(), {"support": {"name": "fibottention", "wmax": 5}})),
    simple(lambda: ours(prior={"support": {"name": "fibottention", "w_min": 5, "w_max": 3}}, image_size=64)),
    simple(lambda: sp.apply_prior(BertModel(BertConfig(**SIZES)), "violin")),
    simple(lambda: twice(stock())),
    simple(lambda: sp.apply_prior(ours(), "violin")),
    simple(lambda: setattr(ours().config, "prior", "violin")),
    simple(lambda: attention(10)),
    simple(lambda: attention(16, backend="triton")),
    bad_backend,
    simple(lambda: ours()(torch.zeros(1, 3, 40, 40))),
    simple(lambda: stock()(torch.zeros(1, 3, 256, 256))),
    simple(lambda: ours(image_size=100)),
    simple(other_classes),
    simple(damaged),
    simple(part),
    simple(own_config),
    simple(lambda: sp.remove_prior(stock())),
    simple(lambda: decay_adapter(stock()).merge_adapter()),
    simple(other_base),
    simple(lambda: decay_adapter(sp.apply_prior(stock(), "violin"))),
    simple(lambda: sp.adapters.lora_config(stock(), targets=["nope"])),
    simple(lambda: sp.adapters.lora_config(torch.nn.Linear(2, 2))),
    simple(inner_save),
    no_model,
    one_class,
    missing_file,
    missing_label,
    broken,
    deep,
    other_run,
    on_photos("trainer.learning_rat=1"),
    on_photos("trainer.learning_rate=fast"),
    on_photos("learning_rate=1"),
    on_photos("--tuning", "violin"),
    several_balanced,
    exists,
    no_config,
    simple(lambda: sp.export(ours(), "out", "tflite")),
    no_processor,
    bad_ending,
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return tmp_path


def test_each_error_of_the_page_has_its_case():
    assert len(QUOTES) == len(RAISED) == len(set(QUOTES)) and len(BY_OTHERS) == 3


@pytest.mark.parametrize(
    ("quote", "raises"), list(zip(QUOTES, RAISED, strict=False)), ids=[quote[:50] for quote in QUOTES]
)
def test_the_error_is_raised_in_these_words(quote, raises, place, capsys, monkeypatch):
    with pytest.raises((ValueError, OSError, RuntimeError, ImportError, Said)) as error:
        raises(place, capsys, monkeypatch)
    said = " ".join(str(error.value).split())
    parts = [re.escape(part.strip()) for part in quote.split("...")]
    assert re.fullmatch(r"\s*.*?\s*".join(parts), said), said


# In a process that has not imported the package: what it prints when it loads.
LOADS = {
    "trust_remote_code=True": "AutoModelForImageClassification.from_pretrained('ours')",
    'attn_implementation="hf_sparseprior"': "AutoModelForImageClassification.from_pretrained('prior')",
    "KeyError: 'HF_SPARSEPRIOR_VIOLIN'": (
        "peft.PeftModel.from_pretrained(AutoModelForImageClassification.from_pretrained('stock'), 'adapter')"
    ),
}


@pytest.mark.slow
def test_errors_of_others_without_the_package(place):
    ours().save_pretrained("ours")
    stock().save_pretrained("stock")
    sp.apply_prior(stock(), "violin").save_pretrained("prior")
    decay_adapter(stock()).save_pretrained("adapter")
    assert list(LOADS) == BY_OTHERS
    lines = ["import sys, peft, traceback", "from transformers import AutoModelForImageClassification"]
    for call in LOADS.values():
        lines += ["try:", f"    {call}", "except Exception as error:", "    print('raised', repr(error))"]
        lines += ["assert 'hf_sparseprior' not in sys.modules"]
    script = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(script, cwd=place, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr[-2000:]
    raised = [line for line in done.stdout.splitlines() if "raised" in line]
    assert len(raised) == 3
    for quote, line in zip(BY_OTHERS, raised, strict=True):
        assert quote.removeprefix("KeyError: ") in line, line


# ---- docs/faq.md ----------------------------------------------------------------------------------------------------

QUESTIONS = re.findall(r"^\*\*([^*]+\?|[^*]+\. Why\?)\*\*", (ROOT / "docs" / "faq.md").read_text(), re.MULTILINE)
IMAGES = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))


def logits(model, images=IMAGES, **options):
    with torch.inference_mode():
        return model.eval()(images, **options).logits


def seeded(model):
    """The same weights in every call, large enough that attention is not uniform."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def test_there_are_twenty_questions():
    assert len(QUESTIONS) == 20


def test_a_support_changes_a_model_a_decay_does_not_and_no_name_turns_it_off(place):
    dense = logits(seeded(stock()))
    decayed = sp.apply_prior(seeded(stock()), "violin")
    torch.testing.assert_close(logits(decayed), dense, rtol=1e-5, atol=1e-5)
    sparse = sp.apply_prior(seeded(stock()), "fibottention")
    before = logits(sparse)
    assert (before - dense).abs().max() > 1e-3
    sparse.set_attn_implementation("sdpa")
    torch.testing.assert_close(logits(sparse), before)
    ours().save_pretrained("ours")
    with pytest.raises(ValueError, match="does not support Flash Attention 2"):
        sp.SparsePriorViTForImageClassification.from_pretrained("ours", attn_implementation="flash_attention_2")


def test_sparse_attention_is_exact_over_its_pairs():
    q, k, v = torch.randn(3, 1, 4, 36, 8, generator=torch.Generator().manual_seed(2))
    mask = torch.as_tensor(sp.supports.build_mask("fibottention", num_heads=4, num_tokens=36))
    scores = (q.double() @ k.double().transpose(-1, -2) / 8**0.5).masked_fill(~mask, float("-inf"))
    expected = scores.softmax(-1) @ v.double()
    torch.testing.assert_close(
        sp.ops.attention(q, k, v, "fibottention", grid=(6, 6)).double(), expected, rtol=1e-5, atol=1e-5
    )


def test_sizes_and_attention_maps():
    model = ours(prior="fibottention", image_size=64)
    assert logits(model, torch.zeros(1, 3, 96, 64)).shape == (1, 3)
    with torch.inference_mode():
        maps = model(torch.zeros(1, 3, 96, 64), output_attentions=True).attentions
    assert [tuple(each.shape) for each in maps] == [(1, 2, 25, 25)] * 2
    large = torch.zeros(1, 3, 256, 224)
    assert logits(sp.apply_prior(stock(), "fibottention"), large, interpolate_pos_encoding=True).shape == (1, 3)


def test_adapters_name_the_classifier_and_merge_into_a_prior():
    config = sp.adapters.lora_config(stock())
    more = sp.adapters.lora_config(stock(), targets="attention+mlp")
    assert "classifier" in config.modules_to_save and len(more.target_modules) > len(config.target_modules)
    model = seeded(peft.get_peft_model(stock(), sp.LoraViolinConfig.from_lora(config)))
    before = logits(model)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), before, rtol=1e-4, atol=1e-4)
    assert type(merged) is DeiTForImageClassification and sp.remove_prior(merged)


def test_precision_and_compilation():
    model = ours(prior="fibottention+violin", image_size=64).eval()
    images = torch.zeros(1, 3, 64, 64)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(logits(compiled, images), logits(model, images))
    for dtype in (torch.bfloat16, torch.float16):
        half = ours(prior="fibottention+violin", image_size=64).to(dtype)
        scalars = [value.dtype for name, value in half.named_parameters() if "decay_bias" in name]
        assert scalars and set(scalars) == {torch.float32}
        assert logits(half, images.to(dtype)).dtype == dtype
