"""Many clients trained at once, in tiles of R slots on stacked parameters (R, …), in place of one after another.

Runs where `local.engine` is `batched`: by default for models that can be read (`hpcfed.models.reading`), without
buffers of clients, `compile` or mixed precision. Anything else takes `hpcfed.client.solver`, the reference;
tests hold the two together bit by bit where the kernels are alike, and to rounding elsewhere.

    tiles       R by a rule, widths that fill lines of memory, and the memory of R slots
    solver      the clients of a tile, their minibatches stacked
    networks    what a model is read as: a perceptron, or operators
    gradients   losses and gradients of stacked linear models and perceptrons, layer by layer, without autograd
    operators   those of all other models that can be read
    steps       the client optimizers' steps on stacked parameters, one pass over memory where they allow it
    direct      plain SGD along operators, each parameter stepped as soon as its gradient is there
    device      a tile's work on a device, in pieces that are recorded
    matmul      the products of stacked layers: BLAS, or oneDNN where the processor gains by it

A round enters at `solver`, which calls `gradients` and `steps` once for each step; only these two call `matmul`.
"""
