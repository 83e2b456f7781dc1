"""What jobs ask for: time limits in Slurm's notations."""

import pytest

from sinkformers.lab.artefacts.artefact import ExperimentError
from sinkformers.lab.cluster.resources import LONGEST, Resources, duration, minutes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30", 30),
        ("4:00", 4),
        ("4:01", 5),  # rounded up
        ("4:00:00", 240),
        ("0:00:01", 1),
        ("2-0", 2 * 1440),
        ("2-12:30", 2 * 1440 + 12 * 60 + 30),
        ("2-12:30:30", 2 * 1440 + 12 * 60 + 31),
        (" 365-0 ", LONGEST),
    ],
)
def test_time_limits_are_those_of_slurm(text, expected):
    assert minutes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "0", "0:00:00", "-1", "4h", "1:2:3:4", "4:00:00 x", "366-0", "99999999", "٣٠", "1.5", "2-", "30\n1"]
)
def test_other_time_limits_are_refused(text):
    with pytest.raises(ExperimentError, match=r"--time must be minutes, .*; got "):
        minutes(text)


def test_resources_are_said_in_words():
    assert str(Resources(240)) == "1 CPU, 4 h at a time"
    assert str(Resources(90, gpus=2, cpus=3, processes=2, partition="p")) == (
        "2 processes, 6 CPUs, 2 GPUs, 1 h 30 min at a time, partition p"
    )
    assert duration(20) == "20 min"


def test_a_short_job_is_warned_before_its_end():
    assert Resources(1).warning < 60
    assert Resources(240).warning == 120
