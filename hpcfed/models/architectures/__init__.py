"""The built-in models, a file for each family: their recipe keys and how to build them, in a table `MODELS`."""
