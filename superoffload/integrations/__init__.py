"""Other people's tools."""
