"""Runs are found from any folder above them, and none is dropped silently."""

import json
import math

import pytest

from sinkformers.lab.artefacts.artefact import ExperimentError
from sinkformers.lab.reporting.comparison import comparisons
from sinkformers.lab.reporting.records import Unfinished, find, read, run_key, value
from tests.lab.fake_runs import epoch, write_run, write_unfinished


@pytest.mark.parametrize("below", ["", "figure6", "figure6/small", "figure6/small/n-3", "figure6/small/n-3/seed-0"])
def test_runs_are_found_from_any_folder_above_them(tmp_path, below):
    write_run(tmp_path, n_iters=3, final=0.8)
    found = find([tmp_path / below])
    assert [run_key(record) for record in found.records] == [("figure6", "small", "n-3", 0)]
    assert value(found.records[0]) == 0.8
    assert found.records[0].run["commit"] == "0123abc"
    assert found.unfinished == ()


def test_records_are_sorted_by_their_settings_as_numbers(tmp_path):
    for patch in (14, 2, 7):
        for n_iters in (21, 3, 1):
            write_run(tmp_path, arm=f"patch-{patch}-n-{n_iters}", patch=patch, n_iters=n_iters)
    found = [record.metrics["settings"] for record in find([tmp_path]).records]
    assert [(each["patch"], each["n_iters"]) for each in found] == [(p, n) for p in (2, 7, 14) for n in (1, 3, 21)]


def test_an_arm_with_one_more_setting_comes_after_the_arm_without_it(tmp_path):
    for n_iters in (3, 1):
        write_run(tmp_path, arm=f"plain-{n_iters}", patch=7, n_iters=n_iters)
        write_run(tmp_path, arm=f"tied-{n_iters}", patch=7, n_iters=n_iters, tied=True)
    assert [record.metrics["arm"] for record in find([tmp_path]).records] == ["plain-1", "plain-3", "tied-1", "tied-3"]


def test_a_continued_arm_comes_after_the_arm_it_continues(tmp_path):
    write_run(tmp_path, arm="pretrain", rate=0.001, n_iters=1)
    for n_iters in (3, 1):
        write_run(tmp_path, arm=f"continued-{n_iters}", rate=0.0001, n_iters=n_iters, metrics={"after": "pretrain"})
    records = find([tmp_path]).records
    assert [record.metrics["arm"] for record in records] == ["pretrain", "continued-1", "continued-3"]
    assert [each.settings for each in comparisons(records)] == [{"rate": 0.001}, {"rate": 0.0001}]


def test_an_unfinished_run_is_named_with_its_finished_epochs(tmp_path):
    write_run(tmp_path)
    write_unfinished(tmp_path, arm="n-3", seed=4, epochs=3)
    (tmp_path / "figure6" / "small" / "n-3" / "seed-5").mkdir()
    write_unfinished(tmp_path, arm="n-3", seed=6, epochs=0)
    assert find([tmp_path]).unfinished == (
        Unfinished("figure6", "small", "n-3", 4, epochs=3),
        Unfinished("figure6", "small", "n-3", 5, epochs=0),
        Unfinished("figure6", "small", "n-3", 6, epochs=0),
    )


def test_a_run_that_is_finished_in_another_folder_is_finished(tmp_path):
    write_unfinished(tmp_path / "one", arm="n-1", seed=0)
    write_run(tmp_path / "two", n_iters=1, seed=0)
    found = find([tmp_path / "one", tmp_path / "two"])
    assert len(found.records) == 1
    assert found.unfinished == ()


def test_the_same_run_found_twice_counts_once(tmp_path):
    # NaN differs from itself, equal files do not differ.
    for root in ("one", "two"):
        write_run(tmp_path / root, epochs=[epoch(0, 0.1), epoch(1, math.nan)])
    assert len(find([tmp_path / "one", tmp_path / "two", tmp_path]).records) == 1


