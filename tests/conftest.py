"""Environment and order of the test suite."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

# The TPU compiler is asked to stay offline and quiet, and jax to run on the CPU.
# This has to happen before anything imports jax.
for _name, _value in {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "DECOUPLE_GCLOUD": "TRUE",
}.items():
    os.environ.setdefault(_name, _value)

_LATE_MARKERS = ("slow", "compiled", "maxtext")
"""From the quickest to the slowest; a test runs with its slowest marker."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs quick tests first, then those that compile, then those that run MaxText."""
    items.sort(key=_lateness)


def _lateness(item: pytest.Item) -> int:
    ranks = [at + 1 for at, name in enumerate(_LATE_MARKERS) if item.get_closest_marker(name)]
    return max(ranks, default=0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fails a test that skips itself: without an extra, nothing would have been tested."""
    report = yield
    _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a whole file, as ``importorskip`` skips it."""
    report = yield
    _fail_if_skipped(report)
    return report


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        report.longrepr = f"no test may be skipped here: {report.longrepr}"
        report.outcome = "failed"
