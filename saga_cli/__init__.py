"""The `saga` command: the one package that knows all others, and loads them lazily."""
