"""The recipe: its schema (`hpcfed.config.recipe`) and how it is read (`hpcfed.config.load`)."""
