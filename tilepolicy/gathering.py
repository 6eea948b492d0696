"""Collecting the problems of several steps, so that one run reports all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from tilepolicy.errors import ConfigError, Problem, TilepolicyError

__all__ = ["Gathering"]


class Gathering:
    """Runs steps to the end although some of them fail, and raises their problems together.

    ::

        with Gathering() as problems:
            for config in configs:
                with problems.of_one():
                    resolve(config)

    Raises:
        ConfigError: on leaving, with the problems of every step that failed; the exception
            itself when only one did.
    """

    def __init__(self) -> None:
        self._failures: list[TilepolicyError] = []

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Every problem so far."""
        return tuple(problem for failure in self._failures for problem in failure.problems)

    @contextmanager
    def of_one(self) -> Iterator[None]:
        """One step; what tilepolicy raises in it is kept for the end."""
        try:
            yield
        except TilepolicyError as failure:
            self._failures.append(failure)

    def __enter__(self) -> Gathering:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None or not self._failures:
            return
        if len(self._failures) == 1:
            raise self._failures[0]
        raise ConfigError(self.problems)
