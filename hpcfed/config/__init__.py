"""The recipe: its schema (`hpcfed.config.recipe`), how it is read (`hpcfed.config.load`), and user code."""
