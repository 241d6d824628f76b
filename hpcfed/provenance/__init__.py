"""Provenance of a run: its certificate checked and signed, its rounds verified, replayed and compared; vectors."""
