"""How a seed lives in a model: slots, blueprints, blending and the growing model."""
