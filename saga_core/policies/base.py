"""What every policy is made of."""

from __future__ import annotations

from saga_core.pauses import PauseModel
from saga_core.retention import EvictionKey
from saga_core.settings import RetentionSettings


class Policy:
    """Takes what a policy may need; learns nothing from evictions."""

    def __init__(self, settings: RetentionSettings, model: PauseModel) -> None:
        self._settings = settings
        self._model = model

    def gave_up(self, key: EvictionKey) -> None:
        """Nothing to learn."""
        del key
