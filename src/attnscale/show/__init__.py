"""Results as a person sees them: tables in the terminal, and pages."""
