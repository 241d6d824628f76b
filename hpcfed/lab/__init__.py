"""The laboratory: tools that read and compare run folders or start many runs; the engine imports none of it."""
