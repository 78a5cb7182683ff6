"""``fairlanes demo``: a flood and five quiet tenants, on ``redis://`` and on ``fairlanes://``."""
