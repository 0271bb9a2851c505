"""Growing models: slots, seeds, blueprints and their promise, and the plain models made from them."""
