"""What a run said, for programs and people: SARIF, one HTML page."""
