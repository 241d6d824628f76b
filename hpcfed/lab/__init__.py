"""The laboratory: what reads run folders, compares them, and starts many runs; no part of the engine imports it."""
