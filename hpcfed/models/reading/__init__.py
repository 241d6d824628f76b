"""A module read as a program: the torch functions that its forward pass calls, in their order, on what.

A forward pass is run on two small minibatches, of two and of three samples, and its calls are recorded
(`hpcfed.models.reading.recorder`). So it does not matter how a module is written: layers, functions, shapes computed
in Python, loops over a `ModuleList`. What would not be the same in the next call is refused, with file and line:
numbers taken out of tensors, random draws, attributes that a call changes, hooks, writes to parameters or buffers.

    program     the calls, their arguments, and which numbers in them count samples
    recorder    the recording
    module      what a module does beside its calls: hooks, and attributes that they change
"""
