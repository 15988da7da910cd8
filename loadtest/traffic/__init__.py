"""Which requests a load test makes: drawn, or read from a trace."""
