"""The user's own tables: columns found by name, cells converted to numbers, statistics of training rows."""
