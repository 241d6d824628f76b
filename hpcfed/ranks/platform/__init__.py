"""Optional speed from particular processors, C libraries and CPython; results do not need it.

    collector   no garbage collection during imports
    malloc      glibc's malloc keeps the memory that a round frees
    onednn      large float32 products on AMD's processors from Zen 5 on

Without this room the rest computes the same: on other systems they do nothing, `local.matmul: blas` needs no oneDNN,
and five lines call them, in `hpcfed.api`, `hpcfed.cli.run`, `hpcfed.assembly`, `hpcfed.client.batched.matmul` and
``hpcfed bench reduce``.
"""
