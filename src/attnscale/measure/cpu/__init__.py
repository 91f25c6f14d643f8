"""Measuring on a CPU: attention with its rows from one pass, and the threads it runs on."""
