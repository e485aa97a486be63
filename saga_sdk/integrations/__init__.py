"""Which framework has which integration: a module with ``install()`` and ``uninstall()``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True, slots=True)
class Integration:
    """One integration, which is loaded when the program has imported its framework.

    Attributes:
        name: of the module in this package.
        trigger: the framework's module.
        mark: what the framework's module has, and a module of the program's own with the same
            name has not; None where no such module is to be expected.
    """

    name: str
    trigger: str
    mark: str | None = None

    @property
    def module_name(self) -> str:
        return f"{__name__}.{self.name}"

    def installer(self, is_on: Callable[[], bool]) -> Callable[[ModuleType], None]:
        """A function that installs the integration once its framework is imported.

        Args:
            is_on: whether it is still wanted; asked again after the installation.
        """

        def install(framework: ModuleType) -> None:
            if self.mark is not None and not hasattr(framework, self.mark):
                return
            module: Any = importlib.import_module(self.module_name)
            if is_on():
                module.install()
            if not is_on():
                module.uninstall()

        return install

    def uninstall(self) -> None:
        """Uninstall the integration, if it was ever loaded."""
        module: Any = sys.modules.get(self.module_name)
        if module is not None:
            module.uninstall()


INTEGRATIONS = (
    Integration("langchain", "langchain_core"),
    Integration("autogen", "autogen_agentchat"),
    Integration("crewai", "crewai"),
    Integration("openai_agents", "agents", mark="Runner"),
    Integration("agent_framework", "agent_framework"),
)
