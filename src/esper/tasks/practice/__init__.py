"""Tasks for practitioners: data sets by name, ordinary hosts for them, and where those may grow."""
