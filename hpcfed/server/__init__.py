"""Server rules that several methods share."""
