"""The token suite, Esper's default: where to grow, and what, differs from family to family."""
