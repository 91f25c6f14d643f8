"""Tables in the terminal and in notebooks, and HTML pages."""
