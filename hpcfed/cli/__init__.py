"""The subcommands of ``hpcfed``, a module each: options, calls into the package, what is printed."""
