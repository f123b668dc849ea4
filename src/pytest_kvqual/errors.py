"""Every error that the project raises on purpose.

    KvqualError
     ├── StudyError      a declaration is malformed: TOML, keys, types, panels, scales
     ├── FormatError     a cache, tensor or layout is not what the KV format declares
     ├── LockError       the lock is missing or no longer matches a file it names
     ├── ModelError      a model's files are missing or are not the declared ones
     ├── InstallError    an arm's interpreter, checkout or package is not what it declares
     ├── ServerError     the engine did not start, died, or answered what it must not
     ├── CaptureError    a capture could not be completed
     ├── EvidenceError   a record is missing, damaged or of an unknown schema
     ├── ReceiptError    a receipt is missing, stale or of another scope
     └── RefusedError    a prerequisite is missing

``str(error)`` is one line: what was found, what was expected, where. ``error.advice`` says what to do next.
"""

from __future__ import annotations


class KvqualError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: One line: what was found, what was expected, where.
        advice: One line: what a person can do next; empty when the message already says it.
    """

    def __init__(self, message: str, *, advice: str = "") -> None:
        super().__init__(message)
        self.advice = advice

    def line(self) -> str:
        """The message and the advice in one line."""
        return f"{self} ({self.advice})" if self.advice else str(self)


class StudyError(KvqualError):
    """A declaration is malformed."""


class FormatError(KvqualError):
    """A cache, tensor or layout is not what the KV format declares."""


class LockError(KvqualError):
    """The lock is missing or no longer matches a file that it names."""


class ModelError(KvqualError):
    """A model's files are missing or are not the declared ones."""


class InstallError(KvqualError):
    """An arm's interpreter, checkout or package is not what it declares."""


class ServerError(KvqualError):
    """The engine did not start, died, or answered what it must not."""


class CaptureError(KvqualError):
    """A capture could not be completed."""


class EvidenceError(KvqualError):
    """A record is missing, damaged or of an unknown schema."""


class ReceiptError(KvqualError):
    """A receipt is missing, stale or of another scope."""


class RefusedError(KvqualError):
    """A prerequisite is missing."""
