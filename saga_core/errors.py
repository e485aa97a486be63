"""Errors that SAGA raises to its callers.

SagaError
├── SettingsError   a setting is out of its range
└── NoticeError     a notice to a worker is malformed
"""


class SagaError(Exception):
    """The base of every error that SAGA raises on purpose."""


class SettingsError(SagaError, ValueError):
    """A setting is out of its range; the message names it, its value and the range."""


class NoticeError(SagaError, ValueError):
    """A notice is malformed; the message names the field and what it takes."""
