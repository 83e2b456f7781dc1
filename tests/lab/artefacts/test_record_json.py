"""Records hold the limit as "inf", stay valid JSON, and are read back as they were."""

import json
import math

import pytest

from sinkformers.lab.artefacts import record_json

RECORD = {
    "settings": {"n_iters": math.inf, "rate": 0.5},
    "config": {"recipe": {"epochs": 3}, "n_iters": math.inf},
    "epochs": [{"n_iters": math.inf}, {"n_iters": 3, "loss": None}],
    "arm": "inf",
}


def strict(text):
    """Parse JSON as its standard says: without Infinity and NaN."""

    def refused(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refused)


@pytest.mark.parametrize("options", [{}, {"indent": 1, "sort_keys": True}])
def test_the_limit_is_written_as_a_string_and_read_as_a_number(options):
    text = record_json.dumps(RECORD, **options)
    assert [strict(text)[part]["n_iters"] for part in ("settings", "config")] == ["inf", "inf"]
    assert record_json.loads(text) == RECORD
    assert record_json.loads(text.encode()) == RECORD


def test_only_n_iters_is_read_as_the_limit():
    assert record_json.loads('{"arm": "inf", "n_iters": "info"}') == {"arm": "inf", "n_iters": "info"}


def test_finite_records_are_written_as_before():
    record = {"settings": {"n_iters": 5, "patches": (7, 4)}, "text": "∞", "none": None, "flag": True}
    assert record_json.dumps(record, indent=1, sort_keys=True) == json.dumps(record, indent=1, sort_keys=True)


@pytest.mark.parametrize("value", [{"loss": math.inf}, {"loss": math.nan}, {"n_iters": -math.inf}])
def test_no_other_infinity_is_written(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        record_json.dumps(value)


def test_a_record_compares_with_one_that_was_read():
    record = {"config": {"n_iters": math.inf, "sizes": (3, 4)}}
    assert record_json.as_read(record) == {"config": {"n_iters": math.inf, "sizes": [3, 4]}}