def test_the_same_run_with_two_results_is_refused_with_both_paths(tmp_path):
    folders = [write_run(tmp_path / root, final=final) for root, final in (("one", 0.8), ("two", 0.7))]
    with pytest.raises(ExperimentError, match="the same run with different results") as error:
        find([tmp_path])
    assert all(str(folder / "metrics.json") in str(error.value) for folder in folders)


def test_a_run_that_diverged_is_nan_and_a_null_is_too(tmp_path):
    for seed, final in enumerate((math.nan, None)):
        folder = write_run(tmp_path, seed=seed, epochs=[epoch(1, 0.5) | {"test": {"accuracy": final}}])
        assert math.isnan(value(read(folder)))


def test_run_json_may_be_missing(tmp_path):
    folder = write_run(tmp_path)
    (folder / "run.json").unlink()
    assert read(folder).run == {}


@pytest.mark.parametrize("name", ["metrics.json", "run.json"])
@pytest.mark.parametrize("content", [b'{"artefact": ', b"[1, 2]", b"\xff\xfe", b""])
def test_a_damaged_file_is_named(tmp_path, name, content):
    folder = write_run(tmp_path)
    (folder / name).write_bytes(content)
    with pytest.raises(ExperimentError) as error:
        find([tmp_path])
    assert str(folder / name) in str(error.value)
    assert "train again" in str(error.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arm": None}, "arm is missing."),
        ({"arm": 3}, "arm must be a string, got 3."),
        ({"seed": "0"}, "seed must be a whole number, got '0'."),
        ({"seed": True}, "seed must be a whole number, got True."),
        ({"seed": 10**400}, "seed must be a whole number, got more than 1e+308."),
        ({"settings": {"patch": 7}}, "settings.n_iters is missing."),
        ({"settings": []}, "settings must be an object, got []."),
        ({"epochs": []}, "epochs must be a list of 1 or more, got []."),
        ({"epochs": [3]}, "epochs[0] must be an object, got 3."),
        ({"epochs": [{"test": {"accuracy": "high"}}]}, "epochs[0].test.accuracy must be a number or null, got 'high'."),
        ({"epochs": [{"layers": [None]}]}, "epochs[0].layers[0] must be an object, got None."),
        ({"config": [1]}, "config must be an object, got [1]."),
        ({"data": "x" * 99}, "data must be an object, got 'xxxxxxxxxxxxxxx"),
        ({"metric": "bleu"}, "its last epoch holds no test bleu"),
    ],
)
def test_invalid_records_are_refused_with_the_reason(tmp_path, change, reason):
    folder = write_run(tmp_path)
    metrics = json.loads((folder / "metrics.json").read_text())
    (folder / "metrics.json").write_text(json.dumps(metrics | change))
    with pytest.raises(ExperimentError) as error:
        find([tmp_path])
    assert reason in str(error.value)
    assert str(folder / "metrics.json") in str(error.value)


@pytest.mark.parametrize("seconds", [5, [None], ["2"], [[]], [10**400]], ids=str)
def test_times_that_are_no_numbers_are_refused(tmp_path, seconds):
    folder = write_run(tmp_path, run={"seconds_per_epoch": seconds})
    with pytest.raises(ExperimentError, match=r"run.json is no record of a run: seconds_per_epoch.* must be a"):
        read(folder)


def test_lone_surrogates_are_refused(tmp_path):
    folder = write_run(tmp_path, metrics={"config": {"note": "\udcff"}})
    with pytest.raises(ExperimentError, match=r"metrics.json cannot be read: .*surrogates not allowed"):
        read(folder)


def test_deeply_nested_records_are_refused(tmp_path):
    folder = write_run(tmp_path)
    (folder / "metrics.json").write_text("[" * 100_000)
    with pytest.raises(ExperimentError, match=r"metrics.json cannot be read: maximum recursion depth"):
        read(folder)


def test_missing_folders_are_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ExperimentError, match="nowhere does not exist"):
        find([tmp_path / "nowhere"])
    with pytest.raises(ExperimentError, match="file is not a folder"):
        find([tmp_path / "file"])
