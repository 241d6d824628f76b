"""What a local round costs beside a bare PyTorch loop: processes of their own, in turn, medians and ratios."""
