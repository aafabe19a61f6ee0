"""The output of a run for programs and people: SARIF, and one HTML page."""
