"""All configurations have one base: settings of an arm replace fields of the configuration or of its recipe."""

from dataclasses import asdict, dataclass

import pytest

from sinkformers.lab.artefacts.catalogue import ARTEFACTS
from sinkformers.lab.tasks.config import TaskConfig
from sinkformers.lab.workbench.task import Recipe


@dataclass(frozen=True, kw_only=True)
class ToyConfig(TaskConfig):
    width: int


CONFIG = ToyConfig(recipe=Recipe(epochs=3, batch=10, rate=0.1), width=4)


def test_settings_replace_fields_here_and_in_the_recipe():
    changed = CONFIG.with_settings({"n_iters": 5, "width": 8, "rate": 0.2, "epochs": 7})
    assert changed == ToyConfig(recipe=Recipe(epochs=7, batch=10, rate=0.2), width=8, n_iters=5)
    assert ToyConfig(recipe=Recipe(epochs=3, batch=10, rate=0.1), width=4, n_iters=1) == CONFIG


def test_a_setting_that_is_no_field_is_refused():
    with pytest.raises(TypeError, match="'depth'"):
        CONFIG.with_settings({"depth": 2})


@pytest.mark.parametrize("artefact", [each for each in ARTEFACTS if each.task], ids=lambda each: each.name)
def test_all_arms_of_the_catalogue_have_a_configuration(artefact):
    for preset in artefact.presets.values():
        assert isinstance(preset.config, TaskConfig)
        for arm in preset.arms:
            config = preset.config.with_settings(arm.settings)
            values = {**asdict(config.recipe), **asdict(config)}
            assert {name: values[name] for name in arm.settings} == dict(arm.settings)
