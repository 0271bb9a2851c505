"""Bridges carry a run's figures from its store to other tools, in processes of their own: no trainer knows them."""
