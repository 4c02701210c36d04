"""Decides: plans, starts and watches stages, schedules and reports. Loads no torch."""
