"""Data preparation and the federation file."""
