"""The commands of `esper`, a module each."""
