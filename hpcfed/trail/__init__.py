"""What a run leaves for others to check it: a certificate, its signature, and their comparison with the folder."""
