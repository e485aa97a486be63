"""When a process that has ended is started again. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

_LONGEST_PAUSE_S = 60.0
_HEALTHY_S = 60.0
_USAGE_EXIT_CODE = 2


@dataclass(slots=True)
class Restarts:
    """The restarts of one process.

    Before restarts in a row there are pauses of 1, 2, 4 … 60 seconds. The row ends
    once the process has been ready for 60 s. A process that has never been ready is given up:
    after ``max_failed_starts`` ends, or at once when it has refused its command line (exit code 2).
    One that has been ready is started again for as long as it takes: others serve meanwhile.

    Args:
        max_failed_starts: at least 1.
    """

    max_failed_starts: int
    _in_row: int = field(init=False, default=0)
    _was_ready: bool = field(init=False, default=False)

    def after(self, exit_code: int, ready_s: float | None) -> float | None:
        """The pause before the next start, seconds; None: it is given up.

        Args:
            exit_code: of the process that has ended; negative: the signal.
            ready_s: for how many seconds it had been ready; None: it never was, this time.
        """
        if ready_s is not None:
            self._was_ready = True
            if ready_s >= _HEALTHY_S:
                self._in_row = 0
        self._in_row += 1
        if not self._was_ready and (
            exit_code == _USAGE_EXIT_CODE or self._in_row >= self.max_failed_starts
        ):
            return None
        return min(2.0 ** min(self._in_row - 1, 16), _LONGEST_PAUSE_S)

    @property
    def in_row(self) -> int:
        """Ends in a row so far."""
        return self._in_row
