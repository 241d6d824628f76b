"""What would have been: runs without some clients, to the bit, and what each client brings and takes."""
