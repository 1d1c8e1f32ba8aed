"""Charts and pages of the tools."""
