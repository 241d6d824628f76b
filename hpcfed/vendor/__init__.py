"""Optional speed from particular processors and C libraries; results do not need it.

    malloc      glibc's malloc keeps the memory that a round frees
    onednn      large float32 products on AMD's processors from Zen 5 on

Without this room the rest computes the same: on other systems both do nothing, `local.matmul: blas` needs no oneDNN,
and three lines call them, in `hpcfed.setup`, `hpcfed.client.batched.matmul` and ``hpcfed bench reduce``.
"""
