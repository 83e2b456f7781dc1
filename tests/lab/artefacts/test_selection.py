"""Selection of runs, and the catalogue of artefacts."""

import math
import re
import tracemalloc

import pytest

from sinkformers.lab.artefacts import record_json, selection
from sinkformers.lab.artefacts.artefact import ExperimentError
from sinkformers.lab.artefacts.catalogue import ARTEFACTS
from sinkformers.lab.tasks.images import VisionConfig

NAMES = [
    "figure1",
    "figure2-mnist",
    "figure2-points",
    "figure2-translation",
    "table1-set",
    "table1-pct",
    "figure3",
    "figure4",
    "table2",
    "figure5",
    "figure6",
    "theory",
]


def test_every_artefact_of_the_paper_is_listed():
    assert [artefact.name for artefact in ARTEFACTS] == [*NAMES, "causal-lm", "digits"]


@pytest.mark.parametrize("artefact", [a for a in ARTEFACTS if a.task is not None], ids=lambda a: a.name)
def test_presets_are_consistent(artefact):
    of_the_paper = {"paper"} if artefact.name in NAMES else set()
    others = {"authors", "medium"} if of_the_paper else {"recall"}
    required = {"small", "smoke"} | of_the_paper
    assert required <= artefact.presets.keys() <= required | others
    for preset in artefact.presets.values():
        names = [arm.name for arm in preset.arms]
        assert len(set(names)) == len(names)
        assert all(re.fullmatch(r"[a-z0-9.-]+", name) for name in names)
        assert {arm.n_iters == 1 for arm in preset.arms} <= {True, False}
        for arm in preset.arms:
            assert arm.name.endswith(f"n-{arm.n_iters}")
            config = preset.config.with_settings(arm.settings)
            assert config.n_iters == arm.n_iters
            if isinstance(config, VisionConfig):
                assert config.image % config.patch == 0
            record_json.dumps(dict(arm.settings))
    assert artefact.presets["smoke"].data in ("digits", "")


@pytest.mark.parametrize(
    ("text", "expected"), [("0", (0,)), ("0-3", (0, 1, 2, 3)), ("1,5", (1, 5)), ("0-1, 4,1", (0, 1, 4)), ("07", (7,))]
)
def test_lists_of_numbers(text, expected):
    assert selection.numbers("--seeds", text, lowest=0) == expected


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1,,2", "1.5", "0x1", "1234567890", "٣-٤", "٣-٤x", "1e3"])
def test_invalid_lists_are_refused(text):
    with pytest.raises(
        ExperimentError, match=r"--seeds must be whole numbers from 0 to 999,999,999, such as 0-4 or 0,3,5; got"
    ):
        selection.numbers("--seeds", text, lowest=0)


@pytest.mark.parametrize(
    ("text", "many"),
    [
        ("0-999999999", "1,000,000,000"),
        ("0-99999999", "100,000,000"),
        ("0-9999,20000", "10,001"),
        (",".join(["0-9999"] * 999), "9,990,000"),
    ],
)
def test_too_many_numbers_are_refused_before_ranges_are_expanded(text, many):
    tracemalloc.start()
    try:
        with pytest.raises(ExperimentError, match=rf"^--seeds names {many} numbers, and 10,000 are the most; got '0-9"):
            selection.numbers("--seeds", text, lowest=0)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_too_many_runs_are_refused():
    figure5 = selection.artefact_named("figure5")
    assert len(selection.select_runs(figure5, "smoke", seeds="0-4999")) == 10_000
    with pytest.raises(ExperimentError, match=r"^5,001 seeds of 2 arms are 10,002 runs, and 10,000 are the most"):
        selection.select_runs(figure5, "smoke", seeds="0-5000")
    with pytest.raises(ExperimentError, match=r"^10,000 seeds of 10,000 arms are 100,000,000 runs"):
        selection.select_runs(figure5, "smoke", seeds="0-9999", n_iters="1-10000")


