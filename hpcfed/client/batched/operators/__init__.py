"""A program (`hpcfed.models.reading`) of R stacked clients, its gradients written out operator by operator.

Values are (R·B, …): the samples of all slots, slot after slot. Parameters are (R, …).

    base        a pass over the operators: values, gradients, and where parameters' gradients go
    layers      linear layers, convolutions, normalisations, embeddings
    plain       activations, pooling, reshapes, sums, dropout
    general     any other function, its gradient by autograd of it alone
    build       calls to operators; ReLU behind the pool; memory format
    network     the `StackedNetwork` of them, and of perceptrons
    check       its values and gradients beside the module's, in float64
"""
