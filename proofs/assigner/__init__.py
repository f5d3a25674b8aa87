"""A: the bucket assigner and the planner."""
