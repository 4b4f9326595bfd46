"""Comparisons of heads: priors under one head, heads of one metric, and the records in the repository."""

from pathlib import Path

import pytest
import yaml

pytest.importorskip("pycocotools", reason="the extra `heads` is not installed")

from hf_sparseprior.runs.results import read_results
from tasks.common.comparison_table import table
from tasks.common.paired import difference_table, differences
from tasks.common.records import read_records
from tasks.heads import compare
from tests.configs import shipped
from tests.each import each
from tests.tasks.common.mm.shapes import write_shapes
from tests.tasks.heads.tiny import HEAD_OPTIONS, tiny_config

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "tasks" / "heads" / "results"
SHIPPED = ("boxes", "masks", "upernet_priors")


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return write_shapes(tmp_path_factory.mktemp("shapes"))


def comparison(shapes, folder, head, variants, seeds=(0,)):
    content = tiny_config(shapes, head, max_steps=2)
    del content["trainer"]["seed"]
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump({**content, "seeds": list(seeds), "variants": variants}))
    return ["--config", str(path), "--out", str(folder / "runs"), "--records", str(folder / "records")]


@pytest.mark.slow
def test_priors_under_one_head(shapes, tmp_path, capfd):
    """Then nothing is left to do, whatever it was asked for before."""
    variants = {"dense": {"model": {"prior": "dense"}}, "violin": {"model": {"prior": "violin"}}}
    arguments = comparison(shapes, tmp_path, "upernet", variants)
    assert compare.main(arguments) == 0, capfd.readouterr().err
    found = {name: runs[0] for name, runs in read_records(tmp_path / "records").items()}
    assert list(found) == list(variants)
    for name, record in found.items():
        own = read_results(tmp_path / "runs" / name / "seed0" / "results.json")
        assert own["metrics"] == record["metrics"] and own["baseline"] == record["baseline"]
        assert own["prior"] == name and own["seed"] == 0 and own["head"] == "upernet"
        assert 0 < record["baseline"]["test_mIoU"] < 1
    lines = (tmp_path / "records" / "table.md").read_text().splitlines()
    share = f"{100 * found['violin']['metrics']['test_mIoU']:.2f}"
    constant = f"{100 * found['violin']['baseline']['test_mIoU']:.2f}"
    assert lines[0].startswith("| prior | test mIoU, %") and lines[3].startswith(f"| violin | {share} | {constant} |")
    before = (tmp_path / "records" / "records.jsonl").stat().st_mtime_ns
    assert compare.main(arguments) == 0
    assert (tmp_path / "records" / "records.jsonl").stat().st_mtime_ns == before
    capfd.readouterr()
    assert compare.main([*arguments, "trainer.max_steps=3"]) == 2  # what is recorded is of two steps
    assert "trainer.max_steps" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_heads_that_find_boxes(shapes, tmp_path, capfd):
    variants = {name: {"head": {"name": name, **HEAD_OPTIONS[name]}} for name in ("detr", "rt_detr")}
    assert compare.main(comparison(shapes, tmp_path, "detr", variants)) == 0, capfd.readouterr().err
    record = read_records(tmp_path / "records")["rt_detr"][0]
    assert record["config"]["head"]["name"] == "rt_detr" and record["steps"] == 2
    lines = (tmp_path / "records" / "table.md").read_text().splitlines()
    assert lines[0].startswith("| head | test box mAP, %") and record["baseline"]["test_box_mAP"] > 0.05


def test_heads_of_several_metrics_are_refused(shapes, tmp_path, capsys):
    other = tiny_config(shapes, "mask2former", max_steps=2)
    del other["trainer"]["seed"]
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(other))
    variants = {"a": {}, "b": {"base": "other.yaml"}}
    assert compare.main(comparison(shapes, tmp_path, "upernet", variants)) == 2
    assert "rows must have heads of one metric, not of 2 (mIoU: a; mask_mAP: b)" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists() and not (tmp_path / "records").exists()


@each("name", SHIPPED)
def test_records_are_of_todays_configurations_and_the_table_is_theirs(name):
    found = compare.load_comparison(shipped.path(f"heads/{name}.yaml"))
    records = compare.compare.all_records(found, RESULTS / name)  # refuses records of other configurations
    assert set(records) == set(found.configs)
    assert all([record["seed"] for record in rows] == found.seeds for rows in records.values())
    text = (RESULTS / name / "table.md").read_text()
    assert text.startswith(table(records, found.metric))
    by_row = differences(records, next(iter(records)), found.metric)
    assert not by_row or difference_table(by_row, next(iter(records))) in text
