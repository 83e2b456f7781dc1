"""The configuration of a task: what all arms of a preset share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from sinkformers.lab.workbench.task import Recipe

Config = TypeVar("Config", bound="TaskConfig")


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Plain values that determine a training, apart from its seed and its data. Records hold them as `config`."""

    recipe: Recipe
    n_iters: int = 1

    def with_settings(self: Config, settings: Mapping[str, Any]) -> Config:
        """Return the configuration of an arm: its settings replace the fields of the same name, here or in the recipe.

        Raises:
            TypeError: if a setting is a field of neither.
        """
        names = {field.name for field in fields(self)}
        own = {name: value for name, value in settings.items() if name in names}
        recipe = {name: value for name, value in settings.items() if name not in names}
        return replace(self, **{"recipe": replace(self.recipe, **recipe), **own})