def test_runs_are_ordered_by_seed_and_named_in_their_folders():
    artefact = selection.artefact_named("figure5")
    runs = selection.select_runs(artefact, "small", seeds="0-1")
    assert [str(run.folder) for run in runs] == [
        f"figure5/small/n-{n}/seed-{seed}" for seed in (0, 1) for n in (1, 3, "inf")
    ]


def test_other_counts_of_iterations_make_other_arms():
    artefact = selection.artefact_named("figure6")
    runs = selection.select_runs(artefact, "smoke", n_iters="1,3,21", arms=["patch-4-*"])
    assert [run.arm.name for run in runs] == [f"patch-4-rate-0.001-n-{n}" for n in (1, 3, 21)]
    assert [run.arm.n_iters for run in runs] == [1, 3, 21]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("inf", (math.inf,)), ("1,inf", (1, math.inf)), (" inf ,1-3", (1, 2, 3, math.inf)), ("inf,inf,5", (5, math.inf))],
)
def test_counts_may_have_the_limit_which_comes_last(text, expected):
    assert selection.counts("--n-iters", text) == expected


@pytest.mark.parametrize("text", ["inf-3", "1-inf", "-inf", "Infinity", "inf,x", "nan"])
def test_invalid_counts_are_refused_with_the_name_of_the_limit(text):
    with pytest.raises(ExperimentError, match=r"^--n-iters must be whole numbers from 1 to .*\. The limit is inf\.$"):
        selection.counts("--n-iters", text)


def test_the_limit_makes_an_arm_of_every_arm_and_finite_counts_replace_it():
    figure6 = selection.artefact_named("figure6")
    runs = selection.select_runs(figure6, "smoke", n_iters="3,inf", arms=["patch-4-*"])
    assert [run.arm.name for run in runs] == ["patch-4-rate-0.001-n-3", "patch-4-rate-0.001-n-inf"]
    assert [run.arm.n_iters for run in runs] == [3, math.inf]
    runs = selection.select_runs(figure6, "authors", n_iters="3", seeds="0", arms=["patch-4-*"])
    assert [run.arm.name for run in runs] == [f"patch-4-rate-{rate}-n-3" for rate in ("0.001", "0.002")]


@pytest.mark.parametrize(
    ("name", "preset", "arms"),
    [
        ("figure4", "small", ["n-inf"]),
        ("figure5", "small", ["n-inf"]),
        ("table1-set", "small", ["n-inf"]),
        ("table1-set", "medium", ["n-inf"]),
        ("table1-pct", "small", ["n-inf"]),
        ("table2", "small", ["continued-n-inf"]),
        *(
            ("figure6", preset, [f"patch-{patch}-rate-{rate}-n-inf" for patch in (14, 7, 4) for rate in (0.001, 0.002)])
            for preset in ("small", "authors")
        ),
    ],
)
def test_arms_at_the_limit_differ_from_another_arm_in_n_iters_only(name, preset, arms):
    found = selection.artefact_named(name).presets[preset].arms
    at_the_limit = [arm for arm in found if arm.n_iters == math.inf]
    assert [arm.name for arm in at_the_limit] == arms
    for arm in at_the_limit:
        others = [other for other in found if {**other.settings, "n_iters": math.inf} == arm.settings]
        assert {1, math.inf} < {other.n_iters for other in others}
        assert {other.after for other in others} == {arm.after}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: selection.artefact_named("figure7"),
            r"there is no artefact 'figure7'. Choose one of figure1, figure2-",
        ),
        (
            lambda: selection.select_runs(selection.artefact_named("figure6"), "large"),
            r"figure6 has no preset 'large'. Choose one of paper, authors, small, smoke",
        ),
        (
            lambda: selection.select_runs(selection.artefact_named("figure5"), "smoke", arms=["x*"]),
            r"--arms x\* holds none of the arms of smoke: n-1, n-3",
        ),
        (
            lambda: selection.select_runs(selection.artefact_named("figure5"), "smoke", n_iters="0"),
            r"--n-iters must be whole numbers from 1 to",
        ),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(call, message):
    with pytest.raises(ExperimentError, match=message):
        call()
