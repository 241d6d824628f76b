"""Fixtures of the documentation tests."""

from tests.cli.conftest import environment  # noqa: F401  (a fixture)
