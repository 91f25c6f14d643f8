"""Results as a person sees them: the terminal now, pages and reports to come."""
