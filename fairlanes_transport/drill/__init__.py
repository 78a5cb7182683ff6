"""``fairlanes drill``: the starvation drill, with bounds that it holds a broker against."""
