"""The data of a run: the federation file, access to its samples, and their preparation on a device."""
