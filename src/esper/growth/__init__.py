"""Growing models: slots, seeds, blueprints and their promise, and plain models made of them."""
