"""What the tests of the documentation need."""

from tests.cli.conftest import environment  # noqa: F401  (a fixture)
