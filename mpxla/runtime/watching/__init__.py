"""What steps do and cost, for people: metrics, profiles, traces, values, signs of life."""
