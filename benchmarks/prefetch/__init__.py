"""Schedules of copies on published and derived traces: ours beside paging policies, the ceiling, and the exact optimum."""
